"""Background threads: a serial executor, prefetching of elements, and clean-up that waits."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any


class Background:
    """Serial executor, which calls functions in order in one thread."""

    # A daemon thread ends with the program, even if functions are pending. Otherwise call `close`.

    def __init__(self, name: str, daemon: bool = True) -> None:
        self._name = name
        self._daemon = daemon
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._last: _Task | None = None
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], object]) -> Callable[[], None]:
        """Call `function` in the thread. Return a function that waits and raises its error."""
        task = _Task(function)
        if self._thread is None and not self._start():
            task.run()  # without a thread the call only takes longer
            return task.wait
        self._tasks.put(task)
        self._last = task
        return task.wait

    def drain(self) -> None:
        """Wait until all functions are done."""
        if self._last is not None:
            self._last.wait_for_end()

    def is_busy(self) -> bool:
        """Return whether a function is pending. May be called from any thread."""
        return self._last is not None and not self._last.is_done()

    def close(self) -> None:
        """End the thread once all functions are done. Nothing may be submitted after this."""
        if self._thread is not None:
            self._tasks.put(None)

    def _start(self) -> bool:
        """Start the thread, and return whether that was possible."""
        thread = threading.Thread(target=self._work, name=self._name, daemon=self._daemon)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter ends
            return False
        self._thread = thread
        return True

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            del task  # otherwise its error, and all objects that this refers to, would stay alive


class _Task:
    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._pid = os.getpid()

    def run(self) -> None:
        try:
            assert self._function is not None
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            # Drop the function, because it may refer to large objects.
            self._function = None
            self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait_for_end(self) -> None:
        if not self._done.is_set():
            # A fork has only the thread that forked, so no thread will ever set the event here.
            if os.getpid() != self._pid:
                raise RuntimeError(
                    "This process is a fork, and what it waits for is done in the process that "
                    "it was forked from. Wait there, before the fork or instead of here."
                )
            self._done.wait()

    def wait(self) -> None:
        """Wait for the end, and raise the error of the function."""
        self.wait_for_end()
        if self._error is not None:
            raise self._error


_POLL_S = 0.1


class _End:
    """The last item from the thread."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def in_background(
    elements: Generator[Any, None, None], num_ahead: int, begin: Callable[[], object] = bool
) -> Generator[Any, None, None]:
    """Yield from `elements`, which a thread prefetches up to `num_ahead` elements ahead.

    The thread first calls `begin`.
    """
    # The thread starts with the first element and ends when the iterator is exhausted, closed or
    # garbage collected. An exception of `elements` is raised in place of the element.
    ready: queue.Queue[Any] = queue.Queue(num_ahead)
    abandoned = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(elements, ready, abandoned, begin), name="mpistrat-prefetch"
    )
    thread.daemon = True
    thread.start()
    try:
        while not isinstance(element := ready.get(), _End):
            yield element
        if element.error is not None:
            raise element.error
    finally:
        abandoned.set()
        clean_up(thread.join)


def _produce(
    elements: Generator[Any, None, None],
    ready: queue.Queue[Any],
    abandoned: threading.Event,
    begin: Callable[[], object],
) -> None:
    error: BaseException | None = None
    try:
        begin()
        for element in elements:
            if not _put(element, ready, abandoned):
                break
    except BaseException as raised:
        error = raised
    finally:
        # Close it in this thread, which has run the generator, so that its `finally` blocks run
        # here too.
        elements.close()
    _put(_End(error), ready, abandoned)


def _put(element: Any, ready: queue.Queue[Any], abandoned: threading.Event) -> bool:
    # Use a time limit, because the reader may stop reading while the queue is full.
    while not abandoned.is_set():
        try:
            ready.put(element, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False


_collecting_thread: int | None = None
"""Thread in which the garbage collector is running. There is never more than one."""


def _note_collection(phase: str, _: object) -> None:
    global _collecting_thread
    _collecting_thread = threading.get_ident() if phase == "start" else None


gc.callbacks.append(_note_collection)


def clean_up(release: Callable[[], object]) -> None:
    """Call `release`, which may wait for threads."""
    # The garbage collector may interrupt code that holds a lock for which those threads wait, such
    # as the lock of HDF5, or it may run in one of them. Then let a new thread wait.
    if _collecting_thread == threading.get_ident():
        # Do not use `threading.Thread`, whose start takes locks. At the end of the program no
        # thread can start.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(release, ())
    else:
        release()


def call_later(delay_s: float, do: Callable[[], None]) -> None:
    """Call `do` in a thread after `delay_s` seconds. If no thread can start, wait and call it."""
    timer = threading.Timer(delay_s, do)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # the interpreter ends, and starts no more threads
        time.sleep(delay_s)
        do()


def raise_in_thread(thread: int, error: BaseException) -> threading.Event:
    """Raise `error` in the thread with this identifier, as soon as it runs Python code.

    The returned event is set once it is raised.
    """
    # CPython takes an exception class, not an instance, and creates the instance in that thread.
    is_raised = threading.Event()
    kind = type(error)

    def create(self: BaseException) -> None:
        kind.__init__(self, *error.args)
        is_raised.set()

    names = {"__init__": create, "__module__": kind.__module__, "__doc__": kind.__doc__}
    created = type(kind.__name__, (kind,), names)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(created))
    return is_raised
