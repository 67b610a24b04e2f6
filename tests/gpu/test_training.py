"""Optimizers on devices: the bits of the host, and the same on every replica."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from tests.helpers import result_of

optimizers = ms.optimizers
RULES = {
    "sgd": lambda: optimizers.SGD(0.1),
    "decay": lambda: optimizers.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01),
}
DTYPES = ["f4", "f8", "f2", "F", "bfloat16"]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def trained(strategy, make, gradients, dtype):
    """Return the weights after a step for each list of gradients."""
    with strategy.scope():
        variables = [
            ms.Variable(
                np.linspace(-1, 1, each.size).reshape(each.shape).astype(dtype), name=f"w{i}"
            )
            for i, each in enumerate(gradients[0])
        ]
        optimizer = make()
    for step in gradients:
        placed = [strategy.extended.xp.asarray(each) for each in step]
        pairs = list(zip(placed, variables, strict=True))
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    return [each.numpy() for each in variables], optimizer


def steps_of(rank, dtype, shapes=((1003,), (7, 5), (), (0, 3), (4096,), (4097,)), count=3):
    rng = np.random.default_rng(rank)
    return [
        [np.asarray(rng.standard_normal(s)).astype(dtype) for s in shapes] for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_device_gives_the_bits_of_the_host(gpus, hosts, rank, rule, dtype):
    gradients = steps_of(rank, dtype_of(dtype))
    found, _ = trained(gpus, RULES[rule], gradients, dtype_of(dtype))
    expected, _ = trained(hosts, RULES[rule], gradients, dtype_of(dtype))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("number", [1, 64, 65, 130])
def test_any_number_of_variables_is_updated_in_groups(gpus, hosts, rank, number):
    shapes = [(1 + i % 5,) for i in range(number)]
    gradients = steps_of(rank, np.float32, shapes, 2)
    found, _ = trained(gpus, RULES["adam"], gradients, np.float32)
    expected, _ = trained(hosts, RULES["adam"], gradients, np.float32)
    assert [a.tobytes() for a in found] == [b.tobytes() for b in expected]


@pytest.mark.parametrize(
    "numbers", [[0.0, -0.0, 65504, 65520, 6e-8, 2.9e-8, 1e-7], [np.inf, -np.inf, np.nan]]
)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_halves_are_rounded_as_on_the_host(gpus, hosts, numbers, dtype):
    with np.errstate(all="ignore"):
        gradients = [[np.array(numbers).astype(dtype_of(dtype))]]
        found, _ = trained(gpus, RULES["sgd"], gradients, dtype_of(dtype))
        expected, _ = trained(hosts, RULES["sgd"], gradients, dtype_of(dtype))
        np.testing.assert_array_equal(found[0].astype("f4"), expected[0].astype("f4"))


@pytest.mark.parametrize("clipnorm", [1e-3, 1.0, 1e6])
def test_clipping_by_the_global_norm(gpus, hosts, rank, clipnorm):
    gradients = steps_of(rank, np.float32)

    def make():
        return optimizers.SGD(0.1, momentum=0.9, global_clipnorm=clipnorm)

    found, _ = trained(gpus, make, gradients, np.float32)
    expected, _ = trained(hosts, make, gradients, np.float32)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_a_loss_scale_skips_a_step_that_overflows(gpus, size):
    xp = gpus.extended.xp
    with gpus.scope():
        weight = ms.Variable(np.zeros(10, np.float32), name="w")
        optimizer = optimizers.SGD(0.5, loss_scale=optimizers.LossScale(8.0))
    for gradient in (np.inf, 1.0):

        def step(gradient=gradient):
            scale = optimizer.loss_scale.value
            scaled = xp.full(10, gradient * scale, dtype=np.float32)
            optimizer.apply_gradients([(scaled, weight)])

        gpus.run(step)
    np.testing.assert_allclose(weight.numpy(), np.full(10, -0.5 * size), rtol=1e-6)
    assert int(optimizer.iterations.numpy()) == 1


@pytest.mark.parametrize(
    "make", [*RULES.values(), lambda: optimizers.Adam(0.01, sharded_slots=True)]
)
def test_replicas_stay_equal(gpus, rank, make):
    steps = steps_of(rank, np.float32, [(100, 30), (7,)], 5)
    weights, _ = trained(gpus, make, steps, np.float32)
    own = hashlib.sha1(b"".join(each.tobytes() for each in weights)).hexdigest()
    digests = result_of(gpus, lambda: ms.get_replica_context().all_gather_object(own))
    assert len(set(digests)) == 1


def test_sliced_gradients_add_up_and_touch_their_rows_only(gpus, hosts, rank, size):
    def weights_after(strategy):
        xp = strategy.extended.xp
        with strategy.scope():
            table = ms.Variable(np.ones((size + 2, 3), np.float32), name="table")
            optimizer = optimizers.SGD(1.0)
        values = xp.asarray(np.ones((3, 3), np.float32))
        slices = ms.IndexedSlices(values, xp.asarray([rank, 1, 1]), (size + 2, 3))
        strategy.run(lambda: optimizer.apply_gradients([(slices, table)]))
        return table.numpy()

    np.testing.assert_array_equal(weights_after(gpus), weights_after(hosts))


def test_replicas_on_one_rank(rank, size, monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARE_GPUS", "on")
    found = []
    for device in ("gpu", "cpu"):
        strategy = ms.MPIStrategy(device=device, num_replicas=2 * size)
        with strategy.scope():
            weight, optimizer = (
                ms.Variable(np.zeros(1000, np.float32), name="w"),
                optimizers.Adam(0.1),
            )
        for number in range(3):

            def step(number=number, weight=weight, optimizer=optimizer, xp=strategy.extended.xp):
                replica = ms.get_replica_context().replica_id_in_sync_group
                gradient = np.random.default_rng([number, replica]).standard_normal(1000)
                optimizer.apply_gradients([(xp.asarray(gradient.astype("f4")), weight)])

            strategy.run(step)
        found.append(weight.numpy().tobytes())
        strategy.close()
    assert found[0] == found[1]


def test_accumulated_gradients_and_moving_averages(gpus, rank, size):
    xp = gpus.extended.xp
    with gpus.scope():
        weight = ms.Variable(np.zeros(50, np.float32), name="w")
        averages, optimizer = optimizers.ExponentialMovingAverage(0.75), optimizers.SGD(1.0)
        accumulator = optimizers.GradientAccumulator([weight])
        averages.apply([weight])
    gradient = xp.full(50, rank + 1, dtype=np.float32)

    def step():
        for _ in range(2):
            accumulator.add([(gradient, weight)])
        accumulator.apply(optimizer)

    gpus.run(step)
    averages.apply([weight])
    assert (weight.numpy() == weight.numpy()[0]).all()
    assert weight.numpy()[0] < 0
    np.testing.assert_allclose(averages.average(weight).numpy(), 0.25 * weight.numpy())
