"""Brings the lines of this rank to rank 0, without keeping the program waiting."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mpistrat.epochs.printer import Line, Printer, print_line

if TYPE_CHECKING:
    from mpistrat.epochs.channel import Channel

__all__ = ["Courier"]

_MAX_QUEUED = 1000
_MAX_CHARACTERS = 20_000
_BATCH_BYTES = 2**18
_ALONE_S = 10.0
"""How long rank 0 is left in peace after it did not answer."""
_TURN_S = 0.0002
_MAX_TURN_S = 0.2
"""The ranks that have all the same to say do not all come to rank 0 in the same moment."""


class Courier:
    """A queue of lines and the thread that empties it.

    Lines of channels in which this process is rank 0 are printed here, together with those that
    other ranks send. All others go to rank 0 of their channel; where it does not answer, this
    rank prints them itself.

    Parameters
    ----------
    channel : Channel
        To say how many lines were dropped.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Its `put` may be interrupted by a signal whose handler has something to say as well.
        self._queue: queue.SimpleQueue[Line | _Mark] = queue.SimpleQueue()
        self._printer = Printer(print_line)
        self._num_dropped = 0
        self._lock = threading.RLock()
        self._alone_until = 0.0
        threading.Thread(target=self._work, name="mpistrat-output", daemon=True).start()

    def put(self, line: Line) -> None:
        """Take a line; drop and count it where too many wait already. Local, any thread."""
        if self._queue.qsize() >= _MAX_QUEUED:
            with self._lock:
                self._num_dropped += 1
        else:
            self._queue.put(line)

    def flush(self, limit_s: float, *, print_all: bool) -> None:
        """Wait until each line so far is with rank 0, or is printed if that is here. Local.

        Parameters
        ----------
        limit_s : float
            After which it is left to the thread.
        print_all : bool
            Whether lines that are printed here no longer wait for those of other ranks.
        """
        mark = _Mark(print_all)
        self._queue.put(mark)
        mark.reached.wait(limit_s)

    def _work(self) -> None:
        while True:
            items = self._take()
            self._deliver([each for each in items if isinstance(each, Line)])
            self._printer.print_due()
            for mark in (each for each in items if isinstance(each, _Mark)):
                if mark.print_all:
                    self._printer.print_all()
                mark.reached.set()

    def _take(self) -> list[Line | _Mark]:
        """Return what is in the queue, once there is something or a line here is due."""
        items: list[Line | _Mark] = []
        with contextlib.suppress(queue.Empty):
            items.append(self._queue.get(timeout=self._printer.due_in_s()))
            while len(items) < _MAX_QUEUED:
                items.append(self._queue.get_nowait())
        with self._lock:
            dropped, self._num_dropped = self._num_dropped, 0
        if dropped:
            text = f"{dropped} lines were dropped: they came faster than they could be printed."
            items.append(Line(text, self._channel, self._channel.rank))
        return items

    def _deliver(self, lines: Sequence[Line]) -> None:
        for channel, group in itertools.groupby(lines, key=lambda line: line.channel):
            if channel.rank == 0:
                for line in group:
                    self._printer.add(line)
            else:
                time.sleep(min(channel.rank * _TURN_S, _MAX_TURN_S))
                for texts in _batches(group):
                    if not self._reaches_rank_0(channel, texts):
                        for text in texts:
                            print_line(text, [channel.rank])

    def _reaches_rank_0(self, channel: Channel, texts: Sequence[str]) -> bool:
        if channel.companions is None or time.monotonic() < self._alone_until:
            return False
        # Whatever goes wrong on the way, the lines are to be printed, and the next ones too.
        with contextlib.suppress(Exception):
            if channel.companions.deliver(texts):
                return True
        self._alone_until = time.monotonic() + _ALONE_S
        return False


class _Mark:
    """A place in the queue, and whether the thread has come to it."""

    def __init__(self, print_all: bool) -> None:
        self.print_all = print_all
        self.reached = threading.Event()


def _batches(lines: Iterator[Line]) -> Iterator[list[str]]:
    """Yield the texts, in lists that are short enough for one question to a beacon."""
    batch: list[str] = []
    num_bytes = 0
    for line in lines:
        text = line.text[:_MAX_CHARACTERS]
        num_bytes += len(json.dumps(text))
        if batch and num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], len(json.dumps(text))
        batch.append(text)
    yield batch
