"""Replicas that span ranks: who is who, and which ranks act together."""

import math
import re

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveError, CollectiveMismatchError, ContextError, DataError
from tests.helpers import result_of
from tests.replica_groups import DIVISORS, NUM_RANKS, opened, shards_of

SUM = ms.VariableAggregation.SUM


@pytest.fixture(params=DIVISORS, ids=lambda each: f"{each} a replica")
def wide(request):
    """A strategy with replicas of each possible number of ranks."""
    yield from opened(request.param)


@pytest.fixture
def place(wide):
    """Number of ranks a replica, of replicas, of this replica, and of this shard."""
    count = result_of(wide, lambda: shards_of().count)
    return count, NUM_RANKS // count, wide.rank // count, wide.rank % count


def test_the_numbers(wide, place):
    count, num_replicas, replica_id, shard = place

    def step():
        replica = ms.get_replica_context()
        return (
            replica.replica_id_in_sync_group,
            replica.num_replicas_in_sync,
            replica.shards.index,
            replica.shards.count,
        )

    assert result_of(wide, step) == (replica_id, num_replicas, shard, count)
    assert wide.num_replicas_in_sync == num_replicas
    resolver = wide.cluster_resolver
    assert (resolver.task_id, resolver.num_workers) == (wide.rank, wide.size)
    assert wide.size == len(wide.extended.worker_devices) == NUM_RANKS
    shown = f"replica {replica_id} of {num_replicas}, shard {shard} of {count}"
    assert (shown in repr(wide)) == (count > 1)
    assert f"shard {shard} of {count} of replica {replica_id}" in repr(result_of(wide, shards_of))


@pytest.mark.parametrize("number", [0, -1, NUM_RANKS + 1])
def test_what_does_not_divide_the_ranks_is_refused_everywhere(strategy, number):
    with pytest.raises(ValueError, match="ranks_per_replica"):
        ms.MPIStrategy(ranks_per_replica=number)
    assert strategy.reduce("sum", 1) == NUM_RANKS


@pytest.mark.parametrize("number", [True, 1.0, "2", None])
def test_what_is_no_integer_is_refused_everywhere(number):
    with pytest.raises(TypeError, match="ranks_per_replica"):
        ms.MPIStrategy(ranks_per_replica=number)


def test_numbers_that_differ_are_everyones_error(others, size):
    with pytest.raises(CollectiveMismatchError, match=f"{size} ranks per replica"):
        ms.MPIStrategy(ranks_per_replica=1 if others else size)


@pytest.mark.skipif(NUM_RANKS == 1, reason="no replica spans several ranks")
def test_partitioners_are_for_replicas_of_one_rank():
    partitioner = ms.partitioners.FixedShardsPartitioner(2)
    with pytest.raises(NotImplementedError, match="split_axis"):
        ms.MPIStrategy(variable_partitioner=partitioner, ranks_per_replica=NUM_RANKS)


def test_reductions_count_each_replica_once(wide, place):
    _, num_replicas, replica_id, shard = place

    def step():
        replica = ms.get_replica_context()
        out = np.zeros(2)
        replica.all_reduce("sum", np.full(2, replica_id + 1.0), out=out)
        return out, replica.all_gather(np.full((replica_id + 1, 1), shard), 0)

    triangle = num_replicas * (num_replicas + 1) // 2
    summed, gathered = result_of(wide, step)
    assert summed.tolist() == [triangle] * 2
    assert gathered.ravel().tolist() == [shard] * triangle  # of the same shards alone


def test_the_ranks_of_a_replica_reduce_and_gather(wide, place):
    count, _, replica_id, shard = place
    deterministic = ms.CommunicationOptions(deterministic=True)

    def step():
        shards, own = shards_of(), np.full(3, 10.0 * replica_id + shard)
        out = {"a": np.empty(3), "b": [np.empty(())]}
        nest = {"a": own, "b": [np.float64(shard)]}
        assert shards.all_reduce("sum", nest, out=out) is out
        again = shards.all_reduce("sum", nest, deterministic)
        assert again["a"].tobytes() == out["a"].tobytes()
        rows = shards.all_gather(np.full((shard, 2), shard), 0)
        largest = shards.start_all_reduce("max", own).wait()
        return out, rows, largest, shards.all_reduce("mean", shard)

    out, rows, largest, mean = result_of(wide, step)
    triangle = count * (count - 1) / 2
    assert out["a"].tolist() == [10.0 * replica_id * count + triangle] * 3
    assert out["b"][0] == triangle
    assert rows[:, 0].tolist() == [s for s in range(count) for _ in range(s)]
    assert largest.tolist() == [10.0 * replica_id + count - 1] * 3
    assert mean == pytest.approx((count - 1) / 2)


def test_the_ranks_of_a_replica_move_parts(wide, place):
    count, _, replica_id, shard = place
    length = 2 * count + 1
    whole = np.arange(length) + 100 * replica_id
    parts = np.array_split(whole, count)

    def step():
        shards, last = shards_of(), count - 1
        return (
            shards.reduce_scatter("sum", whole),
            shards.all_to_all(whole),
            shards.broadcast(whole if shard == last else None, root=last),
            shards.scatter(whole if shard == 0 else None),
            shards.shift(whole, fill=-1),
            shards.scan("sum", whole),
            shards.scan("max", whole, exclusive=True),
        )

    part, turned, from_last, own, shifted, scanned, before = result_of(wide, step)
    assert part.tolist() == (count * parts[shard]).tolist()
    assert turned.tolist() == parts[shard].tolist() * count
    assert from_last.tolist() == whole.tolist()
    assert own.tolist() == parts[shard].tolist()
    assert shifted.tolist() == (whole.tolist() if shard else [-1] * length)
    assert scanned.tolist() == ((shard + 1) * whole).tolist()
    least = np.iinfo(whole.dtype).min
    assert before.tolist() == (whole.tolist() if shard else [least] * length)


def test_gradients_are_of_the_sum_of_the_losses_of_the_ranks(wide, place):
    torch = pytest.importorskip("torch")
    count, shard = place[0], place[3]

    def step():
        shards = shards_of()
        x = torch.full((count,), 1.0 + shard, dtype=torch.float64, requires_grad=True)
        total = shards.all_reduce("sum", x)
        joined = shards.all_gather(x, 0)
        mine = shards.reduce_scatter("sum", x)
        loss = (shard + 1) * total.sum() + (joined * (shard + 1)).sum() + 5 * mine.sum()
        loss.backward()
        return x.grad

    triangle = count * (count + 1) / 2
    assert result_of(wide, step).tolist() == [2 * triangle + 5] * count


def test_each_group_has_its_own_sequence(wide, place):
    _, num_replicas, replica_id, _ = place

    def step():
        replica = ms.get_replica_context()
        for _ in range(replica_id):
            replica.shards.all_reduce("sum", np.ones(replica_id))
        return replica.all_reduce("sum", 1)

    assert result_of(wide, step) == num_replicas
    assert wide.reduce("sum", 1) == num_replicas


def test_errors_of_all_ranks_of_one_replica_leave_all_usable(wide, place):
    _, num_replicas, replica_id, _ = place

    def step():
        if replica_id == 0:
            with pytest.raises(ValueError, match=rf"all_gather.* on rank \d of {NUM_RANKS}.* 0-d"):
                shards_of().all_gather(1.0, 0)
        return ms.get_replica_context().all_reduce("sum", 1)

    assert result_of(wide, step) == num_replicas


def test_shards_are_for_the_current_replica_context(wide):
    kept = result_of(wide, shards_of)
    for use in (lambda: kept.all_reduce("sum", 1), lambda: kept.index, lambda: kept.count):
        with pytest.raises(ContextError, match="belongs to a function given to run"):
            use()

    def merge(strategy):
        with pytest.raises(ContextError):
            kept.all_gather(np.ones(1), 0)

    wide.run(lambda: ms.get_replica_context().merge_call(merge))


def test_shards_of_other_strategies_are_one_rank():
    shards = ms.get_replica_context().shards
    assert (shards.index, shards.count, shards.all_reduce("sum", 3.0)) == (0, 1, 3.0)
    alone = ms.OneDeviceStrategy()
    rows = result_of(alone, lambda: shards_of().all_gather(np.ones((2, 1)), 0))
    assert rows.tolist() == [[1.0], [1.0]]
    central = ms.CentralStorageStrategy()
    assert result_of(central, lambda: shards_of().count) == 1
    central.close()


def test_objects_go_to_all_ranks_or_to_those_of_the_same_shard(wide, place):
    _, num_replicas, _, shard = place
    assert wide.gather_objects(wide.rank) == [*range(NUM_RANKS)]
    assert wide.broadcast_object(wide.rank, NUM_RANKS - 1) == NUM_RANKS - 1
    wide.barrier()

    def step():
        replica = ms.get_replica_context()
        replica.barrier()
        return replica.all_gather_object(wide.rank), replica.broadcast_object(wide.rank)

    count = NUM_RANKS // num_replicas
    assert result_of(wide, step) == ([*range(shard, NUM_RANKS, count)], shard)


def test_a_replica_context_is_of_the_own_replica(wide, place):
    _, num_replicas, replica_id, _ = place
    assert ms.ReplicaContext(wide, replica_id)
    with pytest.raises(ValueError, match=f"owns replica {replica_id}"):
        ms.ReplicaContext(wide, num_replicas)


@pytest.mark.parametrize("num_examples", [0, 7, 8])
def test_the_ranks_of_a_replica_get_equal_arrays(wide, place, num_examples):
    _, num_replicas, replica_id, _ = place
    examples = np.arange(num_examples * 2).reshape(num_examples, 2)
    dataset = ms.data.Dataset.from_arrays(examples).shuffle(seed=3).batch(4)
    alone = [*dataset]
    batches = [batch.values[0] for batch in wide.experimental_distribute_dataset(dataset)]
    assert len(batches) == len(alone)
    for own, batch in zip(batches, alone, strict=True):
        share = math.ceil(len(batch) / num_replicas)
        assert own.tolist() == batch[replica_id * share : (replica_id + 1) * share].tolist()
    total = sum(int(wide.reduce("sum", own, axis=0).sum()) for own in batches)
    assert total == examples.sum()


def test_the_ranks_of_a_replica_make_equal_data_sets(wide, place):
    if place[0] > 1:
        with pytest.raises(DataError, match="ranks 0 and 1 compute replica 0 together"):
            wide.distribute_datasets_from_function(
                lambda context: ms.data.Dataset.range(place[3] + 1).batch(1)
            )


def test_a_position_is_valid_at_any_number_of_ranks_a_replica(wide, strategy):
    dataset = ms.data.Dataset.range(12).shuffle(seed=1).batch(4)
    batches = wide.experimental_distribute_dataset(dataset)
    next(iter(batches))
    other = strategy.experimental_distribute_dataset(dataset)
    other.load_state_dict(batches.state_dict())
    assert len([*other]) == 2


def test_copies_and_closed_strategies(wide, place):
    import copy

    twin = copy.deepcopy(wide)
    twin.close()
    assert result_of(wide, lambda: shards_of().all_reduce("sum", 1)) == place[0]
    assert wide.reduce("sum", 1) == place[1]
    with pytest.raises(RuntimeError, match="close"):
        twin.run(shards_of)


def test_a_rank_that_disagrees_with_its_replica_ends_all(wide, place):
    if place[0] == 1 or place[1] > 1:  # of several replicas some wait for ranks that have failed
        pytest.skip("needs two ranks of the one replica that can disagree")

    def step():
        op = "max" if wide.rank == 1 else "sum"
        shards_of().all_reduce(op, 1.0)
        return ms.get_replica_context().all_reduce("sum", 1.0)

    with pytest.raises(CollectiveError) as caught:
        wide.run(step)
        wide.barrier()
    assert re.search(r'rank 1: +all_reduce\("max"', str(caught.value))
    assert "test_ranks_per_replica.py" in str(caught.value)
    with pytest.raises(CollectiveError):
        wide.reduce("sum", 1)


@pytest.mark.parametrize(
    ("dims", "reason"),
    [([1], "length"), ([1, 5], "not divisible"), ([NUM_RANKS + 1, 1], "product")],
)
def test_values_that_cannot_be_split_among_ranks_are_refused(strategy, dims, reason):
    value = np.zeros((NUM_RANKS + 1, 3))
    with pytest.raises(ValueError, match=reason):
        strategy.experimental_split_to_logical_devices(value, dims)
    with pytest.raises(TypeError, match="integer"):
        strategy.experimental_split_to_logical_devices(value, [1.0, 1])


def test_each_rank_of_a_replica_gets_its_block(wide, place):
    count, _, _, shard = place
    value = np.arange(6 * count).reshape(2, 3 * count)
    split = wide.experimental_split_to_logical_devices
    assert split(value, [1, count]).tolist() == np.split(value, count, 1)[shard].tolist()
    assert split(value.T, (count, 1)).tolist() == np.split(value.T, count)[shard].tolist()
    blocks = [block for row in np.split(value, 2) for block in np.split(row, max(count // 2, 1), 1)]
    if count % 2 == 0:
        assert split(value, [2, count // 2]).tolist() == blocks[shard].tolist()
    assert wide.experimental_replicate_to_logical_devices(value) is value
    assert wide.experimental_assign_to_logical_device(value, count - 1) is value
    with pytest.raises(ValueError, match="at most"):
        wide.experimental_assign_to_logical_device(value, count)
