"""What this process logs and warns of, on its way to one standard error for all ranks."""

from __future__ import annotations

import logging
import os
import time
import types
import warnings
from typing import TYPE_CHECKING, Any, TextIO

from mpistrat.epochs.beacon import Question
from mpistrat.epochs.courier import Courier
from mpistrat.epochs.printer import WINDOW_S, Line, print_line
from mpistrat.settings import settings_at_the_end

if TYPE_CHECKING:
    from mpistrat.epochs.channel import Channel

__all__ = ["close", "hand_over", "install", "say_last", "speak_on", "take_lines"]

_FLUSH_LIMIT_S = 3.0
_logger = logging.getLogger("mpistrat")


class _Output:
    """Where the lines of this process go."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.courier: Courier | None = None
        self.show_warning: Any = None

    def say(self, text: str) -> None:
        """Have `text` printed for this rank. Local, any thread."""
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
    """Have the ``mpistrat`` logger print to standard error, at the level of the setting. Local."""
    _logger.addHandler(_Handler())
    os.register_at_fork(after_in_child=_speak_alone)
    _set_level()


def speak_on(channel: Channel) -> None:
    """Have log lines and warnings go through rank 0 of `channel`, if no larger one does it. Local.

    Without a side channel, each rank prints its own lines.
    """
    _set_level()
    if channel.size == 1 or (_output.channel is not None and _output.channel.size > channel.size):
        return
    # Equal lines on the way to one rank 0 are not to meet those on the way to another.
    hand_over()
    _output.channel = channel
    if _output.courier is None:
        _output.courier = Courier(channel)
    if _shows_warnings_as_python_does():
        _output.show_warning = warnings.showwarning
        warnings.showwarning = _show_warning


def take_lines(channel: Channel, question: Question) -> dict[str, Any]:
    """Take lines of another rank of `channel`, if this one still can. Local, any thread."""
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
    """Wait until rank 0 has the lines of this rank. Local."""
    if _output.courier is not None:
        _output.courier.flush(_FLUSH_LIMIT_S, print_all=False)


def close() -> None:
    """Print all lines that are here, and from now on each line at once. Local."""
    courier, _output.courier = _output.courier, None
    if courier is not None:
        courier.flush(_FLUSH_LIMIT_S, print_all=True)


def say_last(text: str) -> None:
    """Print `text`, once for all ranks that say it now, and `close`. Local, any thread."""
    _output.say(text)
    hand_over()
    time.sleep(2 * WINDOW_S)
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
