"""ParameterServerStrategy: roles, places of variables, the phases of a job."""

import copy
import gc
import os
import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.comm.messages import Messenger
from mpistrat.errors import CollectiveMismatchError, ContextError, LaunchError


def serve_or(strategy, body):
    """Run `body` on the chief, with a coordinator, while the others serve."""
    if strategy.cluster_resolver.task_type != "chief":
        strategy.serve()
        return
    try:
        body(ms.coordinator.ClusterCoordinator(strategy))
    finally:
        strategy.close()


def replica_step():
    return ms.get_replica_context().num_replicas_in_sync


def run_in_replica():
    return ms.get_strategy().run(replica_step)


def iterate(strategy):
    return next(iter(strategy.experimental_distribute_dataset(ms.data.Dataset.range(4).batch(2))))


def device(task_type, task):
    return f"/job:{task_type}/replica:0/task:{task}/device:CPU:0"


def test_roles(rank, size):
    num_ps = max(0, size - 2)
    strategy = ms.ParameterServerStrategy(num_ps)
    resolver = strategy.cluster_resolver
    if rank == 0:
        expected = ("chief", 0)
    elif rank <= num_ps:
        expected = ("ps", rank - 1)
    else:
        expected = ("worker", 0)
    assert (resolver.task_type, resolver.task_id) == expected
    assert strategy.num_replicas_in_sync == 1
    assert (strategy.rank, strategy.size, strategy.is_chief) == (rank, size, rank == 0)
    assert strategy.extended.should_checkpoint == (rank == 0)
    assert strategy.extended.should_save_summary == (rank == 0)
    holders = [device("ps", n) for n in range(num_ps)] or [device("chief", 0)]
    assert strategy.extended.parameter_devices == tuple(holders)
    assert strategy.extended.worker_devices == (device("chief" if size == 1 else "worker", 0),)
    assert repr(strategy).startswith(f"<ParameterServerStrategy rank {rank} of {size}")
    assert not strategy.is_fault_tolerant or "OMPI_MCA_mpi_ft_enable" in os.environ
    assert strategy.gather_objects(rank) == list(range(size))
    serve_or(strategy, lambda coordinator: None)


def test_bad_clusters(size):
    with pytest.raises(ValueError, match="num_ps"):
        ms.ParameterServerStrategy(-1)
    for wrong in (1.5, True, None, "2"):
        with pytest.raises(TypeError, match="num_ps"):
            ms.ParameterServerStrategy(wrong)
    num_ps = max(1, size - 1)
    with pytest.raises(LaunchError, match=f"{num_ps + 2} ranks"):
        ms.ParameterServerStrategy(num_ps)
    with pytest.raises(TypeError, match="callable"):
        ms.ParameterServerStrategy(variable_partitioner=3)


def test_ranks_that_disagree(rank, size):
    if size < 3:
        pytest.skip("fewer ranks allow no server")
    comm = MPI.COMM_WORLD.Dup()
    with pytest.raises(CollectiveMismatchError):
        ms.ParameterServerStrategy(rank % 2, comm=comm)


def test_variables_go_round(size):
    num_ps = max(0, size - 2)
    strategy = ms.ParameterServerStrategy(num_ps)
    plain = ms.Variable(1.0, name="plain")
    with strategy.scope():
        first = [ms.Variable(float(n), name=f"v{n}") for n in range(2)]
        with strategy.extended.colocate_vars_with(first[0]):
            beside = ms.Variable(5.0, name="beside")
        rest = [ms.Variable(float(n), name=f"v{n}") for n in range(2, 5)]
    places = max(1, num_ps)
    kind = "ps" if num_ps else "chief"
    assert [v.device for v in first + rest] == [device(kind, n % places) for n in range(5)]
    assert beside.device == first[0].device
    assert plain.numpy() == 1.0
    wrong = strategy.extended.colocate_vars_with(plain)
    with strategy.scope(), pytest.raises(ValueError, match="colocate_vars_with"), wrong:
        pass
    serve_or(strategy, lambda coordinator: None)


def test_parts_go_round(size):
    num_ps = max(0, size - 2)
    strategy = ms.ParameterServerStrategy(num_ps, ms.partitioners.FixedShardsPartitioner(4))
    with strategy.scope():
        table = ms.Variable(np.arange(20.0).reshape(10, 2), name="table")
        small = ms.Variable(np.arange(3.0), name="small")
        scalar = ms.Variable(1.0)
        with strategy.extended.colocate_vars_with(scalar):
            beside = ms.Variable(np.zeros(8), name="beside")
    assert isinstance(table, ms.ShardedVariable)
    assert [len(rows) for rows in table.row_ranges] == [3, 3, 2, 2]
    assert len(small.row_ranges) == 3
    assert not isinstance(scalar, ms.ShardedVariable)
    assert not isinstance(beside, ms.ShardedVariable)
    assert beside.device == scalar.device
    places, kind = max(1, num_ps), "ps" if num_ps else "chief"
    assert table.devices == tuple(device(kind, n % places) for n in range(4))
    assert small.devices == tuple(device(kind, n % places) for n in range(4, 7))
    assert table.name == "table"
    serve_or(strategy, lambda coordinator: None)


def test_parts_take_turns_with_whole_variables(size):
    num_ps = max(0, size - 2)
    strategy = ms.ParameterServerStrategy(num_ps, ms.partitioners.FixedShardsPartitioner(2))
    with strategy.scope():
        made = [ms.Variable(np.zeros(shape)) for shape in ((4,), (), (5, 2))]
    places, kind = max(1, num_ps), "ps" if num_ps else "chief"
    devices = [*made[0].devices, made[1].device, *made[2].devices]
    assert devices == [device(kind, n % places) for n in range(5)]
    serve_or(strategy, lambda coordinator: None)


def write_in_replica(plain, on_read):
    def step():
        plain.assign(np.ones(3))
        plain.assign_add(np.ones(3))
        plain.scatter_add(ms.IndexedSlices(np.ones(1), [0]))
        on_read.assign_add(np.ones(3))
        return ms.get_replica_context().merge_call(lambda strategy, x: strategy.size, args=(1,))

    return ms.get_strategy().run(step)


def reduce_to(task):
    extended = ms.get_strategy().extended
    return extended.reduce_to("sum", 2.0, f"/job:worker/task:{task}/device:CPU:0")


def test_writes_and_reductions_in_closures(size):
    strategy = ms.ParameterServerStrategy(max(0, size - 2))
    with strategy.scope():
        plain = ms.Variable(np.zeros(3), name="plain")
        on_read = ms.Variable(
            np.zeros(3),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )

    def body(coordinator):
        assert coordinator.schedule(write_in_replica, (plain, on_read)).fetch() == size
        assert plain.numpy().tolist() == [3, 2, 2]  # under NONE, as there is one replica
        assert on_read.numpy().tolist() == [1, 1, 1]
        assert not on_read.trainable
        assert coordinator.schedule(reduce_to, (0,)).fetch() == 2.0
        with pytest.raises(ValueError, match="the tasks are 0 to 0"):
            coordinator.schedule(reduce_to, (1,)).fetch()
        with pytest.raises(ValueError, match="the tasks are 0 to 0"):
            coordinator.join()

    serve_or(strategy, body)


def pull_and_push(variable):
    variable.assign_add(variable.value())
    return ms.get_strategy().rank


def test_workers_send_to_holders_and_the_chief_alone(rank, size, monkeypatch):
    num_ps = 1 if size > 2 else 0
    strategy = ms.ParameterServerStrategy(num_ps)
    with strategy.scope():
        variable = ms.Variable(np.ones(2000), name="v")
    receivers, send = set(), Messenger.send

    def noted(messenger, destination, *args, **kwargs):
        receivers.add(destination)
        return send(messenger, destination, *args, **kwargs)

    monkeypatch.setattr(Messenger, "send", noted)

    def body(coordinator):
        values = [coordinator.schedule(pull_and_push, (variable,)) for _ in range(5 * size)]
        ranks = set(coordinator.fetch(values))
        assert ranks <= set(range(num_ps + 1, size) if size > 1 else [0])
        assert (variable.numpy() == 2.0 ** len(values)).all() or len(ranks) > 1

    serve_or(strategy, body)
    if rank > num_ps:
        assert receivers <= set(range(num_ps + 1))
        assert 0 in receivers


@pytest.mark.parametrize("answer", [None, [], [0, 1], [2, 2]], ids=str)
def test_bad_answers_of_partitioners(answer):
    strategy = ms.ParameterServerStrategy(variable_partitioner=lambda shape, dtype: answer)
    with strategy.scope(), pytest.raises(ValueError, match="partitioner has returned"):
        ms.Variable(np.zeros((4, 2)))
    serve_or(strategy, lambda coordinator: None)


def test_initial_values_in_parts(rank, size):
    num_ps = max(0, size - 2)
    strategy = ms.ParameterServerStrategy(num_ps, ms.partitioners.FixedShardsPartitioner(3))
    calls = []

    def rows(partition_shape, partition_offset):
        calls.append(tuple(partition_shape))
        start = partition_offset[0]
        return np.arange(start, start + partition_shape[0], dtype=float)

    with strategy.scope():
        table = ms.Variable(rows, shape=(7,), dtype="float64", name="table")
    holds = rank in (range(1, num_ps + 1) if num_ps else [0])
    expected = [n for n in range(3) if holds and n % max(1, num_ps) == max(0, rank - 1)]
    assert len(calls) == len(expected)

    def body(coordinator):
        assert table.numpy().tolist() == list(range(7))

    serve_or(strategy, body)


def test_run_outside_of_a_closure_warns_once():
    strategy = ms.ParameterServerStrategy()

    def body(coordinator):
        with pytest.warns(UserWarning, match="schedule"):
            assert strategy.run(replica_step) == 1
        assert strategy.run(replica_step) == 1
        assert coordinator.schedule(run_in_replica).fetch() == 1
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            iterate(strategy)

    serve_or(strategy, body)


def test_no_variables_after_the_setup():
    strategy = ms.ParameterServerStrategy()

    def body(coordinator):
        with strategy.scope(), pytest.raises(ValueError, match="cannot be created after serve"):
            ms.Variable(1.0, name="late")
        with pytest.raises(ContextError, match="needs all ranks"):
            strategy.barrier()

    serve_or(strategy, body)


def test_other_ranks_ask_nothing_in_the_setup(rank):
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        variable = ms.Variable(np.zeros(3), name="v")
    if rank:
        with pytest.raises(ContextError, match="in a closure, or on the chief"):
            variable.value()
        with pytest.raises(ContextError, match="chief only"):
            ms.Checkpoint(v=variable).write("never.h5")
    serve_or(strategy, lambda coordinator: None)


def test_a_chief_that_goes_on_with_the_setup_is_an_error(rank, size):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    strategy = ms.ParameterServerStrategy(comm=MPI.COMM_WORLD.Dup())
    with pytest.raises(CollectiveMismatchError, match="serve"):
        if rank:
            strategy.serve()
        else:
            with strategy.scope():
                ms.Variable(1.0, name="late")


def test_close(rank):
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        variable = ms.Variable(np.zeros(3), name="v")
    serve_or(strategy, lambda coordinator: None)
    strategy.close()
    for call in (
        variable.value,
        lambda: variable.assign(np.ones(3)),
        lambda: strategy.run(replica_step),
        lambda: strategy.scope().__enter__(),
        strategy.barrier,
        lambda: strategy.serve(),
        lambda: ms.Checkpoint(v=variable).write("never.h5"),
    ):
        with pytest.raises(RuntimeError, match="close|chief only"):
            call()
    assert "'v'" in repr(variable)


def test_close_stands_for_serve(rank):
    strategy = ms.ParameterServerStrategy()
    strategy.close()
    with pytest.raises(RuntimeError, match="close"):
        strategy.barrier()


def test_copies_are_refused():
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        variable = ms.Variable(np.zeros(3), name="v")
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(strategy)
    with pytest.raises(copy.Error, match="cannot be copied"):
        copy.deepcopy(variable)
    serve_or(strategy, lambda coordinator: None)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_behind():
    def one():
        comm = MPI.COMM_WORLD.Dup()
        strategy = ms.ParameterServerStrategy(comm=comm)
        with strategy.scope():
            ms.Variable(np.zeros(1000))
        serve_or(strategy, lambda coordinator: coordinator.schedule(replica_step_outside).fetch())
        comm.Free()

    for _ in range(2):
        one()
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    before = descriptors(), threading.active_count()
    for _ in range(4):
        one()
    gc.collect()
    MPI.COMM_WORLD.Barrier()
    assert descriptors() <= before[0] + 1
    assert threading.active_count() <= before[1] + 1


def replica_step_outside():
    return None
