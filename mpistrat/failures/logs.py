"""Logs and warnings of all ranks, which rank 0 merges on its standard error."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import sys
import threading
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from mpistrat.failures.monitor import Question
from mpistrat.settings import settings_at_the_end
from mpistrat.system.text import rank_list

if TYPE_CHECKING:
    from mpistrat.agreement.channel import Channel

_logger = logging.getLogger("mpistrat")
WINDOW_S = 0.3
"""How long a line waits for the same line from other ranks."""
_LAST_LINES_S = 2 * WINDOW_S
"""How long a rank waits for lines of other ranks if it ends without a last round."""
_MAX_OPEN = 500
_MAX_QUEUED = 1000
_MAX_CHARACTERS = 20_000
_BATCH_BYTES = 2**18
_ALONE_S = 10.0
"""Time without new messages to rank 0 after it did not answer."""
_TURN_S = 0.0002
_MAX_TURN_S = 0.2
"""Ranks wait for different times, so that the same line does not reach rank 0 all at once."""
_FLUSH_LIMIT_S = 3.0


def install() -> None:
    """Print the ``mpistrat`` logger to standard error, at the level of the setting."""
    _logger.addHandler(_Handler())
    os.register_at_fork(after_in_child=_stop_forwarding)
    _set_level()


def forward_over(channel: Channel) -> None:
    """Forward log lines and warnings to rank 0 of `channel`, unless a larger channel does."""
    _set_level()
    known = _output.channel
    if channel.size == 1 or (known and known.closed is None and known.size > channel.size):
        return
    # Lines that are queued for one rank 0 must not be merged with lines for a different one.
    flush()
    _output.channel = channel
    if _output.forwarder is None:
        _output.forwarder = LogForwarder(channel)
    _output.forwarder.channel = channel
    if _shows_warnings_as_python_does():
        _output.show_warning = warnings.showwarning
        warnings.showwarning = _show_warning


def stop_over(channel: Channel, others: Iterable[Channel]) -> None:
    """Stop forwarding lines over `channel`. Use the largest of `others` from now on, if any."""
    if _output.channel is not channel:
        return
    flush()
    _output.channel = max(others, key=lambda each: each.size, default=None)
    if _output.forwarder is not None:
        _output.forwarder.channel = _output.channel


def take_lines(channel: Channel, question: Question) -> dict[str, Any]:
    """Accept lines of another rank of `channel`, if this rank still can. From any thread."""
    rank = int(question["sender"])
    lines = [Line(str(text), channel, rank) for text in question["lines"]]
    forwarder = _output.forwarder
    # If the sender no longer waits for the answer, it has printed the lines itself.
    if forwarder is None or not question.is_awaited():
        return {"taken": False}
    for line in lines:
        forwarder.put(line)
    return {"taken": True}


def flush() -> None:
    """Wait until rank 0 has the lines of this rank."""
    if _output.forwarder is not None:
        _output.forwarder.flush(_FLUSH_LIMIT_S, print_all=False)


def close() -> None:
    """Print all queued lines, and from now on print each line at once."""
    # Remove the forwarder first, so that a line that is logged from now on is printed at once, and
    # does not stay in a queue that no thread empties.
    forwarder, _output.forwarder = _output.forwarder, None
    if forwarder is not None:
        forwarder.flush(_FLUSH_LIMIT_S, print_all=True)


def print_last(text: str) -> None:
    """Print `text`, once for all ranks that print it now, and `close`. From any thread."""
    _output.put(text)
    flush()
    time.sleep(_LAST_LINES_S)
    close()


def print_line(text: str, ranks: Iterable[int] = ()) -> None:
    """Write `text` to standard error, and put its ranks in front unless it begins with them."""
    who = rank_list(ranks) if ranks else ""
    label = f"{who}: " if who and not text.startswith(f"{who} ") else ""
    # Standard error may be closed.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mpistrat: {label}{text}\n")
        sys.stderr.flush()


class _Output:
    """Output of this process: its channel and its forwarder."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.forwarder: LogForwarder | None = None
        self.show_warning: Any = None

    def put(self, text: str) -> None:
        """Print `text` for this rank, now or by the forwarder. From any thread."""
        channel, forwarder = self.channel, self.forwarder
        if channel is None:
            print_line(text)
        elif forwarder is None:
            print_line(text, [channel.rank])
        else:
            forwarder.put(Line(text, channel, channel.rank))


_output = _Output()


class _Handler(logging.Handler):
    """Prints the records of the ``mpistrat`` logger if the program has no handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        if _has_other_handlers():
            return
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        _output.put(text)


@dataclass(frozen=True)
class Line:
    """Log record or warning of one rank. Its text may have several lines."""

    text: str
    channel: Channel
    """Channel in which `rank` is numbered."""
    rank: int


class LogForwarder:
    """Queue of lines, with a thread that prints them or sends them to rank 0."""

    # If this process is rank 0 of a channel, it prints the lines of the channel, merged with the
    # lines that other ranks send. It sends all other lines to rank 0 of their channel. If that
    # rank does not answer, this rank prints them.

    def __init__(self, channel: Channel) -> None:
        self.channel: Channel | None = channel
        # Unlike `Queue.put`, its `put` is reentrant, because a signal handler may log too.
        self._queue: queue.SimpleQueue[Line | _Mark] = queue.SimpleQueue()
        self._merger = LineMerger(print_line)
        self._num_dropped = 0
        # It is reentrant, because a signal handler that logs may interrupt the thread that has it.
        self._lock = threading.RLock()
        self._alone_until = 0.0
        threading.Thread(target=self._work, name="mpistrat-output", daemon=True).start()

    def put(self, line: Line) -> None:
        """Queue a line, or drop and count it if the queue is full. From any thread."""
        if self._queue.qsize() >= _MAX_QUEUED:
            with self._lock:
                self._num_dropped += 1
        else:
            self._queue.put(line)

    def flush(self, limit_s: float, *, print_all: bool) -> None:
        """Wait until rank 0 has all lines so far, and with `print_all` has printed them."""
        mark = _Mark(print_all)
        self._queue.put(mark)
        mark.reached.wait(limit_s)

    def _work(self) -> None:
        while True:
            items = self._next_items()
            self._print_or_send([each for each in items if isinstance(each, Line)])
            self._merger.print_due()
            # Handle marks after the lines: a mark stands for all lines that were queued before it.
            for mark in (each for each in items if isinstance(each, _Mark)):
                if mark.print_all:
                    self._merger.print_all()
                mark.reached.set()

    def _next_items(self) -> list[Line | _Mark]:
        """Wait for items of the queue, or until a line is due, and return the items."""
        items: list[Line | _Mark] = []
        with contextlib.suppress(queue.Empty):
            items.append(self._queue.get(timeout=self._merger.due_in_s()))
            while len(items) < _MAX_QUEUED:
                items.append(self._queue.get_nowait())
        with self._lock:
            dropped, self._num_dropped = self._num_dropped, 0
        if dropped and (channel := self.channel) is not None:
            text = f"{dropped} lines were dropped: they came faster than they could be printed."
            items.append(Line(text, channel, channel.rank))
        return items

    def _print_or_send(self, lines: Sequence[Line]) -> None:
        for channel, group in itertools.groupby(lines, key=lambda line: line.channel):
            if channel.rank == 0:
                for line in group:
                    self._merger.add(line)
            else:
                time.sleep(min(channel.rank * _TURN_S, _MAX_TURN_S))
                for texts in _batches(group):
                    if not self._reaches_rank_0(channel, texts):
                        for text in texts:
                            print_line(text, [channel.rank])

    def _reaches_rank_0(self, channel: Channel, texts: Sequence[str]) -> bool:
        if channel.peers is None or time.monotonic() < self._alone_until:
            return False
        # After any error, these lines and the next ones must still be printed.
        with contextlib.suppress(Exception):
            if channel.peers.deliver(texts):
                return True
        # If rank 0 does not answer, each question takes the full time limit, and the queue would
        # fill up.
        self._alone_until = time.monotonic() + _ALONE_S
        return False


class _Mark:
    """Position in the queue, and whether the thread has reached it."""

    def __init__(self, print_all: bool) -> None:
        self.print_all = print_all
        self.reached = threading.Event()


def _batches(lines: Iterator[Line]) -> Iterator[list[str]]:
    """Yield the lines in lists that are short enough for one question to a monitor."""
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


class LineMerger:
    """Prints a line once for all ranks that log it at about the same time. Not thread-safe."""

    # If one rank repeats a line, it is printed each time.

    def __init__(
        self,
        print_line: Callable[[str, Iterable[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print_line = print_line
        self._clock = clock
        self._order: deque[_Group] = deque()
        self._open: dict[tuple[int, str], list[_Group]] = {}

    def add(self, line: Line) -> None:
        """Add a line, which is printed when it is due."""
        # A group holds its channel, so the id cannot be reused for a different channel meanwhile.
        same = self._open.setdefault((id(line.channel), line.text), [])
        # If one rank logs the same line twice, the second one belongs to a separate group.
        group = next((each for each in same if line.rank not in each.ranks), None)
        if group is None:
            group = _Group(line, self._clock() + WINDOW_S)
            same.append(group)
            self._order.append(group)
        group.ranks.add(line.rank)
        if len(self._order) > _MAX_OPEN:
            self._print_first()

    def due_in_s(self) -> float | None:
        """Return the time in seconds until `print_due` has work, or ``None`` if it has none."""
        if not self._order:
            return None
        first = self._order[0]
        return 0.0 if first.is_complete() else max(0.0, first.due_s - self._clock())

    def print_due(self) -> None:
        """Print the lines that have waited long enough, or that every rank has logged."""
        while self.due_in_s() == 0:
            self._print_first()

    def print_all(self) -> None:
        """Print everything now."""
        while self._order:
            self._print_first()

    def _print_first(self) -> None:
        group = self._order.popleft()
        key = id(group.line.channel), group.line.text
        self._open[key].remove(group)
        if not self._open[key]:
            del self._open[key]
        self._print_line(group.line.text, group.ranks)


@dataclass
class _Group:
    line: Line
    due_s: float
    ranks: set[int] = field(default_factory=set)

    def is_complete(self) -> bool:
        return len(self.ranks) == self.line.channel.size


def _stop_forwarding() -> None:
    # A fork lacks the thread that empties the queue.
    _output.forwarder = None


def _set_level() -> None:
    level = settings_at_the_end().log
    if level is not None:
        _logger.setLevel(level)


def _has_other_handlers() -> bool:
    """Return whether the program has its own handler for the records of this logger."""
    logger: logging.Logger | None = _logger
    while logger is not None:
        if any(not isinstance(h, _Handler | logging.NullHandler) for h in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _shows_warnings_as_python_does() -> bool:
    """Return whether neither pytest nor the program has replaced `warnings.showwarning`."""
    # `catch_warnings(record=True)` replaces this private name of Python.
    record = getattr(warnings, "_showwarnmsg_impl", None)
    is_recorded = record is not None and not isinstance(record, types.FunctionType)
    return warnings.showwarning.__module__ in ("warnings", "_py_warnings") and not is_recorded


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if file is not None:
        _output.show_warning(message, category, filename, lineno, file, line)
        return
    _output.put(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"))
