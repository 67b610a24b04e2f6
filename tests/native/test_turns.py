"""Turns of threads: handed over one at a time, interrupted by signals, on all their cores."""

import os
import signal
import threading
import time

import pytest

from mpistrat.native import native_library
from mpistrat.replicas.replica_threads import _PlainTurns

WAYS = [_PlainTurns] + ([native_library()] if native_library() is not None else [])


@pytest.mark.parametrize("turns", WAYS)
def test_one_thread_runs_at_a_time(turns):
    go, back = turns.make_turn(), turns.make_turn()
    order = []

    def work():
        given = None
        for number in range(100):
            turns.park(given, go)
            order.append(("kept", number))
            given = back
        turns.hand_over(back, None)

    thread = threading.Thread(target=work)
    thread.start()
    for number in range(100):
        order.append(("caller", number))
        turns.hand_over(go, back)
    thread.join()
    assert order == [(who, number) for number in range(100) for who in ("caller", "kept")]


@pytest.mark.skipif(native_library() is None, reason="nothing is compiled")
def test_a_signal_interrupts_the_wait_and_the_turn_is_given_once():
    turns = native_library()
    go, back = turns.make_turn(), turns.make_turn()
    given = []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def work():
        turns.park(None, go)
        given.append(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        turns.hand_over(back, None)

    def handler(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        with pytest.raises(TimeoutError):
            turns.hand_over(go, back)
        if not turns.has_taken(back):  # the signal may come just behind
            turns.hand_over(None, back)
        assert turns.has_taken(back)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert given == [1]
    assert cores is None or os.sched_getaffinity(0) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not of this system")
@pytest.mark.parametrize("turns", WAYS)
def test_who_has_the_turn_has_all_cores(turns):
    go, back = turns.make_turn(), turns.make_turn()
    own = os.sched_getaffinity(0)
    seen = []

    def work():
        given = None
        for _ in range(20):
            turns.park(given, go)
            seen.append(os.sched_getaffinity(0))
            given = back
        turns.hand_over(back, None)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        turns.hand_over(go, back)
        assert os.sched_getaffinity(0) == own
    thread.join()
    assert seen == [own] * 20


@pytest.mark.skipif(native_library() is None, reason="nothing is compiled")
def test_what_is_no_turn_is_refused():
    turns = native_library()
    own = turns.make_turn()
    for given in [(own,), (own, 3), ("go", own)]:
        with pytest.raises((TypeError, ValueError)):
            turns.hand_over(*given)
    with pytest.raises(TypeError):
        turns.park(own, None)
