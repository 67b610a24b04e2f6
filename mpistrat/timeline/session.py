"""The recording of a timeline: begun by the first strategy, put together when all have left."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mpistrat import spans
from mpistrat.epochs.leaving import Leaving, watch_leaving
from mpistrat.epochs.report import rank_list
from mpistrat.timeline.parts import FORMAT, FORMAT_VERSION, Part, part_of
from mpistrat.timeline.trace import write_trace

__all__ = ["start"]

_logger = logging.getLogger("mpistrat")

_PATIENCE_S = 3.0
"""How long rank 0 looks for parts that a shared file system does not show yet."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def start(path: str, rank: int, size: int) -> None:
    """Record spans from now on, for the timeline `path`. Local; does nothing the second time.

    Each rank writes a part of its own. Rank 0 puts them together after all have left.

    Raises
    ------
    OSError
        If this rank cannot write its part.
    """
    if spans.active() is not None:
        return
    # The program may change its folder.
    target = Path(path).absolute()
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "clock": _clock(),
        "wall_clock_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            # If this job is killed, no older one shall be taken for it.
            target.unlink(missing_ok=True)
        recorder = spans.Recorder(str(part_of(target, rank)), header)
    except OSError as error:
        raise OSError(
            f"MPISTRAT_TIMELINE={path!r} cannot be written by rank {rank} of {size}: "
            f"{error.strerror}. Name a file in a folder that every rank can write to."
        ) from None
    spans.record_on(recorder)
    watch_leaving(_Session(target, rank, size, recorder))


def _clock() -> str:
    """Return what is equal on ranks that read the same monotonic clock. Local."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class _Session(Leaving):
    def __init__(self, target: Path, rank: int, size: int, recorder: spans.Recorder) -> None:
        self._target = target
        self._rank = rank
        self._size = size
        self._recorder = recorder

    def failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.before_farewell()

    def before_farewell(self) -> None:
        try:
            self._recorder.flush()
        except OSError as error:
            self._complain(f"cannot be written: {error.strerror or error}")

    def after_farewell(self) -> None:
        self.before_farewell()
        spans.record_on(None)
        if self._rank != 0:
            return
        try:
            parts = self._parts()
            write_trace(self._target, parts)
            for part in parts:
                part.path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            self._complain(f"cannot be put together: {error}")

    def _parts(self) -> Sequence[Part]:
        paths = [part_of(self._target, rank) for rank in range(self._size)]
        end = time.monotonic() + _PATIENCE_S
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if time.monotonic() > end:
                self._complain(f"has no part of {rank_list(missing)}")
                break
            time.sleep(0.05)
        return [Part.open(path) for path in paths if path.exists()]

    def _complain(self, text: str) -> None:
        _logger.warning("The timeline %s", text)
