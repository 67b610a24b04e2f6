"""Barrier and object collectives of `ReplicaContext.shards`."""

import time

import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, ContextError
from tests.helpers import result_of
from tests.replica_groups import DIVISORS, opened, shards_of


@pytest.fixture(params=DIVISORS, ids=lambda each: f"{each} a replica")
def wide(request):
    """A strategy with replicas of each possible number of ranks."""
    yield from opened(request.param)


def test_objects_stay_within_the_replica(wide):
    count = result_of(wide, lambda: shards_of().count)
    first = wide.rank // count * count
    mates = [{"rank": rank, "text": "x" * rank} for rank in range(first, first + count)]
    own = mates[wide.rank - first]

    def step():
        shards = shards_of()
        shards.barrier()
        gathered = shards.all_gather_object(own)
        from_each = [shards.broadcast_object(own, root) for root in range(shards.count)]
        return {"found": (gathered, from_each, shards.broadcast_object(own))}

    for _ in range(2):
        found = wide.run(lambda: step() == {"found": (mates, mates, mates[0])})
        assert wide.experimental_local_results(found)[0]


def test_replicas_may_call_them_differently_often(wide):
    """The group has a sequence of its own, which is not compared with the other replicas'."""
    count = result_of(wide, lambda: shards_of().count)
    replica_id = wide.rank // count

    def step():
        gathered = [shards_of().all_gather_object(number) for number in range(replica_id + 1)]
        return gathered == [[number] * count for number in range(replica_id + 1)]

    assert result_of(wide, step)


def test_a_barrier_waits_for_all_ranks_of_the_replica(wide):
    def step():
        shards = shards_of()
        shards.barrier()
        time.sleep(0.02 * shards.index)
        before = time.time()
        shards.barrier()
        arrived = shards.all_gather_object((before, time.time()))
        return max(came for came, _ in arrived) <= min(left for _, left in arrived) + 1e-3

    assert result_of(wide, step)


def test_errors(wide):
    count = result_of(wide, lambda: shards_of().count)
    for root in (-1, count):
        with pytest.raises(ValueError, match="root"):
            wide.run(lambda root=root: shards_of().broadcast_object(1, root))
    with pytest.raises(TypeError, match="cannot be pickled"):
        wide.run(lambda: shards_of().all_gather_object(lambda: 1))
    if count > 1:
        with pytest.raises(CollectiveMismatchError, match="broadcast_object"):
            wide.run(lambda: shards_of().broadcast_object(1, shards_of().index))
    kept = result_of(wide, shards_of)
    for call in (kept.barrier, lambda: kept.all_gather_object(1)):
        with pytest.raises(ContextError):
            call()


def test_of_one_device():
    strategy = ms.OneDeviceStrategy()

    def step():
        shards_of().barrier()
        return shards_of().all_gather_object("a") == ["a"] == [shards_of().broadcast_object("a")]

    assert result_of(strategy, step)
