"""What tf.distribute keeps for programs of its version 1, and what it has deprecated."""

import copy
import gc

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError, OutOfRangeError
from tests import devices
from tests.helpers import filenames

ON_READ = ms.VariableSynchronization.ON_READ
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN


def deprecated(name):
    return pytest.warns(DeprecationWarning, match=rf"^{name} is deprecated\. Use |^{name}.*Every")


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return ms.Variable(1.0, name="weight", aggregation=SUM)


# Iterators


def test_unwrap(strategy, rank):
    with deprecated("unwrap") as caught:
        assert strategy.unwrap(ms.PerReplica(rank)) == (rank,)
    assert filenames(caught) == [__file__]


def test_dataset_iterator(strategy, rank, size):
    data = ms.data.Dataset.range(4 * size).batch(2 * size)
    with deprecated("make_dataset_iterator"):
        iterator = strategy.make_dataset_iterator(data)
    for _ in range(2):
        iterator.initialize()
        for first in (0, 2 * size):
            with deprecated("experimental_run"):
                doubled = strategy.experimental_run(lambda x: x * 2, iterator)
            expected = [2 * (first + 2 * rank), 2 * (first + 2 * rank + 1)]
            assert doubled.values[0].tolist() == expected
        with pytest.raises(OutOfRangeError, match="initialize"):
            iterator.get_next()
        assert not iterator.get_next_as_optional().has_value()


def test_initialising_skips_no_pass_and_breaks_one_off(strategy, size):
    data = ms.data.Dataset.range(8 * size).shuffle(seed=0).batch(4 * size)
    distributed = strategy.experimental_distribute_dataset(data)
    passes = [[batch.values[0].tolist() for batch in distributed] for _ in range(2)]
    assert passes[0] != passes[1]
    with deprecated("make_dataset_iterator"):
        iterator = strategy.make_dataset_iterator(data)
    iterator.initialize()
    iterator.initialize()
    assert iterator.get_next().values[0].tolist() == passes[0][0]
    iterator.initialize()
    assert iterator.get_next().values[0].tolist() == passes[1][0]
    assert iterator.get_next_as_optional().get_value().values[0].tolist() == passes[1][1]


def test_input_fn_iterator(strategy, rank, size):
    def input_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (size, rank)
        batch_size = context.get_per_replica_batch_size(3 * size)
        return ms.data.Dataset.from_arrays(np.full(6, rank)).batch(batch_size)

    with strategy.scope():
        with deprecated("make_input_fn_iterator"):
            iterator = strategy.make_input_fn_iterator(input_fn)
        with deprecated("experimental_run"):
            result = strategy.experimental_run(lambda x: x, iterator)
    assert result.values[0].tolist() == [rank] * 3


def test_input_fn_iterator_once_per_worker_only(strategy):
    mode = ms.InputReplicationMode.PER_REPLICA
    with deprecated("make_input_fn_iterator"), pytest.raises(ValueError, match="PER_WORKER"):
        strategy.make_input_fn_iterator(lambda context: None, replication_mode=mode)


def test_experimental_run_without_input(strategy, rank):
    with deprecated("experimental_run"):
        result = strategy.experimental_run(lambda: ms.get_replica_context().strategy is strategy)
    assert result.values == (True,)


def test_experimental_run_takes_no_input_where_it_cannot_run(strategy):
    with deprecated("make_dataset_iterator"):
        iterator = strategy.make_dataset_iterator(ms.data.Dataset.range(1).batch(1))

    def fn():
        message = "experimental_run needs the cross-replica context.*merge_call"
        with deprecated("experimental_run"), pytest.raises(ContextError, match=message):
            strategy.experimental_run(lambda x: x, iterator)

    strategy.run(fn)
    assert iterator.get_next_as_optional().has_value()


def test_datasets_from_function_under_its_old_name(strategy, rank):
    with deprecated("experimental_distribute_datasets_from_function"):
        batches = strategy.experimental_distribute_datasets_from_function(
            lambda context: ms.data.Dataset.from_arrays(np.array([rank])).batch(1)
        )
    assert [batch.values[0].tolist() for batch in batches] == [[rank]]


# Data sets of arrays


def test_numpy_dataset(strategy, size):
    dataset = strategy.experimental_make_numpy_dataset(np.ones([10 * size], np.float32))
    batches = strategy.experimental_distribute_dataset(dataset.batch(10 * size))
    assert [batch.values[0].tolist() for batch in batches] == [[1.0] * 10]


@pytest.mark.parametrize("of", [lambda s: s, lambda s: s.extended], ids=["strategy", "extended"])
def test_lists_of_arrays_are_stacked(strategy, of):
    nest = {"x": [np.array([1, 2]), np.array([3, 4]), np.array([5, 6])], "y": (np.arange(3),)}
    examples = list(of(strategy).experimental_make_numpy_dataset(nest))
    assert [example["x"].tolist() for example in examples] == [[1, 2], [3, 4], [5, 6]]
    assert [example["y"][0] for example in examples] == [0, 1, 2]
    with pytest.raises(ValueError, match="same shape"):
        of(strategy).experimental_make_numpy_dataset([np.ones(2), np.ones(3)])


def test_numpy_dataset_needs_no_session(strategy):
    with pytest.raises(ValueError, match="Leave out the argument session"):
        strategy.experimental_make_numpy_dataset(np.ones(2), session=object())


# Graphs and sessions, which are not here


def test_no_ops_by_nature(strategy):
    assert strategy.group(ms.PerReplica(1)) is None
    assert strategy.group(1, name="train") is None
    assert strategy.configure(session_config={}, task_type="worker", task_id=0) is None
    config = {"devices": ["cpu"]}
    updated = strategy.update_config_proto(config)
    assert updated == config
    assert updated["devices"] is not config["devices"]


# Localities


def test_colocate_vars_with(strategy, rank, variable):
    def fn():
        with strategy.extended.colocate_vars_with(variable):
            assert ms.get_replica_context().replica_id_in_sync_group == rank
            return ms.Variable(4.0)

    with strategy.scope():
        with deprecated("Strategy.colocate_vars_with"):
            block = strategy.colocate_vars_with(variable)
        with block:
            assert ms.in_cross_replica_context()
            assert strategy.extended.variable_created_in_scope(ms.Variable(2.0))
        with deprecated("non_slot_devices"):
            devices = strategy.extended.non_slot_devices([variable])
        with strategy.extended.colocate_vars_with(devices):
            assert strategy.extended.variable_created_in_scope(ms.Variable(3.0))
    assert strategy.extended.variable_created_in_scope(strategy.run(fn))


def test_colocate_vars_with_checks_its_argument_and_context(strategy, variable):
    foreign = ms.Variable(1.0)
    with strategy.scope():
        for place in (foreign, None, np.ones(2), ("cpu:0",)):
            with pytest.raises(ValueError, match="created in the scope of this strategy"):
                strategy.extended.colocate_vars_with(place)
    with pytest.raises(ContextError, match="needs the scope"):
        strategy.extended.colocate_vars_with(variable)
    with ms.OneDeviceStrategy().scope(), pytest.raises(ContextError, match="cannot be mixed"):
        strategy.extended.colocate_vars_with(variable)


def test_update_non_slot(strategy, size, variable):
    def fn(delta, *, factor):
        assert delta == 2.0
        return {"new": variable.assign_add(delta * factor).copy()}

    arguments = ((ms.Mirrored(2.0),), {"factor": 3})
    with deprecated("non_slot_devices"):
        devices = strategy.extended.non_slot_devices([variable])
    assert devices == strategy.extended.parameter_devices
    assert len(devices) == size
    with deprecated("update_non_slot"):
        merged = strategy.extended.update_non_slot(devices, fn, *arguments)
    assert isinstance(merged["new"], ms.Mirrored)
    assert merged["new"].values == (7.0,)
    with deprecated("update_non_slot"):
        (own,) = strategy.extended.update_non_slot(variable, fn, *arguments, group=False)
    assert own["new"] == 13.0
    assert variable.numpy() == 13.0


def test_update_non_slot_refuses(strategy, variable):
    extended = strategy.extended
    with deprecated("update_non_slot"), pytest.raises(ValueError, match="PerReplica.*reduce_to"):
        extended.update_non_slot(extended.worker_devices, print, [{"x": [ms.PerReplica(1)]}])
    with deprecated("update_non_slot"), pytest.raises(ValueError, match="non_slot_devices"):
        extended.update_non_slot("cpu:0", print)

    def fn():
        with deprecated("update_non_slot"), pytest.raises(ContextError, match="merge_call"):
            extended.update_non_slot(variable, print)

    strategy.run(fn)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda rank: np.full((2, 2), rank), id="array"),
        pytest.param(lambda rank: np.float32(rank), id="scalar", marks=pytest.mark.thorough),
        pytest.param(lambda rank: 1000.0 + rank, id="number", marks=pytest.mark.thorough),
    ],
)
def test_value_container(strategy, rank, value):
    container = strategy.run(lambda: value(rank))
    (component,) = strategy.experimental_local_results(container)
    assert strategy.extended.value_container(component) is container
    assert strategy.extended.value_container(container) is container
    del container
    gc.collect()
    assert strategy.extended.value_container(component) is component


def test_value_container_of_a_variable(strategy):
    with strategy.scope():
        variable = ms.Variable(np.zeros((2, 2)))
    (component,) = strategy.experimental_local_results(variable)
    assert strategy.extended.value_container(component) is variable
    assert strategy.extended.value_container(variable) is variable
    foreign = np.zeros((2, 2))
    assert strategy.extended.value_container(foreign) is foreign


def test_variable_created_in_scope_knows_strategies_apart(strategy, variable):
    other = ms.OneDeviceStrategy()
    with other.scope():
        foreign = ms.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(variable)
    assert not strategy.extended.variable_created_in_scope(foreign)
    assert other.extended.variable_created_in_scope(foreign)
    assert not copy.deepcopy(strategy).extended.variable_created_in_scope(variable)
    outside, default = ms.Variable(1.0), ms.get_strategy()
    assert not strategy.extended.variable_created_in_scope(outside)
    assert default.extended.variable_created_in_scope(outside)
    assert not default.extended.variable_created_in_scope(variable)


def test_read_var_is_the_value_at_that_time(strategy, variable):
    read = strategy.extended.read_var(variable)
    plain = ms.Variable(3.0)
    read_plain = ms.get_strategy().extended.read_var(plain)
    variable.assign(5.0)
    plain.assign(5.0)
    assert (read, read_plain) == (1.0, 3.0)


# Several steps


def run_steps(strategy, *args, **kwargs):
    with deprecated("experimental_run_steps_on_iterator"):
        return strategy.extended.experimental_run_steps_on_iterator(*args, **kwargs)


def test_run_steps_on_iterator(strategy, rank, size):
    data = ms.data.Dataset.range(6 * size).batch(2 * size)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    seen = []

    def in_replica(context, batch):
        context.set_last_step_output("largest", batch.max(), ms.ReduceOp.MAX)
        with pytest.raises(ContextError, match="needs a reduce_op.*cross-replica context"):
            context.set_last_step_output("own", batch)
        return batch.sum()

    def fn(context, batch):
        assert isinstance(context, ms.MultiStepContext)
        assert ms.in_cross_replica_context()
        seen.append(batch.values[0].tolist())
        per_replica = strategy.extended.call_for_each_replica(in_replica, args=(context, batch))
        context.set_last_step_output("total", per_replica, "sum")
        context.set_last_step_output("as_it_is", per_replica)
        context.set_non_tensor_output("text", f"step {len(seen)}")

    outputs = run_steps(strategy, fn, iterator, iterations=2)
    own = [[2 * size * step + 2 * rank, 2 * size * step + 2 * rank + 1] for step in range(3)]
    assert seen == own[:2]
    assert outputs.last_step_outputs["largest"] == 4 * size - 1
    assert outputs.last_step_outputs["total"] == sum(range(2 * size, 4 * size))
    assert outputs.last_step_outputs["as_it_is"].values == (sum(own[1]),)
    assert outputs.non_tensor_outputs == {"text": "step 2"}
    run_steps(strategy, fn, iterator)
    assert seen == own
    with pytest.raises(OutOfRangeError):
        run_steps(strategy, fn, iterator)


def test_initial_loop_values(strategy):
    initial = {"loss": 7.0, "kept": 1.0}

    def fn(context, batch):
        assert context.last_step_outputs["kept"] == 1.0
        context.set_last_step_output("loss", 2.0)

    data = ms.data.Dataset.range(4).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    none = run_steps(strategy, fn, iterator, iterations=0, initial_loop_values=initial)
    assert none.last_step_outputs == initial
    one = run_steps(strategy, fn, iterator, initial_loop_values=initial)
    assert one.last_step_outputs == {"loss": 2.0, "kept": 1.0}
    assert initial["loss"] == 7.0


def test_run_steps_refuses(strategy):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        run_steps(strategy, print, None, iterations=-1)

    def fn():
        with pytest.raises(ContextError, match="cross-replica context.*merge_call"):
            run_steps(strategy, print, None)

    strategy.run(fn)


# Properties


def test_properties_of_the_extended_strategy(strategy, rank, size):
    extended = strategy.extended
    expected = tuple(
        f"/job:worker/replica:0/task:{r}/device:{devices.name()}:{devices.index(r)}"
        for r in range(size)
    )
    assert extended.worker_devices == expected
    assert extended.parameter_devices == expected
    assert extended.experimental_between_graph is True
    assert extended.experimental_should_init is True
    assert extended.experimental_require_static_shapes is False
    assert extended.should_checkpoint is (rank == 0)
    assert extended.should_save_summary is (rank == 0)


def test_devices_of_a_replica(strategy, rank):
    def fn():
        with deprecated("ReplicaContext.devices"):
            found = ms.get_replica_context().devices
        assert found == (f"{devices.kind()}:{devices.index(rank)}",)

    strategy.run(fn)


# The default strategy


def test_version_1_of_the_default_strategy():
    default = ms.get_strategy()
    b, a = ms.Variable(1.0, name="b"), ms.Variable(2.0, name="a")
    with deprecated("non_slot_devices"):
        assert default.extended.non_slot_devices([b, a]) is a
    with default.extended.colocate_vars_with(a):
        assert ms.Variable(3.0).strategy is None
    with deprecated("update_non_slot"):
        assert default.extended.update_non_slot(a, lambda x: x + 1, (3,)) == 4
    with deprecated("unwrap"):
        assert default.unwrap([1, 2]) == ([1, 2],)
    assert default.extended.read_var(b) == 1.0
    assert default.extended.should_checkpoint is True
    assert default.extended.should_save_summary is True


@pytest.mark.parametrize("name", ["make_dataset_iterator", "make_input_fn_iterator"])
def test_iterators_of_the_default_strategy(name):
    default = ms.get_strategy()
    data = ms.data.Dataset.range(4).batch(2)

    def input_fn(context):
        assert context == ms.InputContext(1, 0, 1)
        return data

    with deprecated(name):
        iterator = getattr(default, name)(data if name == "make_dataset_iterator" else input_fn)
    with deprecated("experimental_run"):
        assert default.experimental_run(lambda x: x.tolist(), iterator) == [0, 1]
    assert iterator.get_next_as_optional().get_value().tolist() == [2, 3]
    with pytest.raises(OutOfRangeError):
        iterator.get_next()
    iterator.initialize()
    assert iterator.get_next().tolist() == [0, 1]


def test_setting_the_default_strategy_is_setting_none(strategy):
    default = ms.get_strategy()
    ms.experimental_set_strategy(strategy)
    try:
        assert ms.get_strategy() is strategy
        ms.experimental_set_strategy(default)
        assert ms.get_replica_context().strategy is default
        assert not ms.in_cross_replica_context()
    finally:
        ms.experimental_set_strategy(None)
