"""Terminal windows in pictures: a title bar, and lines with coloured words."""

import re
import textwrap

from tools.pictures.palette import DARK
from tools.pictures.svg import Drawing

__all__ = ["height_of", "terminal", "wrap"]

_ROW, _BAR, _PAD = 18.5, 30, 14

Marks = tuple[tuple[str, str], ...]
"""Regular expressions, and the names of the colours in which what they match is written."""


def wrap(lines: list[str], columns: int) -> list[str]:
    """Return lines of at most `columns` characters, each continued with its own indentation."""
    found = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        found += textwrap.wrap(line, columns, subsequent_indent=indent, break_long_words=False) or [
            ""
        ]
    return found


def height_of(num_lines: int) -> float:
    """Return the height of a terminal with so many lines."""
    return _BAR + _PAD + _ROW * num_lines + 6


def terminal(
    drawing: Drawing, y: float, title: str, lines: list[str], marks: Marks = (), x: float = 0
) -> None:
    """Draw a terminal over the width that is left; it is dark on light pages too."""
    width = drawing.width - x - 1
    height = height_of(len(lines))
    drawing.rect(x + 0.5, y, width, height, fill=DARK.panel, stroke=DARK.line, radius=9)
    for number, colour in enumerate((DARK.red, DARK.orange, DARK.green)):
        drawing.circle(x + 18 + 17 * number, y + 16, 5, fill=colour)
    drawing.text(x + 78, y + 21, title, size=13, colour=DARK.muted)
    for number, line in enumerate(lines):
        base = y + _BAR + _PAD + _ROW * number + 5
        drawing.spans(x + 16, base, _coloured(line, marks), size=12.5)


def _coloured(line: str, marks: Marks) -> list[tuple[str, str]]:
    """Return the parts of a line with their colours; the first mark that matches wins."""
    spans, at = [], 0
    pattern = "|".join(f"({expression})" for expression, _ in marks) or "$^"
    for match in re.finditer(pattern, line):
        colour = marks[match.lastindex - 1][1] if match.lastindex else "ink"
        spans += [(line[at : match.start()], DARK.ink), (match.group(), getattr(DARK, colour))]
        at = match.end()
    return [each for each in [*spans, (line[at:], DARK.ink)] if each[0]]
