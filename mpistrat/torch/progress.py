"""Progress thread of messages: MPI moves data only inside its calls.

A rank that waits in an agreement polls shared memory, and one that computes calls nothing. So while
messages are under way, this thread tests them from time to time. It also keeps the memory of
messages whose work the program has dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Protocol

from mpi4py import MPI

from mpistrat.system.exit_hooks import Phase, at

_TICK_S = 0.001
_IDLE_TICKS = 50
"""For so long it stays awake without messages: to wake it costs a switch of threads."""
_TESTS = 32
"""How many messages it tests at each tick. One test makes MPI look at all of them."""
_PATIENCE_S = 1.0
"""How long the end of the program waits for the thread."""


class UnderWay(Protocol):
    """A message that may not be done."""

    @property
    def is_lost(self) -> bool:
        """Whether its group has ended, so that it may never be done."""

    def is_completed(self) -> bool:
        """Test whether it is done."""


class _Progress:
    """The thread of this process, and the messages that it tests."""

    def __init__(self) -> None:
        self._messages: deque[UnderWay] = deque()
        self._lost: list[UnderWay] = []
        """Not tested any more; but MPI may still write to their memory."""
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_ending = False

    def add(self, message: UnderWay) -> None:
        """Test `message` until it is done."""
        self._messages.append(message)
        if not self._awake.is_set():
            self._awake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._is_ending:
                return
            self._thread = threading.Thread(target=self._run, name="mpistrat-messages", daemon=True)
            self._thread.start()
        # Not at import: a program that sends no message has no such thread.
        at(Phase.AFTER_LAST_ROUND, self._end)
        at(Phase.BEFORE_ABORT, self._end)

    def _run(self) -> None:
        idle_ticks = 0
        while not self._is_ending:
            idle_ticks = 0 if self._messages else idle_ticks + 1
            if idle_ticks > _IDLE_TICKS:
                self._awake.clear()
                if not self._messages:  # else one was added before `clear`
                    self._awake.wait()
                idle_ticks = 0
            time.sleep(_TICK_S)
            self._test()

    def _test(self) -> None:
        for _ in range(min(len(self._messages), _TESTS)):
            message = self._messages.popleft()
            with contextlib.suppress(MPI.Exception):  # raised again to whoever waits for it
                if message.is_completed():
                    continue
            (self._lost if message.is_lost else self._messages).append(message)

    def _end(self) -> None:
        """End the thread: inside MPI or Python it would crash the end of the interpreter."""
        self._is_ending = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)


progress = _Progress()
"""That of this process."""
