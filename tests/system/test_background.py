"""Serial executor: functions run in order, and the waiting thread gets their errors."""

import gc
import os
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.system.background import Background, in_background
from tests.helpers import collect_in_a_thread


@pytest.fixture
def background():
    background = Background("test of the background")
    yield background
    background.drain()


def test_things_are_done_in_order_in_one_other_thread(background):
    seen = []

    def note(number):
        seen.append((number, threading.get_ident()))

    waits = [background.submit(lambda number=number: note(number)) for number in range(50)]
    for wait in reversed(waits):
        wait()
    assert [number for number, _ in seen] == list(range(50))
    threads = {thread for _, thread in seen}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@given(st.lists(st.booleans(), max_size=20), st.randoms(use_true_random=False))
def test_each_error_reaches_who_waits_for_it_as_often_as_asked(failures, random):
    background = Background("test of the background")

    def act(number, fails):
        if fails:
            raise KeyError(number)

    waits = [
        (number, fails, background.submit(lambda number=number, fails=fails: act(number, fails)))
        for number, fails in enumerate(failures)
    ]
    for number, fails, wait in random.sample([*waits, *waits], 2 * len(waits)):
        if fails:
            with pytest.raises(KeyError, match=f"^{number}$"):
                wait()
        else:
            assert wait() is None
    background.drain()


def test_an_error_that_nobody_waits_for_stops_nothing(background):
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        background.submit(lambda error=error: raise_(error))
    done = threading.Event()
    background.submit(done.set)()
    assert done.is_set()


def raise_(error):
    raise error


def test_draining_waits_for_all(background):
    gate, seen = threading.Event(), []
    background.submit(gate.wait)
    background.submit(lambda: seen.append(1))
    threading.Timer(0.05, gate.set).start()
    background.drain()
    assert seen == [1]
    background.drain()


def test_nothing_is_held_longer_than_needed(background):
    class Large:
        def use(self):
            pass

    large = Large()
    alive = weakref.ref(large)
    wait = background.submit(large.use)
    del large
    wait()
    gc.collect()
    assert alive() is None


def test_no_thread_before_there_is_work(background):
    before = threading.active_count()
    Background("idle")
    assert threading.active_count() == before


def test_where_no_thread_can_be_started_it_is_done_at_once(background, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    waits = [background.submit(lambda: seen.append(threading.get_ident())) for _ in range(2)]
    assert seen == [threading.get_ident()] * 2
    waits.append(background.submit(lambda: raise_(ValueError)))
    with pytest.raises(ValueError):
        waits.pop()()
    background.drain()
    monkeypatch.undo()
    background.submit(lambda: seen.append(threading.get_ident()))()
    assert seen[2] != threading.get_ident()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_has_no_part_in_what_is_under_way(background):
    gate = threading.Event()
    done_before = background.submit(int)
    done_before()
    pending = background.submit(gate.wait)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            done_before()
            background.drain()
            pending()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    gate.set()
    pending()
    assert "fork" in message


def test_the_garbage_collector_waits_for_no_thread():
    goes_on = threading.Event()

    def elements():
        yield 0
        goes_on.wait(60)

    def begun():
        background = in_background(elements(), 1)
        assert next(background) == 0
        return background

    try:
        collect_in_a_thread(begun)
    finally:
        goes_on.set()
