"""Work that all ranks do, or rank 0 alone, and whose outcome every rank learns."""

import pytest

import mpistrat as ms


@pytest.fixture
def collectives(strategy):
    return strategy.extended._collectives


def num_rounds(collectives, do):
    before = collectives.channel.ledger.sequence
    do()
    return collectives.channel.ledger.sequence - before


def test_on_all_returns_the_results_in_rank_order(collectives, rank, size):
    found = collectives.on_all(lambda: {"rank": rank, "text": "é"}, "work")
    assert found == [{"rank": each, "text": "é"} for each in range(size)]


def test_on_root_calls_rank_0_alone(collectives, rank):
    called = []
    assert collectives.on_root(lambda: called.append(rank) or "found", "look", "here") == "found"
    assert called == ([0] if rank == 0 else [])


def test_they_take_one_round(collectives):
    assert num_rounds(collectives, lambda: collectives.on_root(int, "work")) == 1
    assert num_rounds(collectives, lambda: collectives.on_all(int, "work")) == 1


@pytest.mark.parametrize("fails", ["first", "last", "all"])
def test_a_failure_is_raised_on_all_ranks(collectives, strategy, rank, size, fails):
    failing = {"first": [0], "last": [size - 1], "all": range(size)}[fails]

    def work():
        if rank in failing:
            raise FileNotFoundError(f"nothing here on {rank}")
        return rank

    with pytest.raises(FileNotFoundError) as caught:
        collectives.on_all(work, "work")
    source = rank if rank in failing else failing[0]
    suffix = "" if rank in failing else f" (on rank {source} of {size})"
    assert str(caught.value) == f"nothing here on {source}{suffix}"
    assert strategy.reduce("sum", 1) == size


def test_a_failure_of_the_root_is_raised_on_all_ranks(collectives, strategy, size):
    def work():
        raise PermissionError("not for you")

    with pytest.raises(PermissionError, match="not for you"):
        collectives.on_root(work, "work")
    assert strategy.reduce("sum", 1) == size


def test_a_rank_elsewhere_is_named(collectives, strategy, others, size):
    with pytest.raises(ms.errors.CollectiveMismatchError, match=f"rank {size - 1}: +reduce"):
        if others:
            collectives.on_root(lambda: "found", "look", "here")
        else:
            strategy.reduce("sum", 1)
