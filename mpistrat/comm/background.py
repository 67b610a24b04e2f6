"""A thread that does one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Does what it is given in the order given, in a thread of its own.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._last: _Task | None = None
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], object]) -> Callable[[], None]:
        """Have `function` called; return what waits for its end, and raises what it raised."""
        task = _Task(function)
        self._tasks.put(task)
        self._last = task
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return task.wait

    def drain(self) -> None:
        """Wait until everything is done. Local."""
        if self._last is not None:
            self._last.done.wait()

    def _work(self) -> None:
        while True:
            self._tasks.get().run()


class _Task:
    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            assert self._function is not None
            self._function()
        except BaseException as error:
            self._error = error
        finally:
            # What the function holds is held no longer than needed.
            self._function = None
            self.done.set()

    def wait(self) -> None:
        """Wait for the end, and raise what was raised."""
        self.done.wait()
        if self._error is not None:
            raise self._error
