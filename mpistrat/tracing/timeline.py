"""Timeline of a job: recording starts with the first strategy, and rank 0 merges all parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from mpistrat.system import exit_hooks
from mpistrat.system.text import rank_list
from mpistrat.tracing import spans
from mpistrat.tracing.trace import Part, Trace

_logger = logging.getLogger("mpistrat")

_PATIENCE_S = 3.0
"""How long rank 0 waits for parts that a shared file system does not show yet."""


def start(path: str, rank: int, size: int) -> None:
    """Record spans from now on, for the timeline `path`; does nothing the second time."""
    if spans.active() is not None:
        return
    # The program may change its folder.
    target = Path(path).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            # If this job is killed, the timeline of an older one must not pass for its own.
            target.unlink(missing_ok=True)
        # Each rank writes its own file: a shared one would need a message for each span, or a lock.
        recorder = spans.Recorder(str(Part.path_of(target, rank)), Part.new_header(rank, size))
    except OSError as error:
        raise OSError(
            f"MPISTRAT_TIMELINE={path!r} cannot be written by rank {rank} of {size}: "
            f"{error.strerror}. Name a file in a folder that every rank can write to."
        ) from None
    spans.record_on(recorder)
    session = _Session(target, rank, size, recorder)
    exit_hooks.at(exit_hooks.Phase.FAILED, lambda failure: session.flush())
    exit_hooks.at(exit_hooks.Phase.BEFORE_LAST_ROUND, session.flush)
    exit_hooks.at(exit_hooks.Phase.AFTER_LAST_ROUND, session.merge)


class _Session:
    """The part of this rank, and on rank 0 the timeline itself."""

    def __init__(self, target: Path, rank: int, size: int, recorder: spans.Recorder) -> None:
        self._target = target
        self._rank = rank
        self._size = size
        self._recorder = recorder

    def flush(self) -> None:
        """Write the spans so far."""
        try:
            self._recorder.flush()
        except OSError as error:
            self._complain(f"cannot be written: {error.strerror or error}")

    def merge(self) -> None:
        """End the recording, and on rank 0 merge the parts of all ranks."""
        self.flush()
        spans.record_on(None)
        if self._rank != 0:
            return
        try:
            parts = self._parts()
            Trace(parts).write(self._target)
            # Only now: until the timeline is complete, the parts are all there is.
            for part in parts:
                part.path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            self._complain(f"cannot be put together: {error}")

    def _parts(self) -> Sequence[Part]:
        paths = [Part.path_of(self._target, rank) for rank in range(self._size)]
        end = time.monotonic() + _PATIENCE_S
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if time.monotonic() > end:
                self._complain(f"has no part of {rank_list(missing)}")
                break
            time.sleep(0.05)
        return [Part.open(path) for path in paths if path.exists()]

    def _complain(self, text: str) -> None:
        _logger.warning("The timeline %s", text)
