"""Reading ahead: which rows come next, and the threads that prepare them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mpistrat.data.order import Block
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.settings import settings
from mpistrat.system.cpu import current_core, own_cores


class ExpectedRows:
    """Queue of the rows that were announced and not read yet."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._start = 0
        """So many rows of the first block were read."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, block: Block) -> None:
        """Append rows."""
        if len(block):
            self._blocks.append(block)

    def first(self, count: int) -> Block | None:
        """Return the next rows; ``None`` where there are not so many."""
        parts: list[Block] = []
        start = self._start
        for block in self._blocks:
            part = block[start : start + count]
            # Usually the rows of a batch are all in one block, and nothing is copied.
            if len(part) == count and not parts:
                return part
            parts.append(part)
            count, start = count - len(part), 0
            if not count:
                return np.concatenate(parts)
        return None

    def drop(self, count: int) -> None:
        """Remove the next rows, or all where there are not so many."""
        self._start += count
        while self._blocks and self._start >= len(self._blocks[0]):
            self._start -= len(self._blocks.popleft())
        if not self._blocks:
            self._start = 0


_MAX_THREADS = 8
"""Python's own part of reading a chunk keeps more from helping."""


class DecodingThreads:
    """Threads of a reader: by default this rank's share of the cores."""

    # A thread is bound to its own core while it works: a virtual machine may run two threads on one
    # core while another core is idle.

    def __init__(self) -> None:
        chosen = settings().data_threads
        self.count = min(cores_of_rank(), _MAX_THREADS) if chosen is None else chosen
        self._pool: ThreadPoolExecutor | None = None
        self._cores = own_cores()
        self._free = sorted(self._cores)
        can_bind = current_core() is not None
        # No other rank has the cores too.
        self._is_apart = can_bind and self.count <= len(self._cores) == cores_of_rank() > 1
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call `function` in a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, "mpistrat-decode")
        if self._is_apart:
            args, function = (function, *args), self._run_apart
        return self._pool.submit(function, *args)

    def _run_apart(self, function: Callable[..., None], *args: Any) -> None:
        here = current_core()
        with self._lock:
            # Preferably the core where the thread runs already, whose caches it has filled.
            core = here if here in self._free else self._free[0]
            self._free.remove(core)
        try:
            _bind({core})
            function(*args)
        finally:
            # A thread that waits must not stay bound to a core that a different thread may get
            # next.
            _bind(self._cores)
            with self._lock:
                self._free.append(core)

    def close(self) -> None:
        """End the threads; what none has begun is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _bind(cores: Iterable[int]) -> None:
    """Let this thread run on `cores` alone."""
    with contextlib.suppress(OSError):  # they may have been taken from this job
        os.sched_setaffinity(0, cores)


_MIN_RUN_ROWS = 8
"""Fewer rows in a row may still be a part of disorder: then a block is read and cached."""


def is_run(numbers: np.ndarray) -> bool:
    """Return whether rows follow one another, and are more than a few."""
    first, count = int(numbers[0]), len(numbers)
    if count < _MIN_RUN_ROWS or numbers[-1] != first + count - 1:
        return False
    return np.arange(first, first + count).tobytes() == numbers.tobytes()
