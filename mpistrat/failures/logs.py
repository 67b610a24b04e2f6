"""What this process logs and warns of, on its way to one standard error for all ranks."""

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

__all__ = [
    "WINDOW_S",
    "Line",
    "LineMerger",
    "LogForwarder",
    "close",
    "hand_over",
    "install",
    "print_line",
    "say_last",
    "speak_on",
    "take_lines",
]

WINDOW_S = 0.3
"""How long a line waits for the same line of other ranks."""
_LAST_LINES_S = 2 * WINDOW_S
"""How long a rank that ends without further agreement waits for lines of other ranks."""
_MAX_OPEN = 500


@dataclass(frozen=True)
class Line:
    """What one rank has to say, in one line of text or several."""

    text: str
    channel: Channel
    """Gives `rank` its meaning."""
    rank: int


@dataclass
class _Group:
    line: Line
    due_s: float
    ranks: set[int] = field(default_factory=set)

    def is_complete(self) -> bool:
        return len(self.ranks) == self.line.channel.size


class LineMerger:
    """Prints each line once for all the ranks that say it at about the same time.

    What a rank repeats is printed as often as it says it. Not to be shared by threads.
    """

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
        """Take a line, to be printed when it is due."""
        same = self._open.setdefault((id(line.channel), line.text), [])
        group = next((each for each in same if line.rank not in each.ranks), None)
        if group is None:
            group = _Group(line, self._clock() + WINDOW_S)
            same.append(group)
            self._order.append(group)
        group.ranks.add(line.rank)
        if len(self._order) > _MAX_OPEN:
            self._print_first()

    def due_in_s(self) -> float | None:
        """Return the time until `print_due` has something to do, ``None`` if never."""
        if not self._order:
            return None
        first = self._order[0]
        return 0.0 if first.is_complete() else max(0.0, first.due_s - self._clock())

    def print_due(self) -> None:
        """Print what has waited long enough, or has come from every rank."""
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


def print_line(text: str, ranks: Iterable[int] = ()) -> None:
    """Write `text` to standard error, after the ranks that it is from.

    A text that begins with these ranks is not told them twice.
    """
    who = rank_list(ranks) if ranks else ""
    label = f"{who}: " if who and not text.startswith(f"{who} ") else ""
    # Where standard error is closed, nobody can be told.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mpistrat: {label}{text}\n")
        sys.stderr.flush()


_MAX_QUEUED = 1000
_MAX_CHARACTERS = 20_000
_BATCH_BYTES = 2**18
_ALONE_S = 10.0
"""How long rank 0 is left in peace after it did not answer."""
_TURN_S = 0.0002
_MAX_TURN_S = 0.2
"""The ranks that have all the same to say do not all come to rank 0 in the same moment."""


class LogForwarder:
    """A queue of lines and the thread that empties it.

    Lines of channels in which this process is rank 0 are printed here, together with those that
    other ranks send. All others go to rank 0 of their channel; where it does not answer, this
    rank prints them itself.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Its `put` may be interrupted by a signal whose handler has something to say as well.
        self._queue: queue.SimpleQueue[Line | _Mark] = queue.SimpleQueue()
        self._printer = LineMerger(print_line)
        self._num_dropped = 0
        self._lock = threading.RLock()
        self._alone_until = 0.0
        threading.Thread(target=self._work, name="mpistrat-output", daemon=True).start()

    def put(self, line: Line) -> None:
        """Take a line; drop and count it where too many wait already, from any thread."""
        if self._queue.qsize() >= _MAX_QUEUED:
            with self._lock:
                self._num_dropped += 1
        else:
            self._queue.put(line)

    def flush(self, limit_s: float, *, print_all: bool) -> None:
        """Wait until each line so far is with rank 0, or is printed if that is here."""
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
        if channel.peers is None or time.monotonic() < self._alone_until:
            return False
        # Whatever goes wrong on the way, the lines are to be printed, and the next ones too.
        with contextlib.suppress(Exception):
            if channel.peers.deliver(texts):
                return True
        self._alone_until = time.monotonic() + _ALONE_S
        return False


class _Mark:
    """A place in the queue, and whether the thread has come to it."""

    def __init__(self, print_all: bool) -> None:
        self.print_all = print_all
        self.reached = threading.Event()


def _batches(lines: Iterator[Line]) -> Iterator[list[str]]:
    """Yield the texts, in lists that are short enough for one question to a monitor."""
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


_FLUSH_LIMIT_S = 3.0
_logger = logging.getLogger("mpistrat")


class _Output:
    """Where the lines of this process go."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.courier: LogForwarder | None = None
        self.show_warning: Any = None

    def say(self, text: str) -> None:
        """Have `text` printed for this rank, from any thread."""
        channel, courier = self.channel, self.courier
        if channel is None:
            print_line(text)
        elif courier is None:
            print_line(text, [channel.rank])
        else:
            courier.put(Line(text, channel, channel.rank))


_output = _Output()


class _Handler(logging.Handler):
    """Prints the records of the ``mpistrat`` logger where the program has no handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        if _has_other_handlers():
            return
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        _output.say(text)


def install() -> None:
    """Have the ``mpistrat`` logger print to standard error, at the level of the setting."""
    _logger.addHandler(_Handler())
    os.register_at_fork(after_in_child=_speak_alone)
    _set_level()


def speak_on(channel: Channel) -> None:
    """Have log lines and warnings go through rank 0 of `channel`, if no larger one does it.

    Without a side channel, each rank prints its own lines.
    """
    _set_level()
    if channel.size == 1 or (_output.channel is not None and _output.channel.size > channel.size):
        return
    # Equal lines on the way to one rank 0 are not to meet those on the way to another.
    hand_over()
    _output.channel = channel
    if _output.courier is None:
        _output.courier = LogForwarder(channel)
    if _shows_warnings_as_python_does():
        _output.show_warning = warnings.showwarning
        warnings.showwarning = _show_warning


def take_lines(channel: Channel, question: Question) -> dict[str, Any]:
    """Take lines of another rank of `channel`, if this one still can, from any thread."""
    rank = int(question["teller"])
    lines = [Line(str(text), channel, rank) for text in question["lines"]]
    courier = _output.courier
    # Who has given up waiting for the answer has printed the lines already.
    if courier is None or not question.is_awaited():
        return {"taken": False}
    for line in lines:
        courier.put(line)
    return {"taken": True}


def hand_over() -> None:
    """Wait until rank 0 has the lines of this rank."""
    if _output.courier is not None:
        _output.courier.flush(_FLUSH_LIMIT_S, print_all=False)


def close() -> None:
    """Print all lines that are here, and from now on each line at once."""
    courier, _output.courier = _output.courier, None
    if courier is not None:
        courier.flush(_FLUSH_LIMIT_S, print_all=True)


def say_last(text: str) -> None:
    """Print `text`, once for all ranks that say it now, and `close`, from any thread."""
    _output.say(text)
    hand_over()
    time.sleep(_LAST_LINES_S)
    close()


def _speak_alone() -> None:
    # A fork has no thread that would empty the queue.
    _output.courier = None


def _set_level() -> None:
    level = settings_at_the_end().log
    if level is not None:
        _logger.setLevel(level)


def _has_other_handlers() -> bool:
    """Return whether the program prints the records of this logger itself."""
    logger: logging.Logger | None = _logger
    while logger is not None:
        if any(not isinstance(h, _Handler | logging.NullHandler) for h in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _shows_warnings_as_python_does() -> bool:
    """Return whether nobody (pytest, the program) has put something else in the place."""
    # Python's own name for what `catch_warnings(record=True)` replaces.
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
    _output.say(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"))
