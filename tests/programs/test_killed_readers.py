"""A rank that is killed within a pass, while the ranks of its node keep elements together."""

import re

import pytest

from tests.programs.running import (
    Case,
    assert_nothing_is_left,
    check,
    ours,
    run_case,
    run_unseen,
)

pytestmark = pytest.mark.launches

PASSES = """
import signal
from mpistrat.data.transformations import cache
is_due = False
def kill():
    if is_due and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
{place}
def decode(x):
    {in_map}
    return np.full(2000 + x % 3, x)
batches = ms.data.Dataset.range(60).map(decode, num_parallel_calls=2).cache().shuffle(1)
batches = strategy.experimental_distribute_dataset(batches.ragged_batch(12))
for number in range(3):
    for step, batch in enumerate(batches):
        is_due = (number, step) >= {due}
        rows = batch.values[0]
        assert all(len(row) == 2000 + row[0] % 3 for row in map(np.array, rows.to_list()))
        strategy.gather(ms.PerReplica(rows.row_lengths()), axis=0)
os.write(1, b"It was over before.")
"""
WRITE = """
write = cache.Record.write
def killed_write(self, leaves, target):
    write(self, leaves, target[:])
    kill()
cache.Record.write = killed_write
"""
LOCK = """
from mpistrat.comm import shared_memory
lock = shared_memory.NodeFile.lock
import contextlib
@contextlib.contextmanager
def killed_lock(self):
    with lock(self):
        kill()
        yield
shared_memory.NodeFile.lock = killed_lock
"""
READ = """
columns = cache.CacheStore.columns
def killed_columns(self, numbers):
    kill()
    return columns(self, numbers)
cache.CacheStore.columns = killed_columns
"""


def passes(name, place="", in_map="pass", due=(0, 1)):
    return Case(name, PASSES.format(place=place, in_map=in_map, due=due), ranks=3)


PLACES = {
    "making an element": passes("making", in_map="kill()"),
    "having claimed a place": passes("claimed", WRITE),
    "holding the lock": passes("locked", LOCK),
    "reading in the second pass": passes("reading", READ, due=(1, 1)),
}


@pytest.mark.parametrize("place", ["having claimed a place"])
def test_nothing_is_left(tmp_path, place):
    # The launcher sees it first, and ends the job before anybody can say why.
    done = run_case(PLACES[place], tmp_path / "case")
    check(PLACES[place], done)
    assert "over before" not in done.all_text
    assert_nothing_is_left(tmp_path / "case")


SLOW = {"making an element", "reading in the second pass"}


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[pytest.mark.slow] * (place in SLOW)) for place in PLACES]
)
def test_the_others_learn_who_is_gone(tmp_path, place):
    stdout, stderr = run_unseen(PLACES[place], tmp_path)
    assert "over before" not in stdout
    assert re.search(r"rank 1( is gone|: gone): process \d+ on .* has ended", ours(stderr)), stderr
    assert_nothing_is_left(tmp_path)
