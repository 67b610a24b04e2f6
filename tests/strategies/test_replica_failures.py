"""Replicas of one rank that fail, differ, or do not meet."""

import functools
import re

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.failures.peers import describe_rank_state, rank_state
from tests.replica_groups import NUM_REPLICAS, replica_id


@pytest.fixture(params=NUM_REPLICAS)
def replicas(request):
    comm = MPI.COMM_WORLD.Dup()
    return ms.MPIStrategy(comm, device="cpu", num_replicas=request.param)


def check_works(strategy):
    num = strategy.num_replicas_in_sync
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", replica_id()))
    assert total.values[0] == num * (num - 1) // 2
    assert not ms.has_strategy()


def test_an_error_of_all_leaves_run_unchanged(replicas):
    error = KeyError("mine")

    def fn():
        raise error

    with pytest.raises(KeyError) as caught:
        replicas.run(fn)
    assert caught.value is error
    check_works(replicas)


def all_to_all(replica, odd=-1):
    return replica.all_to_all(np.zeros((12, 2 + (replica_id() == odd))))


AFTER = {
    "all_reduce": lambda replica: replica.all_reduce("sum", np.ones(3)),
    "all_gather": lambda replica: replica.all_gather(np.ones(3), 0),
    "all_gather_object": lambda replica: replica.all_gather_object(replica_id()),
    "all_to_all": all_to_all,
    "broadcast": lambda replica: replica.broadcast(np.ones(3)),
}


@pytest.mark.parametrize("name", AFTER)
def test_an_error_of_all_after_a_collective(replicas, name):
    def fn():
        AFTER[name](ms.get_replica_context())
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError):
            replicas.run(fn)
    check_works(replicas)


def test_shapes_that_do_not_fit_are_refused_by_their_public_name(replicas, num, size):
    place = f"{'rank' if num == size else 'replica'} {num - 1}: (12, 3)"
    for _ in range(2):
        with pytest.raises(ms.errors.CollectiveMismatchError, match="concat_axis 0") as caught:
            replicas.run(lambda: all_to_all(ms.get_replica_context(), odd=num - 1))
        assert isinstance(caught.value, ValueError)
        assert type(caught.value).__name__ in ms.errors.__all__
        assert place in str(caught.value)
    check_works(replicas)


@pytest.mark.parametrize("who", ["first", "last"])
def test_others_never_begin_or_are_unwound(replicas, ids, who):
    guilty = ids[0] if who == "first" else ids[-1]
    seen = []

    def fn():
        seen.append(("begin", replica_id()))
        try:
            if replica_id() == guilty:
                raise OSError("mine")
            ms.get_replica_context().all_reduce("sum", 1)
        except OSError:
            raise
        except Exception as error:
            seen.append(("wrong", error))
        finally:
            seen.append(("end", replica_id()))
            if replica_id() != guilty:
                with pytest.raises(ms.errors.ContextError, match="another one has failed"):
                    ms.get_replica_context().all_reduce("sum", 1)

    with pytest.raises(OSError, match="mine") as caught:
        replicas.run(fn)
    note = f"in replica {guilty} of {replicas.num_replicas_in_sync}"
    assert caught.value.__notes__ == [note]
    begun = ids if who == "last" else ids[:1]
    assert sorted(each for what, each in seen if what == "begin") == begun
    assert sorted(each for what, each in seen if what == "end") == begun
    assert "wrong" not in dict(seen)
    check_works(replicas)


def test_an_error_in_a_caught_block_of_the_first_does_not_surface_there(replicas, ids):
    caught = []

    def fn():
        try:
            if replica_id() == ids[-1]:
                raise LookupError("last")
            ms.get_replica_context().barrier()
        except Exception as error:
            caught.append(type(error))
            raise

    with pytest.raises(LookupError, match="last"):
        replicas.run(fn)
    assert caught == [LookupError]


def test_replicas_that_fail_because_another_one_has_do_not_count(replicas, ids):
    def fn():
        try:
            if replica_id() == ids[-1]:
                raise OSError("mine")
            ms.get_replica_context().barrier()
        finally:
            if replica_id() != ids[-1]:
                raise KeyError("while it ends")  # in as many as the rank has more

    with pytest.raises(OSError, match="mine"):
        replicas.run(fn)
    check_works(replicas)


QUICK_CASES = ("op", "kind", "name", "shape", "returns", "merged code", "merged keywords")
OTHER_CASES = ("dtype", "structure", "axis", "scatter", "gradients", "made", "modes", "nests")


@pytest.mark.parametrize(
    "case",
    [*QUICK_CASES, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHER_CASES)],
)
def test_replicas_of_a_rank_that_differ(replicas, num, ids, size, case):
    if num == size:
        pytest.skip("needs two replicas on one rank")
    last = -(-num // size) - 1  # of the first rank
    with replicas.scope():
        variables = [
            ms.Variable(0.0, name=name, aggregation=ms.VariableAggregation.SUM) for name in "ab"
        ]
        table = ms.Variable(np.zeros(3), aggregation=ms.VariableAggregation.SUM)
        sgd = ms.optimizers.SGD(0.1)

    def one(strategy, **kwargs):
        return None

    def other(strategy):
        return None

    def fn():
        replica, is_last = ms.get_replica_context(), replica_id() == ids[-1]
        if case == "merged code":
            replica.merge_call(other if is_last else one)
        elif case == "merged keywords":
            replica.merge_call(one, kwargs={"b" if is_last else "a": 1})
        elif case == "nests":
            replica.merge_call(one, kwargs={"a": [1] * (1 + is_last)})
        elif case == "dtype":
            replica.all_reduce("sum", np.ones(2, "f4" if is_last else "f8"))
        elif case == "structure":
            replica.all_reduce("sum", [np.ones(2)] if is_last else (np.ones(2),))
        elif case == "axis":
            replica.all_gather(np.ones((2, 2)), int(is_last))
        elif case == "scatter":
            write = table.scatter_sub if is_last else table.scatter_add
            write(ms.IndexedSlices([1.0], [0]))
        elif case == "gradients":
            sgd.apply_gradients([(1.0, variables[is_last])])
        elif case == "made":
            ms.Variable(0.0, name="made" if is_last else "another")
        elif case == "modes":
            ms.Variable(0.0, name="made", trainable=bool(is_last))
        elif case == "op":
            replica.all_reduce("max" if is_last else "sum", 1.0)
        elif case == "kind":
            if is_last:
                replica.barrier()
            else:
                replica.all_reduce("sum", 1.0)
        elif case == "name":
            variables[is_last].assign(1.0)
        elif case == "shape":
            replica.all_reduce("sum", np.ones(2 + is_last))
        elif not is_last:
            replica.all_reduce("sum", 1.0)

    with pytest.raises(ms.errors.CollectiveMismatchError) as caught:
        replicas.run(fn)
        replicas.run(lambda: ms.get_replica_context().barrier())  # one replica alone met nobody
    text = str(caught.value)
    assert re.search("rank 0: +replica", text)
    assert f"replica {last} {'returned' if case == 'returns' else 'is at'}" in text
    assert text.count("test_replica_failures.py:") >= (1 if case == "returns" else 2)
    if case == "returns":
        assert "all_reduce" in text
    assert not ms.has_strategy()
    with pytest.raises(ms.errors.CollectiveError):
        replicas.run(lambda: ms.get_replica_context().barrier())
    assert not ms.has_strategy()


def test_a_late_rank_is_where_the_replica_is_whose_turn_it_is(replicas, ids):
    channel = replicas.extended._replica_set.ranks.channel
    texts = []

    def ask():
        texts.append(describe_rank_state(rank_state(channel, [channel], has_left=False)))

    def fn():
        ms.get_replica_context().barrier()
        if replica_id() == ids[-1]:
            ask()

    replicas.run(fn)
    assert f"late: replica {ids[-1]} computing" in texts[0]
    assert " in ask, called from test_replica_failures.py:" in texts[0]
    ask()
    assert "replica" not in texts[1].partition("now at")[0]


def test_one_rank_alone_that_differs(replicas, ids, rank, size):
    if size == 1:
        pytest.skip("needs two ranks")

    def fn():
        op = "max" if replica_id() == 0 else "sum"
        ms.get_replica_context().all_reduce(op, 1.0)

    with pytest.raises(ms.errors.CollectiveMismatchError, match="all_reduce"):
        replicas.run(fn)


def test_replicas_of_one_rank_that_merge_otherwise_stop_all_ranks(replicas, rank, size):
    first = range(-(-replicas.num_replicas_in_sync // size))  # the replicas of rank 0

    def fn():
        replica = ms.get_replica_context()
        replica.merge_call(lambda strategy, *args: None, (1.0,) * (1 + (replica_id() == first[-1])))
        replica.barrier()

    if len(first) == 1:
        replicas.run(fn)
        return
    with pytest.raises(ms.errors.CollectiveMismatchError, match="merge_call with") as caught:
        replicas.run(fn)
    assert f"replica {first[-1]} is at merge_call" in str(caught.value)
    assert "rank 0" in str(caught.value)


def test_merge_functions_of_equal_code(replicas, num):
    class Merge:
        def __call__(self, strategy, number):
            return strategy.reduce("sum", number)

        def method(self, strategy, number):
            return self(strategy, number)

    def plain(more, strategy, number):
        return strategy.reduce("sum", number) + more

    for make in (Merge, lambda: Merge().method, lambda: functools.partial(plain, 0)):
        found = replicas.run(
            lambda make=make: ms.get_replica_context().merge_call(make(), (replica_id(),))
        )
        assert found.values[0] == num * (num - 1) // 2


def test_an_error_in_one_replica_alone(replicas, num, rank, size):
    guilty = num - 1

    def fn():
        if replica_id() == guilty:
            raise KeyError("mine")
        return ms.get_replica_context().all_reduce("sum", 1)

    if rank == size - 1:
        with pytest.raises(KeyError, match="mine"):
            replicas.run(fn)
        if size == 1:
            check_works(replicas)
            return
        with pytest.raises(ms.errors.CollectiveError) as caught:
            replicas.barrier()
    else:
        with pytest.raises(ms.errors.CollectiveError) as caught:
            replicas.run(fn)
    text = str(caught.value)
    assert f"rank {size - 1}" in text
    assert f"in replica {guilty}" in text
    assert "KeyError" in text


def test_the_end_of_the_program_in_a_replica(replicas, ids):
    def fn():
        ms.get_replica_context().barrier()
        if replica_id() == ids[-1]:
            raise SystemExit(3)
        ms.get_replica_context().barrier()

    with pytest.raises(SystemExit) as caught:
        replicas.run(fn)
    assert caught.value.code == 3
    check_works(replicas)


@pytest.mark.parametrize(
    ("given", "error"),
    [(True, TypeError), (2.0, TypeError), ("4", TypeError), (0, ValueError), (-1, ValueError)],
)
def test_bad_numbers_of_replicas(given, error):
    with pytest.raises(error, match="num_replicas"):
        ms.MPIStrategy(device="cpu", num_replicas=given)
    with pytest.raises(error, match="num_replicas"):
        ms.OneDeviceStrategy(num_replicas=given)


def test_more_ranks_than_replicas(others, size):
    with pytest.raises(ValueError, match=f"num_replicas={size - 1} .* {size},"):
        ms.MPIStrategy(device="cpu", num_replicas=size - 1)


def test_ranks_that_want_different_numbers(others, size):
    with pytest.raises(ms.errors.CollectiveMismatchError, match="replicas"):
        ms.MPIStrategy(MPI.COMM_WORLD.Dup(), device="cpu", num_replicas=size + bool(others))


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"variable_partitioner": ms.partitioners.FixedShardsPartitioner(2)}, NotImplementedError),
        ({"communication_options": {"wire_dtype": "float16"}}, NotImplementedError),
    ],
)
def test_what_cannot_be_combined(size, more, error):
    if "communication_options" in more:
        more = {"communication_options": ms.CommunicationOptions(**more["communication_options"])}
    with pytest.raises(error, match="num_replicas"):
        ms.MPIStrategy(device="cpu", num_replicas=size, **more)


def test_options_of_a_call(replicas):
    def fn():
        options = ms.CommunicationOptions(wire_dtype="float16")
        with pytest.raises(NotImplementedError, match="wire_dtype"):
            ms.get_replica_context().all_reduce("sum", np.ones(3), options)
        options = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.MPI)
        return ms.get_replica_context().all_reduce("sum", np.ones(3), options)

    assert replicas.run(fn).values[0].tolist() == [replicas.num_replicas_in_sync] * 3
