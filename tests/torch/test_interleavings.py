"""Operations of two groups, short and long, at once and in turn, with ranks late at random."""

import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers import triangle

LENGTHS = [1, 10, 1_000, 20_000, 300_000, 400_000]
NUM_ROUNDS = 20
MOST_AT_ONCE = 6


@pytest.fixture
def groups(world):
    made = [world, dist.new_group(range(dist.get_world_size()))]
    yield made
    dist.destroy_process_group(made[1])


class Operation:
    """An operation whose outcome is known, drawn from what all ranks draw."""

    def __init__(self, common, rank, size):
        self.kind = common.choice(["reduce", "reduce", "reduce", "broadcast", "gather"])
        self.number = common.randrange(100)
        length = common.choice(LENGTHS)
        self.root = common.randrange(size)
        self.tensor = torch.full((length,), float(self.number + rank))
        self.gathered = [torch.empty(length) for _ in range(size)]
        self.size = size

    def issue(self, group, is_async):
        if self.kind == "reduce":
            return dist.all_reduce(self.tensor, group=group, async_op=is_async)
        if self.kind == "broadcast":
            return dist.broadcast(self.tensor, self.root, group=group, async_op=is_async)
        return dist.all_gather(self.gathered, self.tensor, group, is_async)

    def check(self):
        first = float(self.number)
        if self.kind == "reduce":
            expected = triangle(self.size) + self.size * first
        else:
            expected = first + self.root
        if self.kind == "gather":
            for rank, part in enumerate(self.gathered):
                assert (part == first + rank).all()
        else:
            assert (self.tensor == expected).all(), (self.kind, self.tensor[0], expected)


@pytest.mark.parametrize("seed", range(2))
def test_all_outcomes_are_right(groups, rank, size, seed):
    common, own = random.Random(seed), random.Random(f"{seed} on rank {rank}")
    for _ in range(NUM_ROUNDS):
        count = common.randint(1, MOST_AT_ONCE)
        drawn = [Operation(common, rank, size) for _ in range(2 * count)]
        of_groups = [drawn[:count], drawn[count:]]
        works = []
        if common.random() < 0.7:
            # Each group sees its own operations in order; which group is next differs by rank.
            turns = [0] * count + [1] * count
            own.shuffle(turns)
            places = [iter(each) for each in of_groups]
            for which in turns:
                if own.random() < 0.1:
                    time.sleep(own.uniform(0, 0.002))
                works.append(next(places[which]).issue(groups[which], True))
            own.shuffle(works)
        else:
            for operation, is_async in zip(
                drawn, common.choices([False, True], k=len(drawn)), strict=True
            ):
                works.append(operation.issue(groups[0], is_async))
        for work in filter(None, works):
            work.wait()
        for operation in drawn:
            operation.check()
