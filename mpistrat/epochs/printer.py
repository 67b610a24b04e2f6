"""Lines of many ranks on one screen: those that are equal are printed once."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpistrat.epochs.report import rank_list

if TYPE_CHECKING:
    from mpistrat.epochs.channel import Channel

__all__ = ["WINDOW_S", "Line", "Printer", "print_line"]

WINDOW_S = 0.3
"""How long a line waits for the same line of other ranks."""
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


class Printer:
    """Prints each line once for all the ranks that say it at about the same time.

    What a rank repeats is printed as often as it says it. Not to be shared by threads.

    Parameters
    ----------
    print_line : callable
        Takes the text and the ranks that say it.
    clock : callable
        Returns the time in seconds.
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
        """Take a line, to be printed when it is due. Local."""
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
        """Return the time until `print_due` has something to do, ``None`` if never. Local."""
        if not self._order:
            return None
        first = self._order[0]
        return 0.0 if first.is_complete() else max(0.0, first.due_s - self._clock())

    def print_due(self) -> None:
        """Print what has waited long enough, or has come from every rank. Local."""
        while self.due_in_s() == 0:
            self._print_first()

    def print_all(self) -> None:
        """Print everything now. Local."""
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
    """Write `text` to standard error, after the ranks that it is from. Local.

    A text that begins with these ranks is not told them twice.
    """
    who = rank_list(ranks) if ranks else ""
    label = f"{who}: " if who and not text.startswith(f"{who} ") else ""
    # Where standard error is closed, nobody can be told.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mpistrat: {label}{text}\n")
        sys.stderr.flush()
