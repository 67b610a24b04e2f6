"""Split variables: each rank of a replica holds a part, the same on all replicas."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from tests.replica_groups import DIVISORS, NUM_RANKS, opened, shards_of

SUM = ms.VariableAggregation.SUM
ON_READ = ms.VariableSynchronization.ON_READ
WHOLE = np.arange(30.0).reshape(2, 5, 3)


@pytest.fixture(params=DIVISORS, ids=lambda each: f"{each} a replica")
def wide(request):
    yield from opened(request.param)


@pytest.fixture
def part(wide):
    """Return this rank's part of an array along an axis."""
    layout = wide.extended._layout

    def cut(array, axis):
        return np.array_split(array, layout.ranks_per_replica, axis)[layout.shard]

    return cut


def block(partition_shape, partition_offset):
    places = [
        slice(offset, offset + size)
        for offset, size in zip(partition_offset, partition_shape, strict=True)
    ]
    return WHOLE[tuple(places)]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("initial", ["array", "function", "block"])
def test_each_rank_holds_its_part(wide, part, axis, initial):
    calls = []

    def make(partition_shape, partition_offset):
        calls.append(partition_shape)
        return block(partition_shape, partition_offset)

    given = {"array": WHOLE + wide.rank, "function": lambda: WHOLE + wide.rank, "block": make}
    shape = {"shape": WHOLE.shape, "dtype": WHOLE.dtype} if initial == "block" else {}
    with wide.scope():
        variable = ms.Variable(given[initial], split_axis=axis, name="v", **shape)
    own = part(WHOLE, axis)
    assert variable.numpy().tolist() == own.tolist()
    assert variable.shape == own.shape == variable.value().shape
    assert variable.full_shape == WHOLE.shape
    assert variable.split_axis == axis % 3
    assert (variable.size, variable.ndim) == (own.size, 3)
    assert calls == ([own.shape] if own.size and initial == "block" else [])
    assert "split along axis" in repr(variable)
    wide.extended.assert_replicas_agree([variable])


def test_parts_may_be_empty(wide, part):
    whole = np.ones((1, 4))
    with wide.scope():
        variable = ms.Variable(whole, split_axis=0, aggregation=SUM)
        sgd = ms.optimizers.SGD(0.5, momentum=0.9)
    own = part(whole, 0)
    gradient = np.ones(own.shape) / wide.num_replicas_in_sync
    wide.run(lambda: sgd.apply_gradients([(gradient, variable)]))
    assert variable.numpy().tolist() == (own * 0.5).tolist()


def test_writes_are_of_the_part(wide, part):
    layout = wide.extended._layout
    with wide.scope():
        variable = ms.Variable(WHOLE, split_axis=1, aggregation=SUM)
    own = part(WHOLE, 1)
    assert variable.assign(own + 1.0).tolist() == (own + 1).tolist()
    variable.assign_sub(np.ones_like(own), read_value=False)
    wide.run(lambda: variable.assign_add(np.full(own.shape, layout.replica_id + 1.0)))
    added = layout.num_replicas * (layout.num_replicas + 1) / 2
    assert variable.numpy().tolist() == (own + added).tolist()
    wide.extended.update(variable, lambda v: v.assign(own))
    assert variable.numpy().tolist() == own.tolist()
    row = ms.IndexedSlices(np.ones((1, *own.shape[1:])), [1])
    variable.scatter_add(row)
    assert variable.numpy()[1].tolist() == (own[1] + 1).tolist()
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros((9, 9, 9)))


def test_gradients_and_slots_are_of_the_part(wide, part):
    with wide.scope():
        variable, plain = ms.Variable(WHOLE, split_axis=2, name="v"), ms.Variable(WHOLE, name="p")
        adam = ms.optimizers.Adam(0.1)
    gradient = np.sin(WHOLE) / wide.num_replicas_in_sync
    for _ in range(3):
        wide.run(adam.apply_gradients, args=([(part(gradient, 2), variable), (gradient, plain)],))
    assert np.allclose(variable.numpy(), part(plain.numpy(), 2), rtol=1e-12)
    slot = adam.slot(variable, "first_moment")
    assert (slot.full_shape, slot.shape, slot.split_axis) == (WHOLE.shape, variable.shape, 2)


@pytest.mark.parametrize("case", ["clip", "scale", "overflow"])
def test_norms_are_of_whole_variables(wide, part, case):
    alone = ms.OneDeviceStrategy()
    values = []
    for strategy, cut in ((alone, lambda array, axis: array), (wide, part)):
        with strategy.scope():
            split, plain = ms.Variable(WHOLE, split_axis=1), ms.Variable(np.ones(3))
            scale = None if case == "clip" else ms.optimizers.LossScale(4.0)
            sgd = ms.optimizers.SGD(1.0, global_clipnorm=2.0, loss_scale=scale)
        factor = 1.0 if scale is None else scale.value
        gradients = np.cos(WHOLE) * factor, np.full(3, 2.0 * factor)
        if case == "overflow":
            gradients[0][0, 0, 0] = np.inf  # on the first rank of a replica alone
        shares = [each / strategy.num_replicas_in_sync for each in gradients]
        strategy.run(sgd.apply_gradients, args=([(cut(shares[0], 1), split), (shares[1], plain)],))
        values.append(
            (cut(split.numpy(), 1) if strategy is alone else split.numpy(), plain.numpy())
        )
    (whole, same), (own, plain) = values
    assert np.allclose(own, part(whole, 1), rtol=1e-12)
    assert np.allclose(plain, same, rtol=1e-12)
    assert case != "overflow" or plain.tolist() == [1.0] * 3


def test_averages_and_accumulated_gradients_are_of_the_part(wide, part):
    with wide.scope():
        variable = ms.Variable(WHOLE, split_axis=1, name="v")
        averages = ms.optimizers.ExponentialMovingAverage(0.5)
        sums = ms.optimizers.GradientAccumulator([variable])
        sgd = ms.optimizers.SGD(1.0)
    averages.apply([variable])
    own = part(WHOLE, 1)
    assert averages.average(variable).numpy().tolist() == own.tolist()
    for _ in range(2):
        wide.run(lambda: sums.add([(np.ones(own.shape), variable)]))
    sums.apply(sgd)
    assert variable.numpy().tolist() == (own - 2 * wide.num_replicas_in_sync).tolist()


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_out_of_range_is_refused_everywhere(wide, axis):
    with wide.scope():
        with pytest.raises(ValueError, match=r"split_axis -?\d is out of range .* \(2, 5, 3\)"):
            ms.Variable(WHOLE, split_axis=axis)
        with pytest.raises(ValueError, match="out of range"):
            ms.Variable(1.0, split_axis=0)
        for wrong in (1.0, True, "0"):
            with pytest.raises(TypeError, match="split_axis must be an integer"):
                ms.Variable(WHOLE, split_axis=wrong)
    with pytest.raises(ValueError, match="out of range"):
        ms.Variable(WHOLE, split_axis=axis)
    assert wide.reduce("sum", 1) == wide.num_replicas_in_sync


def test_ranks_must_agree_on_the_axis(strategy, others):
    with strategy.scope(), pytest.raises(CollectiveMismatchError, match="split along axis 1"):
        ms.Variable(WHOLE, split_axis=0 if others else 1, name="v")


def test_elsewhere_the_part_is_all():
    partitioner = ms.partitioners.FixedShardsPartitioner(2)
    cutting = ms.MPIStrategy(variable_partitioner=partitioner)
    central = ms.CentralStorageStrategy()
    for scope in (ms.OneDeviceStrategy().scope(), central.scope(), cutting.scope()):
        with scope:
            variable = ms.Variable(WHOLE, split_axis=1)
        assert (variable.shape, variable.full_shape) == (WHOLE.shape, WHOLE.shape)
        assert variable.split_axis == 1
    plain = ms.Variable(WHOLE, split_axis=1)
    assert (plain.full_shape, plain.split_axis) == (WHOLE.shape, 1)
    assert ms.Variable(WHOLE).split_axis is None
    central.close()
    cutting.close()


@pytest.mark.skipif(NUM_RANKS == 1, reason="no replica spans several ranks")
def test_slots_are_not_divided_over_ranks_of_a_replica():
    for wide in opened(NUM_RANKS):
        with wide.scope(), pytest.raises(NotImplementedError, match="sharded_slots"):
            ms.optimizers.Adam(0.1, sharded_slots=True)
        outside = ms.optimizers.Adam(0.1, sharded_slots=True)
        with wide.scope():
            variable = ms.Variable(np.ones(4))
        del outside
        assert variable.split_axis is None


def test_drift_of_one_shard_is_found_by_all(wide):
    layout = wide.extended._layout
    with wide.scope():
        split, plain = ms.Variable(WHOLE, split_axis=1, name="s"), ms.Variable(0.0, name="p")
    wide.extended.assert_replicas_agree([split, plain])
    if layout.num_replicas > 1:
        if wide.rank == NUM_RANKS - 1:
            split.storage.fill(7)
        last = layout.ranks_per_replica - 1
        with pytest.raises(ms.errors.ReplicaDriftError, match=f"rank {NUM_RANKS - 1}") as caught:
            wide.extended.assert_replicas_agree([plain, split])
        if last:
            assert "rank 0" not in str(caught.value)
        split.assign(split.numpy() * 0)
    if layout.ranks_per_replica > 1:
        plain.storage.fill(layout.shard)
        with pytest.raises(ms.errors.ReplicaDriftError, match="'p'"):
            wide.extended.assert_replicas_agree([split, plain])


def test_a_layer_in_columns_and_rows_is_the_whole_layer(wide, part):
    columns, rows, x = np.arange(12.0).reshape(2, 6) - 5, np.arange(18.0).reshape(6, 3), np.eye(2)
    with wide.scope():
        w1, w2 = ms.Variable(columns, split_axis=1), ms.Variable(rows, split_axis=0)

    def step():
        return shards_of().all_reduce("sum", np.maximum(x @ w1.value(), 0) @ w2.value())

    expected = np.maximum(x @ columns, 0) @ rows
    assert wide.run(step).values[0].tolist() == expected.tolist()
