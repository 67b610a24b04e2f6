"""The worked examples and the documented errors of tf.distribute, in NumPy, at any size."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError
from tests import devices


def local(strategy, value):
    (component,) = strategy.experimental_local_results(value)
    return component


# Strategy


def test_distribute_dataset_with_options(strategy, rank, size):
    options = ms.InputOptions(
        experimental_replication_mode=ms.InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device=False,
    )
    data = ms.data.Dataset.range(16).batch(16)
    (batch,) = strategy.experimental_distribute_dataset(data, options)
    share = -(-16 // size)
    assert local(strategy, batch).tolist() == list(range(16))[rank * share : (rank + 1) * share]


def test_values_for_each_worker_device(strategy, rank):
    on_devices = [(device, 1.0) for device in strategy.extended.worker_devices]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: on_devices[context.replica_id_in_sync_group]
    )
    device, one = local(strategy, values)
    place = f"/job:worker/replica:0/task:{rank}/device:{devices.name()}:{devices.index(rank)}"
    assert device == place
    assert one == 1.0


def test_value_context_made_by_hand():
    context = ms.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    assert context.replica_id_in_sync_group / context.num_replicas_in_sync == 0.5
    assert (ms.ValueContext().replica_id_in_sync_group, ms.ValueContext().num_replicas_in_sync) == (
        0,
        1,
    )


def test_input_context_made_by_hand():
    context = ms.InputContext(num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="13 is not divisible.* 6"):
        context.get_per_replica_batch_size(13)


# StrategyExtended


def test_colocate_vars_with(strategy):
    with strategy.scope():
        first = ms.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second = ms.Variable(2.0)
            third = ms.Variable(3.0)

        def fn(v1, v2, v3):
            return v1.assign(v2 + v3)

        strategy.extended.update(first, fn, args=(second, third))
    assert first.numpy() == 5.0


def add_one_from_each_replica(strategy, reduce_to):
    """The step of the examples of reduce_to and batch_reduce_to; return the variable."""

    def merge_fn(strategy, value, variable):
        reduced = reduce_to(strategy.extended, value, variable)
        strategy.extended.update(variable, lambda var, value: var.assign(value), args=(reduced,))

    def step_fn(variable):
        ms.get_replica_context().merge_call(merge_fn, args=(1.0, variable))

    with strategy.scope():
        variable = ms.Variable(0.0)
        strategy.run(step_fn, args=(variable,))
    return variable


@pytest.mark.parametrize(
    "reduce_to",
    [
        lambda extended, value, var: extended.reduce_to(ms.ReduceOp.SUM, value, destinations=var),
        lambda extended, value, var: extended.batch_reduce_to(ms.ReduceOp.SUM, [(value, var)])[0],
    ],
    ids=["reduce_to", "batch_reduce_to"],
)
def test_reduce_to_and_update(strategy, size, reduce_to):
    assert add_one_from_each_replica(strategy, reduce_to).values == (float(size),)
    assert add_one_from_each_replica(ms.OneDeviceStrategy("cpu:0"), reduce_to).values == (1.0,)
    assert float(add_one_from_each_replica(ms.get_strategy(), reduce_to)) == 1.0


def test_local_results_hold_this_ranks_component_alone(strategy, rank):
    def merge_fn(strategy, replica_id):
        return sum(strategy.experimental_local_results(replica_id))

    result = strategy.run(lambda: ms.get_replica_context().merge_call(merge_fn, args=(rank,)))
    assert result.values == (rank,)


# ReplicaContext


def test_merge_call_outside_every_scope_is_a_plain_call():
    def merge_fn(strategy, value, *, factor):
        assert strategy is ms.get_strategy()
        assert ms.in_cross_replica_context()
        return value * factor

    assert ms.get_replica_context().merge_call(merge_fn, (3,), {"factor": 2}) == 6
    assert not ms.in_cross_replica_context()


# The errors that tf.distribute documents


CROSS_REPLICA_CALLS = {
    "run": lambda s, v: s.run(lambda: 1),
    "scope": lambda s, v: s.scope().__enter__(),
    "reduce": lambda s, v: s.reduce("sum", 1),
    "reduce_to": lambda s, v: s.extended.reduce_to("sum", 1, v),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to("sum", [(1, v)]),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(1, v),
    "call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(lambda: 1),
    "update": lambda s, v: s.extended.update(v, lambda v: v.assign(2.0)),
    "read_var": lambda s, v: s.extended.read_var(v),
    "experimental_make_numpy_dataset": lambda s, v: s.experimental_make_numpy_dataset(np.ones(2)),
    "experimental_distribute_dataset": lambda s, v: s.experimental_distribute_dataset(batches()),
    "distribute_datasets_from_function": lambda s, v: s.distribute_datasets_from_function(batches),
}


def batches(context=None):
    return ms.data.Dataset.range(8).batch(4)


# The context is looked at before the arguments.
WITH_BAD_ARGUMENTS = {"update of no variable": lambda s, v: s.extended.update(None, lambda v: v)}
IN_REPLICA_CONTEXT = CROSS_REPLICA_CALLS | WITH_BAD_ARGUMENTS


@pytest.mark.parametrize("call", IN_REPLICA_CONTEXT.values(), ids=IN_REPLICA_CONTEXT)
def test_what_needs_cross_replica_context_points_to_merge_call(strategy, size, call):
    with strategy.scope():
        variable = ms.Variable(1.0)

    def fn():
        with pytest.raises(ContextError, match=r"needs the cross-replica context.*merge_call\(fn"):
            call(strategy, variable)

    strategy.run(fn)
    assert variable.numpy() == 1.0
    assert strategy.reduce("sum", 1) == size


@pytest.mark.parametrize("call", CROSS_REPLICA_CALLS.values(), ids=CROSS_REPLICA_CALLS)
def test_what_points_to_merge_call_works_there(strategy, call):
    with strategy.scope():
        variable = ms.Variable(1.0)

    def merge_fn(strategy):
        entered = call(strategy, variable)
        assert entered is not None

    strategy.run(lambda: ms.get_replica_context().merge_call(merge_fn))


@pytest.mark.parametrize("make", ["make_dataset_iterator", "make_input_fn_iterator"])
def test_iterators_are_made_in_the_scope_of_their_strategy_alone(strategy, size, make):
    argument = batches() if make == "make_dataset_iterator" else batches
    other = ms.OneDeviceStrategy()
    message = rf"{make} of .*MPIStrategy.*OneDeviceStrategy.*mixed or nested"
    with (
        other.scope(),
        pytest.warns(DeprecationWarning, match=make),
        pytest.raises(ContextError, match=message),
    ):
        getattr(strategy, make)(argument)
    assert strategy.reduce("sum", 1) == size


TAKE_NEXT = {
    "next": next,
    "get_next": lambda iterator: iterator.get_next(),
    "get_next_as_optional": lambda iterator: iterator.get_next_as_optional(),
}


@pytest.mark.parametrize("take", TAKE_NEXT.values(), ids=TAKE_NEXT)
@pytest.mark.parametrize("from_function", [False, True])
def test_elements_are_taken_in_cross_replica_context_alone(strategy, rank, take, from_function):
    if from_function:
        distributed = strategy.distribute_datasets_from_function(batches)
    else:
        distributed = strategy.experimental_distribute_dataset(batches())
    iterator = iter(distributed)

    def fn():
        message = r"next\(iterator\) needs the cross-replica context.*merge_call"
        with pytest.raises(ContextError, match=message):
            take(iterator)

    strategy.run(fn)
    with ms.OneDeviceStrategy().scope(), pytest.raises(ContextError, match="mixed or nested"):
        take(iterator)
    assert distributed.state_dict()["batch"] == 0
    strategy.run(lambda: ms.get_replica_context().merge_call(lambda strategy: take(iterator)))
    assert distributed.state_dict()["batch"] == 1
    strategy.run(lambda: next(iter(batches())))  # a plain data set is this replica's own


def test_gather_in_replica_context_points_to_all_gather(strategy):
    def fn():
        with pytest.raises(ContextError, match=r"gather needs the cross-replica.*all_gather\(\)"):
            strategy.gather([1], 0)

    strategy.run(fn)


@pytest.mark.parametrize("name", [name for name in CROSS_REPLICA_CALLS if name != "read_var"])
def test_mixed_strategies_are_both_named(strategy, name):
    other = ms.OneDeviceStrategy()
    with strategy.scope():
        variable = ms.Variable(1.0)
        with pytest.raises(ContextError, match=r"OneDeviceStrategy.*MPIStrategy.*mixed or nested"):
            CROSS_REPLICA_CALLS[name](other, variable)
        assert ms.get_strategy() is strategy


def test_a_variable_of_another_strategy_is_refused(strategy):
    with strategy.scope():
        variable = ms.Variable(1.0)
    message = r"'Variable.*MPIStrategy.*OneDeviceStrategy.*mixed"
    with ms.OneDeviceStrategy().scope(), pytest.raises(ContextError, match=message):
        variable.assign(2.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda replica: replica.all_reduce("sum", 1),
        lambda replica: replica.start_all_reduce("sum", 1),
        lambda replica: replica.all_gather(np.ones(1), 0),
        lambda replica: replica.merge_call(lambda strategy: None),
        lambda replica: replica.replica_id_in_sync_group,
        lambda replica: replica.num_replicas_in_sync,
        lambda replica: replica.strategy,
        lambda replica: replica.devices,
    ],
    ids=[
        "all_reduce",
        "start_all_reduce",
        "all_gather",
        "merge_call",
        "replica_id_in_sync_group",
        "num_replicas_in_sync",
        "strategy",
        "devices",
    ],
)
def test_a_replica_context_serves_in_its_own_run_only(strategy, use):
    def merge_fn(strategy, outer):
        with pytest.raises(ContextError, match="cross-replica context.*the strategy that it is"):
            use(outer)

    def fn():
        replica = ms.get_replica_context()
        replica.merge_call(merge_fn, args=(replica,))
        return replica

    ended = strategy.run(fn)
    with pytest.raises(ContextError, match=r"default context.*inside strategy\.run"):
        use(ended)

    def next_run():
        with pytest.raises(ContextError, match=r"replica context.*get_replica_context\(\)"):
            use(ended)

    strategy.run(next_run)


def test_a_scope_needed_is_named(strategy):
    with strategy.scope():
        variable = ms.Variable(1.0)
    with pytest.raises(ContextError, match=r'MPIStrategy.*"with strategy\.scope\(\):"'):
        strategy.extended.colocate_vars_with(variable)


def test_a_replica_context_of_another_replica_cannot_be_made(strategy, rank, size):
    with pytest.raises(ValueError, match=f"owns replica {rank}, not {size}"):
        ms.ReplicaContext(strategy, size)
    with ms.ReplicaContext(strategy, replica_id_in_sync_group=rank) as replica:
        assert ms.get_replica_context() is replica
        assert replica.all_reduce("sum", 1) == size


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.run(lambda x: x, args=3), ValueError, "list or tuple"),
        (lambda s: s.run(lambda *x: x, args="ab"), ValueError, "list or tuple.*'ab' of type str"),
        (lambda s: s.run(lambda *x: x, args={"a": 1}), ValueError, "list or tuple.*type dict"),
        (lambda s: s.run(lambda *x: x, args=np.ones(2)), ValueError, "list or tuple.*type ndarray"),
        (lambda s: s.reduce("median", 1.0), ValueError, "Unknown reduction 'median'"),
        (lambda s: s.reduce(3, 1.0), TypeError, "ReduceOp"),
        (lambda s: s.reduce(ms.VariableAggregation.SUM, 1), TypeError, "ReduceOp"),
        (lambda s: s.reduce("sum", "text"), TypeError, "a leaf of the value is 'text'"),
        (lambda s: s.reduce("sum", None), TypeError, "the value is None on rank"),
        (lambda s: s.reduce("sum", np.array(["a"])), TypeError, "SUM cannot reduce.*<U1"),
        (lambda s: s.reduce("max", np.ones(2, complex)), TypeError, "MAX cannot.*complex128"),
        (lambda s: s.reduce("sum", 1, axis=0), ValueError, r"shape \(\)\. Use axis=None"),
        (lambda s: s.reduce("sum", np.ones((2, 2)), axis=(0, 0)), ValueError, "one axis twice"),
        (lambda s: s.reduce("sum", np.ones((2, 2)), axis=(0, "1")), TypeError, "an integer"),
        (lambda s: s.reduce("mean", np.ones(2), axis=0.5), TypeError, "axis must be an integer"),
        (lambda s: s.reduce("mean", np.ones(2), axis=1), ValueError, "axis 1 is out of range"),
        (lambda s: s.reduce("mean", np.ones(2), axis=-2), ValueError, "axis -2 is out of range"),
        (lambda s: s.extended.reduce_to("sum", 1, ["cpu:0"]), TypeError, "destinations must be"),
        (lambda s: s.extended.reduce_to("sum", 1, None), ValueError, "destinations is None"),
        (lambda s: s.extended.reduce_to("sum", 1, "tpu:0"), ValueError, "Unknown device 'tpu:0'"),
        (lambda s: s.extended.reduce_to("sum", 1, ""), ValueError, "Unknown device ''"),
        (lambda s: s.extended.reduce_to("sum", 1, "cpu:1"), ValueError, "'cpu:1' is not a device"),
        pytest.param(
            lambda s: s.extended.reduce_to("sum", 1, "gpu:0"),
            ValueError,
            "'gpu:0' is not a device",
            marks=pytest.mark.host_memory,
        ),
        (
            lambda s: s.extended.reduce_to("sum", 1, "/job:worker/task:99/device:CPU:0"),
            ValueError,
            "on task 99, but the tasks are 0 to",
        ),
        (
            lambda s: s.extended.reduce_to(ms.VariableAggregation.SUM, 1, "cpu:0"),
            TypeError,
            "ReduceOp",
        ),
        (
            lambda s: s.extended.batch_reduce_to(ms.VariableAggregation.MEAN, []),
            TypeError,
            "ReduceOp",
        ),
        (lambda s: s.extended.broadcast_to(1.0, None), ValueError, "destinations is None"),
        (lambda s: s.extended.broadcast_to(1.0, ["cpu:0"]), TypeError, "destinations must be"),
        (lambda s: s.extended.broadcast_to(1.0, "tpu:0"), ValueError, "Unknown device 'tpu:0'"),
        (
            lambda s: s.extended.broadcast_to(1.0, "/job:worker/task:0/device:CPU:0"),
            ValueError,
            'Use "cpu:0"',
        ),
        (lambda s: s.gather(np.float32(1), 0), ValueError, "0-d"),
        (lambda s: s.gather(3.0, 0), ValueError, "0-d"),
        (lambda s: s.gather(np.array(3.0), 0), ValueError, "0-d"),
        (lambda s: s.gather(np.ones((2, 2)), 2), ValueError, "axis 2 is out of range"),
        (lambda s: s.gather(np.ones((2, 2)), -3), ValueError, "axis -3 is out of range"),
        (lambda s: s.gather(np.ones(2), 0.5), TypeError, "axis must be an integer, not 0.5"),
        (
            lambda s: s.gather(ms.IndexedSlices(np.ones((1, 2)), np.array([0])), 0),
            NotImplementedError,
            "IndexedSlices",
        ),
        (lambda s: s.extended.update(1.0, lambda v: v), TypeError, "must be a mpistrat.Variable"),
    ],
)
def test_bad_arguments(strategy, size, call, error, message):
    with pytest.raises(error, match=message):
        call(strategy)
    assert strategy.reduce("sum", 1) == size


def test_all_gather_of_slices_is_refused(strategy):
    slices = ms.IndexedSlices(np.ones((1, 2)), np.array([0]))

    def fn():
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            ms.get_replica_context().all_gather({"rows": slices}, 0)

    strategy.run(fn)


def test_assigning_says_which_context_or_aggregation_is_needed(strategy):
    with strategy.scope():
        variable = ms.Variable(1.0, name="weight")

    message = r"'weight'.*aggregation=VariableAggregation.*merge_call"

    def fn():
        with pytest.raises(ValueError, match=message):
            variable.assign(2.0)

    strategy.run(fn)
    with strategy.scope(), pytest.raises(ValueError, match=r"'weight'.*PerReplica.*strategy\.run"):
        variable.assign(ms.PerReplica(2.0))
    with pytest.raises(ValueError, match="'weight'.*PerReplica.*reduce_to"):
        strategy.extended.update(variable, lambda v, x: v.assign(x), kwargs={"x": ms.PerReplica(2)})
    assert variable.numpy() == 1.0


def test_the_default_strategy_wraps_nothing():
    default = ms.get_strategy()
    variable = ms.Variable(1.0)
    value = np.arange(3.0)
    assert default.run(lambda x: x, args=(value,)) is value
    assert default.reduce("sum", value) is value
    assert default.reduce("sum", value, axis=0) == 3.0
    for destination in (variable, value, "cpu:0"):
        reduced = default.extended.reduce_to("sum", value, destination)
        assert isinstance(reduced, np.ndarray)
        assert reduced.tolist() == [0, 1, 2]
        assert isinstance(default.extended.broadcast_to(value, destination), np.ndarray)
    assert default.gather(value, 0).tolist() == [0, 1, 2]
    assert isinstance(default.extended.update(variable, lambda v: v.assign(4.0)), np.ndarray)
    assert default.extended.update(variable, lambda v: v.assign(5.0), group=False) == (5.0,)
    assert default.extended.value_container(value) is value
    data = ms.data.Dataset.range(4).batch(2)
    assert default.experimental_distribute_dataset(data) is data
    assert default.distribute_datasets_from_function(lambda context: data) is data
    values_of = default.experimental_distribute_values_from_function
    assert values_of(lambda context: context) == ms.ValueContext(0, 1)
    assert default.num_replicas_in_sync == 1


@pytest.mark.parametrize("name", ["worker_devices", "parameter_devices"])
def test_the_default_strategy_has_no_devices(name):
    with pytest.raises(ContextError, match="Enter the scope"):
        getattr(ms.get_strategy().extended, name)


def test_loss_reduction(strategy):
    assert ms.get_loss_reduction() is ms.ReduceOp.SUM
    with strategy.scope():
        assert ms.get_loss_reduction() is ms.ReduceOp.SUM
