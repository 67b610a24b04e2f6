"""The bits of reductions of replicas, against a tree that is written down independently."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import mpistrat as ms
from mpistrat.replicas.replica_reducer import ReplicaReducer
from tests.tree_reduction import values_of

COMBINE = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def tree(op, rows):
    """Combine rows as section "Same bits" of the guide says, in the dtype of the rows."""
    rows, step = [row.copy() for row in rows], 1
    num = len(rows)
    while step < num:
        for i in range(0, num - step, 2 * step):
            rows[i] = COMBINE[op](rows[i], rows[i + step])
        step *= 2
    total = rows[0]
    for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
        if op == "mean":
            part[...] = part / part.dtype.type(num)
        part[np.isnan(part)] = np.nan
    return total


def expected(op, rows):
    dtype = rows[0].dtype
    if dtype.name in ("float16", "bfloat16"):
        return tree(op, [row.astype(np.float32) for row in rows]).astype(dtype)
    if dtype.kind in "iu":
        return (
            tree(op, [row.astype(np.float64) for row in rows])
            if op == "mean"
            else tree_of_integers(op, rows)
        )
    return tree(op, rows)


def tree_of_integers(op, rows):
    total = rows[0].copy()
    for row in rows[1:]:
        total = COMBINE[op](total, row)
    return total


@pytest.fixture(scope="module", params=[4, 5, 7, 12])
def replicas(request):
    strategy = ms.MPIStrategy(device="cpu", num_replicas=request.param)
    yield strategy
    strategy.close()


@pytest.mark.thorough_product
@pytest.mark.parametrize("op", list(COMBINE))
@pytest.mark.parametrize(
    "dtype",
    [
        *(bfloat16, "f4", "c8", "u2"),
        *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in ("f2", "f8", "i4")),
    ],
)
def test_every_op_and_dtype(replicas, op, dtype):
    if np.dtype(dtype).kind == "c" and op not in ("sum", "mean"):
        pytest.skip("has no order, or is multiplied by parts")
    num = replicas.num_replicas_in_sync
    for length in (1, 1_003, 60_001):
        rows = [values_of(each, length, dtype, seed=length) for each in range(num)]
        if np.dtype(dtype).kind == "f":
            rows[1][0] = np.nan

        def fn(rows=rows):
            replica = ms.get_replica_context()
            return replica.all_reduce(op, rows[replica.replica_id_in_sync_group])

        with np.errstate(all="ignore"):
            wanted = expected(op, rows)
        for found in replicas.run(fn).values:
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes(), length


def test_packs_of_many_arrays(replicas):
    num = replicas.num_replicas_in_sync
    rows = [values_of(each, 30_000, "f4") for each in range(num)]

    def fn():
        replica = ms.get_replica_context()
        own = rows[replica.replica_id_in_sync_group]
        parts = np.split(own, [1, 400, 20_000])
        return np.concatenate(replica.all_reduce("sum", parts))

    for found in replicas.run(fn).values:
        assert found.tobytes() == tree("sum", rows).tobytes()
    assert ms.testing.reduction_tree(np.stack(rows)).tobytes() == tree("sum", rows).tobytes()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_without_compiled_code(replicas, op, monkeypatch):
    monkeypatch.setattr(ReplicaReducer, "_compiled", lambda self, op, message: None)
    num = replicas.num_replicas_in_sync
    for length in (3, 30_011):
        rows = [values_of(each, length, "f4") for each in range(num)]

        def fn(rows=rows):
            replica = ms.get_replica_context()
            return replica.all_reduce(op, np.split(rows[replica.replica_id_in_sync_group], [2]))

        for found in replicas.run(fn)[1].values:
            assert found.tobytes() == expected(op, rows)[2:].tobytes()


def test_one_device_has_the_same_bits(replicas):
    num = replicas.num_replicas_in_sync
    rows = [values_of(each, 501, "f4") for each in range(num)]

    def fn():
        replica = ms.get_replica_context()
        return replica.all_reduce("mean", rows[replica.replica_id_in_sync_group])

    alone = ms.OneDeviceStrategy("cpu:0", num_replicas=num)
    assert alone.run(fn).values[0].tobytes() == replicas.run(fn).values[0].tobytes()
    assert alone.num_replicas_in_sync == num
    assert list(alone.extended.local_replica_ids) == list(range(num))


def test_the_tree_of_rows():
    with pytest.raises(ValueError, match="needs rows"):
        ms.testing.reduction_tree(1.0)
    with pytest.raises(ValueError, match="needs rows"):
        ms.testing.reduction_tree(np.zeros((0, 3)))
    with pytest.raises(TypeError):
        ms.testing.reduction_tree([True, False])
    half = np.full((3, 2), 0.1, np.float16)
    assert ms.testing.reduction_tree(half).dtype == np.float16
