"""A collective that is called inside of another one of its rank is an error on every rank."""

import re
import threading
import weakref

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours


def from_a_thread(strategy, seen):
    def call():
        with pytest.raises(ms.errors.ContextError, match="another thread") as caught:
            strategy.reduce("sum", 1000)
        seen.append(str(caught.value))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def from_a_destructor(strategy, seen):
    class Careless:
        def __del__(self):
            call_inside(strategy, seen)

    Careless()


def from_a_weak_reference(strategy, seen):
    class Watched:
        pass

    watched = Watched()
    reference = weakref.ref(watched, lambda _: call_inside(strategy, seen))
    del watched
    assert reference() is None


def call_inside(strategy, seen):
    with pytest.raises(
        ms.errors.ContextError, match="reduce was called inside of reduce"
    ) as caught:
        strategy.reduce("sum", 1000)
    seen.append(str(caught.value))


ways = pytest.mark.parametrize("way", [from_a_thread, from_a_destructor, from_a_weak_reference])
lengths = pytest.mark.parametrize("length", [1, 100_000])


def overlap_once(strategy, way):
    """Have `way` call a collective inside of the next one, and return what it saw."""
    channel = strategy.extended._collectives.channel
    seen = []

    def overlap(number):
        channel.on_collective = None
        way(strategy, seen)

    channel.on_collective = overlap
    return seen


@ways
@lengths
def test_on_one_rank_it_is_an_error_on_all(strategy, others, size, way, length):
    ones = np.ones(length)
    if others:
        strategy.reduce("sum", ones)
        with pytest.raises(ms.errors.CollectiveMismatchError) as caught:
            strategy.reduce("sum", ones)
        assert re.search(rf"rank {size - 1}: +reduce was called", str(caught.value))
        assert "  test_overlaps.py:" in str(caught.value)
    else:
        seen = overlap_once(strategy, way)
        with pytest.raises(ms.errors.ContextError, match="reduce was called") as caught:
            strategy.reduce("sum", ones)
        assert seen == [str(caught.value)]
    with pytest.raises(ms.errors.CollectiveMismatchError, match="was called"):
        strategy.reduce("sum", ones)
    assert ms.MPIStrategy(device="cpu").reduce("sum", 1) == size


@ways
def test_on_all_ranks_it_leaves_the_strategy_usable(strategy, size, way):
    seen = overlap_once(strategy, way)
    with pytest.raises(ms.errors.ContextError, match="reduce was called"):
        strategy.reduce("sum", 1)
    assert len(seen) == 1
    assert strategy.reduce("sum", 1) == size


def test_work_that_fails_on_all_if_on_any_is_a_collective_at_its_end(strategy, others, size):
    collectives = strategy.extended._collectives
    expected = ms.errors.CollectiveMismatchError if others else ms.errors.ContextError
    with pytest.raises(expected, match="reduce was called inside of work"):
        with collectives.all_or_none("work"):
            if not others:
                overlap_once(strategy, from_inside_of_work)
        strategy.reduce("sum", 1)
    assert ms.MPIStrategy(device="cpu").reduce("sum", 1) == size


def from_inside_of_work(strategy, seen):
    with pytest.raises(ms.errors.ContextError, match="reduce was called inside of work"):
        strategy.reduce("sum", 1000)


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [1, 100_000])
@pytest.mark.parametrize("is_caught", [True, False])
def test_a_signal_handler_that_calls_a_collective_in_one(tmp_path, ranks, length, is_caught):
    script = tmp_path / "program.py"
    script.write_text(
        PRELUDE
        + f"""
import signal
def ring(*_):
    try:
        strategy.reduce("sum", np.full({length}, 1000.0))
    except ms.errors.ContextError:
        if not {is_caught}:
            raise
if rank == 0:
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
else:
    time.sleep(1)
caught = []
for _ in range(3):
    try:
        assert strategy.reduce("sum", np.ones({length}))[0] == size
    except ms.errors.MpistratError as error:
        caught.append(type(error).__name__)
        assert "reduce was called inside of reduce" in str(error)
own = "ContextError" if rank == 0 else "CollectiveMismatchError"
assert caught[0] == own and caught[1:] == ["CollectiveMismatchError"] * (1 + (rank == 0)), caught
print("told")
"""
    )
    result = launch.run([script], ranks, 60, env={"MPISTRAT_TIMEOUT_S": "20"})
    assert result.stdout.split() == ["told"] * ranks, ours(result.stderr)
    assert result.returncode == 0


@pytest.mark.launches
def test_threads_that_reduce_side_by_side_end_the_job(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        PRELUDE
        + """
import sys
import threading
sys.setswitchinterval(1e-5)  # or one thread may end before the other has begun
wrong = []
def second():
    for _ in range(300):
        try:
            if strategy.reduce("sum", 1000) != 1000 * size:
                wrong.append("second")
        except ms.errors.ContextError:
            pass
if rank == 0:
    threading.Thread(target=second, daemon=True).start()
for number in range(300):
    if strategy.reduce("sum", 1) != size:
        wrong.append("first")
print("wrong" if wrong else "right")
"""
    )
    result = launch.run([script], 2, 60, env={"MPISTRAT_TIMEOUT_S": "20"})
    assert result.returncode != 0
    assert result.stdout == ""
