"""Asynchronous checkpoints: rank 0 copies the state, and a thread writes the copy."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.arrays import Array, pieces
from mpistrat.checkpoint.format import VARIABLES, Header
from mpistrat.checkpoint.plan import SavePlan
from mpistrat.checkpoint.raw_io import (
    BYTES_PER_PIECE,
    BYTES_WORTH_A_THREAD,
    MOST_THREADS,
    pieces_on_host,
)
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.checkpoint.writer import BufferLifetime, FirstError, Item, Writers, create_checkpoint
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.mpi.world import failed_world_ranks, started_world
from mpistrat.native import native_library
from mpistrat.system import units
from mpistrat.system.background import Background
from mpistrat.system.cpu import num_cores
from mpistrat.system.exit_hooks import Phase, at, hold_while
from mpistrat.system.files import hidden_beside, remove_leftovers
from mpistrat.tracing.spans import spanned
from mpistrat.trackable import Trackable


def copy_to_host(target: np.ndarray, source: Array) -> None:
    """Write `source` to `target`, a host array in C order of its shape and dtype."""
    for into, piece in zip(pieces(target, BYTES_PER_PIECE), pieces_on_host(source), strict=True):
        np.copyto(into, piece)


class SharedCopies:
    """Copies of arrays, which other threads help to make; complete after `finish`."""

    def __init__(self) -> None:
        self._library = native_library()
        self._num_helpers = min(num_cores(), MOST_THREADS) - 1
        self._begun: list[Any] = []

    def begin(self, target: np.ndarray, source: Array) -> None:
        """Begin to copy `source`, which must not change, to `target`, as `copy_to_host` does."""
        is_plain = type(source) is np.ndarray and source.flags.carray and target.flags.carray
        is_large = source.nbytes >= BYTES_WORTH_A_THREAD
        if self._library is None or not is_plain or not is_large or not self._num_helpers:
            copy_to_host(target, source)
            return
        # `begin_copy` copies rows that begin at byte offsets; here the whole array is one row, at
        # 0.
        row = target.reshape(1, -1)
        copy = self._library.begin_copy(source, _AT_BEGIN, None, row, self._num_helpers)
        self._begun.append(copy)

    def finish(self) -> None:
        """Copy the rest, and wait for the other threads."""
        for copy in reversed(self._begun):  # the others began with the first
            self._library.end_copy(copy)
        self._begun = []


_AT_BEGIN = np.zeros(1, np.int64)


class Snapshot:
    """The state at one moment, in memory that the next snapshot reuses.

    Touching memory for the first time takes longer than the copy, so only the first snapshot pays
    for it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._items: list[Item] = []
        self._copies = SharedCopies()

    def clear(self) -> None:
        """Begin a new snapshot."""
        self._copies = SharedCopies()  # an earlier snapshot may have failed half-way
        self._memory = {
            each.path: each.array
            for each in self._items
            if each.group == VARIABLES and each.array is not None
        }
        self._items = []

    def add(self, item: Item) -> None:
        """Copy the values of `item` on the rank that has them, at the latest in `finish`."""
        array = item.array
        if array is None:
            return
        if item.group == VARIABLES:  # strings were created for this save
            copy = self._memory.pop(item.path, None)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = np.empty(array.shape, array.dtype)
            # A brief array is overwritten by the next item, so it is copied at once. The others do
            # not change until the save ends: threads copy them until `finish`.
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


@dataclass(frozen=True)
class _Pending:
    """A file that is being written, equal on all ranks."""

    path: str
    step: int
    created_s: float
    then: Callable[[], object]
    """What to do once the file is on disk."""
    ranks: tuple[int, ...]
    """The ranks of COMM_WORLD that save; the first one writes."""

    def settle(self) -> bool:
        """Return whether the file is there, after the rank that was to write it is lost."""
        # The lost rank may have died between the claim and the rename of its file. Its claim would
        # make the next writer of this path wait.
        hidden_beside(Path(self.path), "commit").unlink(missing_ok=True)
        with contextlib.suppress(CheckpointError), open_checkpoint(self.path) as reader:
            # A file of this name may be from an earlier run. Only the time shows that this save has
            # put its file in place; the old files may then still have to be removed.
            if reader.header.created == Header.timestamp(self.created_s):
                self.then()
                return True
        folder, name = os.path.split(self.path)
        remove_leftovers(folder, name)
        return False

    def warn(self) -> None:
        """Log that the file is dropped."""
        _logger.warning(
            "Checkpoint %s of step %d is dropped: rank 0 of %d, which wrote it, is lost. Earlier "
            "checkpoints are as they were.",
            *(self.path, self.step, len(self.ranks)),
        )


class BackgroundSaver:
    """Saves in the background, one file after the other.

    Rank 0 copies the state, and keeps the memory of the copy. A thread writes the copy. If the
    thread fails, the next `end` raises its error on every rank, or it is logged when the program
    ends.
    """

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread: Background | None = None
        """The thread of the last file, on the rank that writes it."""
        self._pending: _Pending | None = None
        self._wait: Callable[[], None] | None = None
        """Function that waits for the thread, on the rank that writes."""

    @spanned("checkpoint", _WHAT)
    def begin(
        self,
        root: Trackable,
        path: str,
        step: int,
        created_s: float,
        then: Callable[[], object],
        drift: str,
    ) -> None:
        """Copy the state below `root`, begin to write it, and call `then` in the thread."""
        began_s = time.perf_counter()
        plan = SavePlan(root, _WHAT, path, drift=drift)
        collectives = plan.collectives
        world_ranks = tuple(collectives.channel.transport.world_ranks)
        pending = _Pending(path, step, created_s, then, world_ranks)
        if not plan.writes_here:
            self._pending = pending
            return
        work = FirstError(collectives.rank == 0)
        work.run(self._snapshot.clear)
        for item in plan.items():
            work.run(self._snapshot.add, item)
            del item  # or the next would be created while this one exists
        work.run(self._snapshot.finish)
        # When this block ends, the copy on rank 0 is complete, and the program may change the
        # variables again.
        with collectives.common_outcome(_WHAT, path):
            _check_copied(work)
        self._note_undo()
        self._pending = pending
        if collectives.rank:
            # If the writer is lost, one of these ranks finds out when the program exits whether the
            # file is there.
            if collectives.is_elastic:
                _unended.add(self)
            return
        snapshot, header = self._snapshot, plan.header(step, created_s)

        def write() -> None:
            snapshot.write(path, header, plan.writers)
            then()
            _logger.info("Checkpoint %s written in %.2f s", path, time.perf_counter() - began_s)

        # A unit that is repeated after a loss would otherwise start a second thread for the same
        # file.
        collectives.on_commit(functools.partial(self._start, write))

    def _start(self, write: Callable[[], None]) -> None:
        _unended.add(self)
        # Python waits for a thread that is not a daemon before it calls any exit function. Those of
        # h5py would remove what writing needs.
        self._thread = Background("mpistrat-checkpoint", daemon=False)
        self._wait = self._thread.submit(write)
        self._thread.close()

    def _note_undo(self) -> None:
        units.on_undo(functools.partial(vars(self).update, dict(vars(self))))

    def end(self, collectives: Collectives) -> bool:
        """Wait for the file that is being written; return whether it is there. **Collective**."""
        pending = self._pending
        if pending is None:
            return False
        # Forgotten before the wait: an error of this file is raised once, and does not fail the
        # save after it.
        self._note_undo()
        self._pending = None
        is_writer = self._wait is not None
        # No rank has a thread, so the rank that had it is lost. The first of the remaining ranks
        # looks at the file.
        if collectives.is_elastic and not any(collectives.gather_json(is_writer, _WHAT)):
            _unended.discard(self)
            is_there = bool(collectives.on_root(pending.settle, _WHAT, pending.path))
            if not is_there and collectives.rank == 0:
                collectives.on_commit(pending.warn)
            return is_there
        with collectives.all_or_none(_WHAT, pending.path):
            wait, self._wait = self._wait, None
            try:
                if wait is not None:
                    wait()
            finally:
                _unended.discard(self)
        return True

    def is_writing(self) -> bool:
        """Return whether the thread is still writing the file. From any thread."""
        return self._thread is not None and self._thread.is_busy()

    def finish(self) -> bool:
        """Wait at the end of the program, and log an error that is left; return whether done."""
        pending, wait = self._pending, self._wait
        try:
            if wait is not None:
                wait()
            elif pending is not None:
                failed = failed_world_ranks()
                if pending.ranks[0] not in failed:
                    # Tried again in the last round: the writer may still be lost.
                    return False
                world = started_world()
                # To MPI, ranks that have ended are as lost as those that have died.
                # Only one rank settles, or two would remove the same files.
                is_next = world and pending.ranks[1:2] == (world.rank,)
                if is_next and not pending.settle():
                    pending.warn()
        except Exception as error:
            _logger.error("%s", error)
        self._pending = self._wait = None
        return True


def _check_copied(work: FirstError) -> None:
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
        # A fork copies only the thread that calls it (fork(2)): a child has no thread that writes,
        # and must not wait for the savers of its parent.
        if self._pid != os.getpid():  # the first saver, also the first of a fork
            self._pid = os.getpid()
            self._savers.clear()
            at(Phase.BEFORE_LAST_ROUND, self.finish)
            at(Phase.LAST_ROUND, self.finish)  # if the rank that writes is lost in between
            at(Phase.BEFORE_ABORT, self.finish)
            hold_while(self.is_at_work)
        self._savers.add(saver)

    def discard(self, saver: BackgroundSaver) -> None:
        """Stop waiting for `saver`."""
        self._savers.discard(saver)

    def finish(self) -> None:
        """Wait for all, and forget them."""
        self._savers = {each for each in self._savers if not each.finish()}

    def is_at_work(self) -> bool:
        """Return whether a file may not be on disk yet."""
        # A copy of the set, because a different thread may ask while this one adds a saver.
        return any(saver.is_writing() for saver in list(self._savers))


_unended = _Unended()
