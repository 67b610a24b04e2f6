"""The layout of replicas on ranks, against what it means."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.layout import Layout


@given(st.integers(1, 9), st.integers(1, 9))
def test_each_rank_is_one_shard_of_one_replica(num_replicas, per_replica):
    num_ranks = num_replicas * per_replica
    layouts = [Layout.divided(num_ranks, rank, per_replica) for rank in range(num_ranks)]
    places = [(each.replica_id, each.shard) for each in layouts]
    assert places == [(r, s) for r in range(num_replicas) for s in range(per_replica)]
    for each in layouts:
        assert each.num_replicas == num_replicas
        assert each.rank == each.replica_id * per_replica + each.shard
        assert each.ranks_of_replica[each.shard] == each.rank
        assert each.ranks_of_shard(each.shard)[each.replica_id] == each.rank
        assert len(each.ranks_of_replica) == per_replica
        assert len(each.ranks_of_shard(0)) == num_replicas


@given(st.integers(1, 9), st.integers(0, 20))
def test_ranks_share_replicas_in_order(num_ranks, num_more):
    num_replicas = num_ranks + num_more
    layouts = [Layout.shared(num_replicas, num_ranks, rank) for rank in range(num_ranks)]
    shares = [list(each.local_replicas) for each in layouts]
    assert [each for share in shares for each in share] == list(range(num_replicas))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for each, share in zip(layouts, shares, strict=True):
        assert each.is_shared
        assert [list(each.replicas_of(rank)) for rank in range(num_ranks)] == shares
        assert (each.num_replicas, each.replica_id, each.shard) == (num_replicas, share[0], 0)
        running = dataclasses.replace(each, running=share[-1])
        assert (running.replica_id, running.local_replicas) == (share[-1], each.local_replicas)


@pytest.mark.parametrize(("num_replicas", "reason"), [(0, "at least 1"), (2, "have no replica")])
def test_a_rank_without_a_replica_is_refused(num_replicas, reason):
    with pytest.raises(ValueError, match=reason):
        Layout.shared(num_replicas, 3, 0)


def test_by_default_each_rank_is_a_replica():
    layout = Layout(3, 2)
    assert (layout.num_replicas, layout.replica_id, layout.shard) == (3, 2, 0)


@pytest.mark.parametrize(
    ("per_replica", "reason"), [(0, "at least 1"), (-2, "at least 1"), (4, "divide")]
)
def test_what_does_not_divide_the_ranks_is_refused(per_replica, reason):
    with pytest.raises(ValueError, match=reason):
        Layout.divided(6, 0, per_replica)
