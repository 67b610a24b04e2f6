"""Replica sets as a strategy holds them: which replica its attributes belong to."""

import pytest

import mpistrat as ms
from mpistrat.replicas.replica_set import OneReplica, ReplicaSet
from tests.replica_groups import NUM_RANKS, RANK


@pytest.fixture(params=[NUM_RANKS, 2 * NUM_RANKS + 1])
def shared(request):
    strategy = ms.MPIStrategy(device="cpu", num_replicas=request.param)
    yield strategy
    strategy.close()


def numbers_of(extended):
    """Return the numbers by which the attributes of a strategy name what they belong to."""
    assert extended._replicas is extended._collectives
    return extended._collectives.rank, extended._layout.replica_id


def test_attributes_follow_the_replica_that_runs(shared):
    extended = shared.extended
    of_rank = RANK, extended.local_replica_ids[0]

    def step(fails=False):
        own = ms.get_replica_context().replica_id_in_sync_group
        assert numbers_of(extended) == (own, own)
        ms.get_replica_context().all_reduce("sum", 1.0)  # the others run meanwhile
        assert numbers_of(extended) == (own, own)
        found = ms.get_replica_context().merge_call(lambda _: numbers_of(extended))
        assert found == of_rank
        assert numbers_of(extended) == (own, own)
        assert not fails, "on purpose"

    assert numbers_of(extended) == of_rank
    shared.run(step)
    assert numbers_of(extended) == of_rank
    with pytest.raises(AssertionError, match="on purpose"):
        shared.run(step, args=(True,))
    assert numbers_of(extended) == of_rank


def test_functions_run_once_per_replica_or_once_per_rank(shared):
    replicas = shared.extended._replica_set
    assert isinstance(replicas, ReplicaSet)
    assert replicas.each(lambda: replicas.own(replicas.ids)) == list(replicas.ids)
    calls = []
    replicas.each(lambda: replicas.once(lambda: calls.append(replicas.turn)))
    assert calls == [None]
    assert replicas.turn is None


def test_one_replica_is_its_own_set():
    strategy = ms.MPIStrategy(device="cpu")
    replicas = strategy.extended._replica_set
    assert isinstance(replicas, OneReplica)
    assert list(replicas.ids) == [RANK]
    assert replicas.each(lambda: replicas.own(["mine"])) == ["mine"]
    assert replicas.once(lambda: replicas.turn) is None
    strategy.close()
