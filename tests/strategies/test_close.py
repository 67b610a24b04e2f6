"""Strategies that are closed: what they free, what they refuse, and what goes on."""

import copy
import gc
import os
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.testing import launch

ROUNDS = int(os.environ.get("PYTEST_CLOSE_ROUNDS", "8"))
KINDS = {
    "mirrored": ms.MPIStrategy,
    "sharded": lambda comm: ms.MPIStrategy(
        comm, variable_partitioner=ms.partitioners.FixedShardsPartitioner(100)
    ),
    "central": ms.CentralStorageStrategy,
    "split": lambda comm: ms.MPIStrategy(comm, ranks_per_replica=comm.size),
}
ALONE = "PYTEST_CLOSE_ALONE"
"""Set where no earlier test has left descriptors and memory that may be freed meanwhile."""

needs_quiet = pytest.mark.skipif(ALONE not in os.environ, reason="counts what a process holds")


@pytest.fixture
def comm():
    """A communicator that no other test uses."""
    duplicate = MPI.COMM_WORLD.Dup()
    yield duplicate
    duplicate.Free()


def all_reduce(strategy, value=1.0):
    def step():
        return ms.get_replica_context().all_reduce("sum", value)

    return strategy.run(step)


def use(strategy):
    """Use all that a strategy may hold: variables, slots, large results, handles, a scope."""

    def start():
        return ms.get_replica_context().start_all_reduce("sum", np.ones(2**17)).wait()

    with strategy.scope():
        variable = ms.Variable(np.zeros(2**15), aggregation=ms.VariableAggregation.SUM)
        optimizer = ms.optimizers.Adam()
    [gradient] = strategy.extended.gradient_buffers([variable])
    gradient[...] = 1.0
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
    large = strategy.reduce("sum", np.ones(2**17))
    strategy.run(start)
    return variable, large


def held():
    """Return the numbers of descriptors, threads, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("memfd:mpistrat")


def held_at_rest():
    """Return `held` once threads that only have to end have ended."""
    found, since = held(), time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.01)
        if held() != found:
            found, since = held(), time.monotonic()
    return found


def test_a_second_close_does_nothing(comm):
    strategy = ms.MPIStrategy(comm)
    assert strategy.close() is None
    assert strategy.close() is None


def test_what_needs_the_strategy_afterwards_raises(comm, tmp_path):
    strategy = ms.MPIStrategy(comm)
    with strategy.scope():
        variable = ms.Variable([1.0, 2.0], aggregation=ms.VariableAggregation.SUM)
        counter = ms.Variable(
            0.0,
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
        optimizer = ms.optimizers.SGD(0.1)
    checkpoint = ms.Checkpoint(variable=variable)
    dataset = ms.data.Dataset.from_arrays(np.arange(8)).batch(4)
    strategy.close()
    refused = [
        lambda: strategy.run(lambda: None),
        lambda: strategy.scope().__enter__(),
        lambda: strategy.reduce("sum", 1),
        lambda: strategy.gather(np.ones(1), 0),
        lambda: variable.assign([3.0, 4.0]),
        lambda: variable.assign_add([3.0, 4.0]),
        lambda: counter.value(),
        lambda: counter.assign(1.0),
        lambda: optimizer.apply_gradients([(np.ones(2), variable)]),
        lambda: checkpoint.write(str(tmp_path / "file")),
        lambda: strategy.extended.update(variable, lambda v: None),
        lambda: strategy.extended.reduce_to("sum", 1.0, variable),
        lambda: strategy.experimental_distribute_dataset(dataset),
        lambda: copy.deepcopy(strategy).run(lambda: None),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(RuntimeError, match=r"<MPIStrategy rank \d of \d .*close\(\)"):
            call()
            pytest.fail(f"number {number} was not refused")
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert np.asarray(variable).tolist() == [1.0, 2.0]
    assert "MPIStrategy" in repr(strategy)


def test_it_is_refused_in_replica_context(comm):
    strategy = ms.MPIStrategy(comm)
    with pytest.raises(ms.errors.ContextError, match="close needs the cross-replica context"):
        strategy.run(strategy.close)
    strategy.close()


@needs_quiet
def test_others_on_the_communicator_go_on_and_the_last_one_frees(comm, size):
    use_and_close(comm)
    gc.collect()
    before = held_at_rest()
    first, second = ms.MPIStrategy(comm), ms.MPIStrategy(comm)
    third = copy.deepcopy(second)
    first.close()
    assert all_reduce(second).values[0] == size
    second.close()
    assert all_reduce(third).values[0] == size
    between = held()
    third.close()
    gc.collect()
    after = held()
    again = ms.MPIStrategy(comm)
    assert all_reduce(again).values[0] == size
    again.close()
    # Not before: a rank that fails alone would leave the others waiting. Threads and descriptors of
    # earlier tests may end meanwhile.
    assert size == 1 or between[2] == before[2] + 1
    assert all(now <= then for now, then in zip(after, before, strict=True))


def use_and_close(comm, kind="mirrored"):
    strategy = KINDS[kind](comm)
    kept = use(strategy)
    strategy.run(lambda: ms.get_replica_context().shards.all_reduce("sum", np.ones(2**15)))
    strategy.close()
    return kept


@needs_quiet
def test_nothing_grows(comm, size):
    variable, large = use_and_close(comm)
    del large
    gc.collect()
    before = held_at_rest()
    for _ in range(ROUNDS):
        for kind in KINDS:
            duplicate = comm.Dup()
            use_and_close(duplicate, kind)
            duplicate.Free()
    gc.collect()
    ended = time.monotonic() + 5
    while held() != before and time.monotonic() < ended:
        time.sleep(0.01)
    assert held() == before
    assert variable.numpy().shape == (2**15,)


def test_groups_are_freed_with_their_last_strategy(comm, size):
    plain = ms.MPIStrategy(comm)
    first, second = (ms.MPIStrategy(comm, ranks_per_replica=size) for _ in range(2))
    groups = plain.extended._collectives.channel.groups
    assert len(groups) == (2 if size > 1 else 0)
    first.close()
    assert len(groups) == (2 if size > 1 else 0)
    second.close()
    assert not groups
    assert all_reduce(plain).values[0] == size
    plain.close()


def test_results_outlive_the_memory_they_lie_in(comm, size):
    _, large = use_and_close(comm)
    gc.collect()
    assert (large == size).all()


def test_arguments_that_differ_close_nothing(comm, size):
    strategy = ms.MPIStrategy(comm)
    other = ms.MPIStrategy(comm)
    if size > 1:
        with pytest.raises(ms.errors.CollectiveMismatchError, match="close"):
            if strategy.cluster_resolver.task_id == 0:
                strategy.close()
            else:
                strategy.reduce("sum", 1)
    other.close()
    strategy.close()
    strategy.close()
    with pytest.raises(RuntimeError, match="close"):
        other.run(lambda: None)


def test_a_strategy_that_is_collected_warns_once(comm, size):
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ms.MPIStrategy(comm)
        gc.collect()
        closed = ms.MPIStrategy(comm)
        closed.close()
        del closed
        gc.collect()
    ours = [each for each in caught if "without close" in str(each.message)]
    assert [each.category for each in ours] == [ResourceWarning]
    assert f"of {size}" in str(ours[0].message)


def test_strategies_of_one_replica_close_too():
    strategy = ms.OneDeviceStrategy("cpu")
    with strategy.scope():
        variable = ms.Variable(1.0)
    strategy.close()
    strategy.close()
    assert variable.numpy() == 1
    with pytest.raises(RuntimeError, match="close"):
        strategy.run(lambda: None)
    ms.get_strategy().close()  # the default strategy holds nothing
    assert ms.get_strategy().run(lambda: 1) == 1


def run_alone(tests, ranks, **env):
    arguments = ["-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", __file__]
    done = launch.run([*arguments, "-k", tests], ranks, 100, env={ALONE: "1", **env})
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_process_holds(ranks):
    assert "2 passed" in run_alone("grows or frees", ranks)


@pytest.mark.launches
@pytest.mark.slow
def test_what_a_process_holds_after_three_hundred_strategies():
    assert "1 passed" in run_alone("grows", 2, PYTEST_CLOSE_ROUNDS="75")


MANY = """
import mpistrat as ms
for _ in range(2500):
    ms.MPIStrategy().close()
"""


@pytest.mark.launches
@pytest.mark.slow
def test_no_communicator_stays():
    """MPICH has about 2,000 of them."""
    done = launch.run(["-c", MANY], 2, 100)
    assert done.returncode == 0, done.stderr
