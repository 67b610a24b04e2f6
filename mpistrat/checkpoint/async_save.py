"""Asynchronous checkpoints: rank 0 copies the state, and a thread writes the copy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.collect import StateCollector
from mpistrat.checkpoint.format import VARIABLES, Header
from mpistrat.checkpoint.ownership import Writers
from mpistrat.checkpoint.raw_io import SharedCopies, copy_to_host
from mpistrat.checkpoint.root_file import RootWork
from mpistrat.checkpoint.writer import BufferLifetime, Item, create_checkpoint
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.system.exit_hooks import Phase, at, hold_while
from mpistrat.system.threads import Background
from mpistrat.tracing.spans import spanned
from mpistrat.trackable import Trackable

__all__ = ["BackgroundSaver"]


class Snapshot:
    """The state at one moment, in memory that the next snapshot uses again.

    The first touch of memory takes longer than the copy, so only the first snapshot pays it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._items: list[Item] = []
        self._copies = SharedCopies()

    def clear(self) -> None:
        """Begin a new snapshot."""
        self._copies = SharedCopies()  # an earlier one may have failed half-way
        self._memory = {
            each.path: each.array
            for each in self._items
            if each.group == VARIABLES and each.array is not None
        }
        self._items = []

    def add(self, item: Item) -> None:
        """Copy the values of `item` on the rank that has them, by `finish` at the latest."""
        array = item.array
        if array is None:
            return
        if item.group == VARIABLES:  # texts have been made for this save
            copy = self._memory.pop(item.path, None)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = np.empty(array.shape, array.dtype)
            if item.life is BufferLifetime.BRIEF:
                copy_to_host(copy, array)
            else:
                self._copies.begin(copy, array)
            item = replace(item, array=copy, life=BufferLifetime.LONG)
        self._items.append(item)

    def finish(self) -> None:
        """Wait for the copies that `add` has begun."""
        self._copies.finish()

    def write(self, path: str, header: Header, writers: Writers | None) -> None:
        """Write the file `path`. From any thread."""
        with create_checkpoint(path, header, writers) as writer:
            for item in self._items:
                writer.add(item)


_WHAT = "CheckpointManager.save"
_logger = logging.getLogger("mpistrat")


class BackgroundSaver:
    """Saves in the background, one file after the other.

    A copy of the state is taken on rank 0, whose memory it keeps. A thread writes it. What the
    thread fails at is raised on every rank by the next `end`, or logged when the program ends.
    """

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread: Background | None = None
        """The thread of the last file, on rank 0."""
        self._path: str | None = None
        """What is being written, equal on all ranks."""
        self._wait: Callable[[], None] | None = None
        """What waits for the thread, on rank 0."""

    @spanned("checkpoint", _WHAT)
    def begin(
        self,
        root: Trackable,
        path: str,
        step: int,
        created_s: float,
        then: Callable[[], object],
    ) -> None:
        """Copy the state below `root`, begin to write it, and `then` call that in the thread."""
        began_s = time.perf_counter()
        gathering = StateCollector(root, _WHAT, path)
        if not gathering.writes_here:
            self._path = path
            return
        work = RootWork(gathering.collectives)
        work.attempt(self._snapshot.clear)
        work.attempt_each(self._snapshot.add, gathering.items())
        work.attempt(self._snapshot.finish)
        with gathering.collectives.common_outcome(_WHAT, path):
            _check_copied(work)
        self._path = path
        if gathering.collectives.rank:
            return
        snapshot, header = self._snapshot, gathering.header(step, created_s)

        def write() -> None:
            snapshot.write(path, header, gathering.writers)
            then()
            _logger.info("Checkpoint %s written in %.2f s", path, time.perf_counter() - began_s)

        _unended.add(self)
        # Python waits for such a thread before it calls any function at the exit, as those by
        # which h5py undoes what writing needs.
        self._thread = Background("mpistrat-checkpoint", daemon=False)
        self._wait = self._thread.submit(write)
        self._thread.close()

    def end(self, collectives: Collectives) -> bool:
        """Wait for the file that is being written; return whether there was one. **Collective**."""
        if self._path is None:
            return False
        path, self._path = self._path, None
        with collectives.all_or_none(_WHAT, path):
            if self._wait is not None:
                wait, self._wait = self._wait, None
                try:
                    wait()
                finally:
                    _unended.discard(self)
        return True

    def is_writing(self) -> bool:
        """Return whether the thread has not come to the end of the file. From any thread."""
        return self._thread is not None and self._thread.is_busy()

    def finish(self) -> None:
        """Wait at the end of the program, and log what nobody will ask for."""
        try:
            if self._wait is not None:
                self._wait()
        except Exception as error:
            _logger.error("%s", error)
        finally:
            self._wait = None


def _check_copied(work: RootWork) -> None:
    try:
        work.check()
    except MemoryError as error:
        raise CheckpointError(
            f"There is no memory for a copy of the state on rank 0: {error}. Save with "
            "asynchronous=False."
        ) from error


class _Unended:
    """The savers whose files may not be on disk yet: the program and the job wait for them."""

    def __init__(self) -> None:
        self._savers: set[BackgroundSaver] = set()
        self._pid = 0

    def add(self, saver: BackgroundSaver) -> None:
        """Wait for `saver` at the end of the program."""
        if self._pid != os.getpid():  # the first, also the first of a fork
            self._pid = os.getpid()
            self._savers.clear()
            at(Phase.BEFORE_LAST_ROUND, self.finish)
            at(Phase.BEFORE_ABORT, self.finish)
            hold_while(self.is_at_work)
        self._savers.add(saver)

    def discard(self, saver: BackgroundSaver) -> None:
        """Stop waiting for `saver`."""
        self._savers.discard(saver)

    def finish(self) -> None:
        """Wait for all, and forget them."""
        while self._savers:
            saver = next(iter(self._savers))
            saver.finish()
            self._savers.discard(saver)

    def is_at_work(self) -> bool:
        """Return whether a file may not be on disk yet."""
        return any(saver.is_writing() for saver in list(self._savers))


_unended = _Unended()
