"""Output of the commands: tables for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

__all__ = [
    "Command",
    "check_can_draw",
    "check_can_write",
    "is_terminal",
    "on_one_line",
    "print_error",
    "print_json",
    "print_line",
    "print_table",
    "tree_labels",
]


@dataclass(frozen=True)
class Command:
    """One command; `mpistrat.cli` lists them all."""

    name: str
    """As typed after ``mpistrat``."""
    help: str
    """One line for ``mpistrat --help``."""
    add_arguments: Callable[[argparse.ArgumentParser], object]
    """Declares the arguments."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code."""


_Tree = dict[str, "_Tree"]


def tree_labels(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a label with guide lines and its path, for each path and each group."""
    root: _Tree = {}
    for path in paths:
        node = root
        for part in path.split("/"):
            node = node.setdefault(part, {})
    yield from _labels(root, "", "")


def _labels(node: _Tree, above: str, guide: str) -> Iterator[tuple[str, str]]:
    for number, (part, children) in enumerate(node.items(), 1):
        path = f"{above}/{part}" if above else part
        is_last = number == len(node)
        branch, deeper = ("└── ", "    ") if is_last else ("├── ", "│   ")
        if not above:
            branch = deeper = ""
        yield f"{guide}{branch}{part}", path
        yield from _labels(children, path, guide + deeper)


_GAP = 3
"""Blanks between two columns."""
_NARROWEST = 16
"""The least width of a folded column."""


def is_terminal() -> bool:
    """Return whether people, rather than programs, read what is printed."""
    # The terminals that launchers make for their tasks have no width, and may end in a file.
    return sys.stdout.isatty() and shutil.get_terminal_size((0, 0)).columns > 0


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: one line for each row, folded where the terminal is too narrow."""
    cells = [[_printable(on_one_line(cell), sys.stdout) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    if not is_terminal():  # for grep and awk: neither cut nor folded
        for row in (columns, *cells):
            print(_padded(row, widths))
        return
    console = Console(file=sys.stdout)
    # The widest column makes room for the others; if that is not enough, rows become paragraphs.
    room = console.width - sum(widths) - _GAP * (len(widths) - 1) + max(widths)
    if room < _NARROWEST:
        for first, *others in cells:
            named = [f"{title} {c}" for title, c in zip(columns[1:], others, strict=True) if c]
            print("\n  ".join(filter(None, [first, ", ".join(named)])))
        return
    widths[widths.index(max(widths))] = min(room, max(widths))
    for row in (columns, ["-" * width for width in widths], *cells):
        folded = [_fold(console, cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*folded, fillvalue=""):
            print(_padded(line, widths))


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    return (" " * _GAP).join(map(set_cell_size, row, widths)).rstrip()


def _fold(console: Console, cell: str, width: int) -> list[str]:
    if cell_len(cell) <= width:
        return [cell]
    return [line.plain for line in Text(cell).wrap(console, width)]


def on_one_line(text: object) -> str:
    """Return what came from a file or a user with its line ends as escapes."""
    return str(text).replace("\n", "\\n")


def print_line(text: str) -> None:
    """Print one line."""
    print(_printable(text, sys.stdout))


def print_error(command: str, text: object) -> None:
    """Print an error message."""
    print(f"mpistrat {command}: {_printable(str(text), sys.stderr)}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print `value` as strict JSON: infinities and NaN become strings."""
    print(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _printable(text: str, stream: TextIO) -> str:
    """Return `text` with control characters, and those unknown to `stream`, as escapes."""
    # Names come from files, and a hostile one could hold escape sequences of the terminal.
    if text.isascii() and text.isprintable():
        return text
    safe = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    encoding = stream.encoding or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def check_can_draw() -> None:
    """Raise ValueError where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed. Install it with: "
            "pip install matplotlib."
        ) from None


def check_can_write(path: Path) -> None:
    """Raise ValueError where `path` cannot be a new file, before any work is done for it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: its folder must exist, and it be a file.")
