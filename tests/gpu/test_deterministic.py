"""``deterministic=True`` on devices: the bits of the tree, which are those of host arrays."""

import numpy as np
import pytest

import mpistrat as ms
from tests.helpers import result_of
from tests.tree_reduction import expected_reduction, values_of

DETERMINISTIC = ms.CommunicationOptions(deterministic=True)
DTYPES = ["f2", "f4", "f8", "i4", "u8", "c8", "c16"]
CASES = [(op, dtype) for op in ("sum", "prod") for dtype in DTYPES]
CASES += [("mean", dtype) for dtype in DTYPES if np.dtype(dtype).kind in "fc"]
CASES += [(op, dtype) for op in ("min", "max") for dtype in DTYPES if np.dtype(dtype).kind in "fiu"]


def reduced(strategy, op, value):
    return result_of(
        strategy, lambda: ms.get_replica_context().all_reduce(op, value, DETERMINISTIC)
    )


def tree(op, rows):
    wide = [row.astype("f4") if row.dtype == np.float16 else row for row in rows]
    with np.errstate(all="ignore"):
        return expected_reduction(op, wide).astype(rows[0].dtype)


@pytest.mark.parametrize(("op", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(), (7, 5), (70_001,)], ids=str)
def test_every_op_and_dtype_follows_the_tree(gpus, to_device, op, dtype, shape):
    rows = [values_of(rank, shape, dtype) for rank in range(gpus.size)]
    own = to_device(rows[gpus.rank])
    expected = tree(op, rows).tobytes()
    for _ in range(3):  # of which the later ones are repeated reductions
        assert reduced(gpus, op, own).get().tobytes() == expected
    np.testing.assert_array_equal(own.get(), rows[gpus.rank])


@pytest.mark.parametrize("num_arrays", [3, 200])
def test_packs_have_the_bits_of_single_arrays(gpus, hosts, to_device, num_arrays):
    own = [values_of(gpus.rank, (each % 50 + 1, 3), "f4") for each in range(num_arrays)]
    on_host = reduced(hosts, "sum", own)
    for _ in range(3):
        found = reduced(gpus, "sum", [to_device(array) for array in own])
        for array, expected in zip(found, on_host, strict=True):
            assert array.get().tobytes() == expected.tobytes()


def test_training_has_the_bits_of_the_host(gpus, to_device):
    """The sums of gradients in `apply_gradients` follow the options of the strategy, too."""
    weights = []
    for device in ("gpu", "cpu"):
        strategy = ms.MPIStrategy(device=device, communication_options=DETERMINISTIC)
        with strategy.scope():
            variable = ms.Variable(np.zeros(1000, np.float32), name="w")
            optimizer = ms.optimizers.SGD(0.1, momentum=0.9)

        def step(number, strategy=strategy, variable=variable, optimizer=optimizer):
            gradient = strategy.extended.xp.asarray(values_of(gpus.rank + number, (1000,), "f4"))
            optimizer.apply_gradients([(gradient * np.float32(1e-3), variable)])

        for number in range(4):
            strategy.run(step, args=(number,))
        weights.append(variable.numpy().tobytes())
        strategy.close()
    assert weights[0] == weights[1]
