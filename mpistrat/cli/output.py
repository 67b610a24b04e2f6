"""Output of the commands: tables for people, JSON for programs, errors on stderr.

A terminal gets colours, trees and rules. A pipe or a file gets plain text, neither cut nor folded.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpistrat.settings import environment

GROUPS = ("run programs", "inspect files", "find problems", "measure", "other")
"""Headings of ``mpistrat --help``."""


@dataclass(frozen=True)
class Command:
    """One command. `mpistrat.cli` lists them all."""

    name: str
    """Name to type after ``mpistrat``."""
    help: str
    """One line for ``mpistrat --help``."""
    add_arguments: Callable[[argparse.ArgumentParser], object]
    """Declares the arguments."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code."""
    group: str = "other"
    """One of `GROUPS`."""
    about: str = ""
    """Purpose of the command, and an example, for ``mpistrat COMMAND --help``."""


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
    last, inner, below = ("└── ", "├── ", "│   ") if _has_boxes() else ("`-- ", "|-- ", "|   ")
    for number, (part, children) in enumerate(node.items(), 1):
        path = f"{above}/{part}" if above else part
        branch, deeper = (last, "    ") if number == len(node) else (inner, below)
        if not above:
            branch = deeper = ""
        yield f"{guide}{branch}{part}", path
        yield from _labels(children, path, guide + deeper)


def _has_boxes() -> bool:
    """Return whether the output can show box characters."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


_GAP = 3
"""Spaces between two columns."""
_NARROWEST = 16
"""Least width of a folded column."""
_STYLES = dict.fromkeys(("ok", "equal", "done"), "green")
_STYLES |= dict.fromkeys(("warning", "absent", "no dump"), "yellow")
_STYLES |= dict.fromkeys(("PROBLEM", "DAMAGED", "failed", "refused"), "bold red")
"""Colours of cells, and of parts of lines, that consist of such a word."""
_NUMBER = re.compile(r"-|-?(\d[\d,.]*(e[+-]?\d+)?|inf|nan)( ?(%|x|[num]?s|[KMGT]?i?B(/s)?))?")
_PLAIN_RULE = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def is_terminal() -> bool:
    """Return whether people, rather than programs, read the output."""
    return _is_terminal(sys.stdout)


def _is_terminal(stream: TextIO) -> bool:
    if environment().get("TERM") in ("dumb", "unknown"):
        return False
    # Launchers create terminals without a width for their tasks, whose output may go to a file.
    return stream.isatty() and shutil.get_terminal_size((0, 0)).columns > 0


def _console(stream: TextIO) -> Console:
    """Return a console that prints text unchanged, with colours only on terminals."""
    is_seen = _is_terminal(stream)
    return Console(file=stream, force_terminal=is_seen, markup=False, highlight=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with one line per row. If the terminal is too narrow, lines are folded."""
    cells = [[_printable(on_one_line(cell), sys.stdout) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    # The first column stays on the left, where grep looks for it.
    are_numbers = [
        number > 0 and any(column) and all(_NUMBER.fullmatch(cell) for cell in column if cell)
        for number, column in enumerate(zip(*cells, strict=True) if cells else columns)
    ]
    if not is_terminal():  # for grep and awk: neither cut nor folded
        for row in (columns, *cells):
            print(_padded(row, widths, are_numbers))
        return
    console = _console(sys.stdout)
    gaps = _GAP * (len(widths) - 1)
    if sum(widths) + gaps > console.width:  # titles fold between words
        words = [max(title.split() or [""], key=cell_len) for title in columns]
        widths = [max(map(cell_len, column)) for column in zip(words, *cells, strict=True)]
    # Then fold wide columns, and the first column last. If that is not enough, print each row as a
    # paragraph.
    for first_folded in (1, 0):
        is_folded = [i >= first_folded and width > _NARROWEST for i, width in enumerate(widths)]
        least = [_NARROWEST if f else w for w, f in zip(widths, is_folded, strict=True)]
        if sum(least) + gaps <= console.width:
            break
    else:
        for first, *others in cells:
            named = [f"{title} {c}" for title, c in zip(columns[1:], others, strict=True) if c]
            print("\n  ".join(filter(None, [first, ", ".join(named)])))
        return
    table = Table(
        box=box.SIMPLE_HEAD if _has_boxes() else _PLAIN_RULE,
        show_edge=False,
        pad_edge=False,
        header_style="bold",
    )
    for number, title in enumerate(columns):
        table.add_column(
            title,
            justify="right" if are_numbers[number] else "left",
            overflow="fold",
            width=None if is_folded[number] else widths[number],
        )
    for row in cells:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _padded(row: Sequence[str], widths: Sequence[int], are_numbers: Sequence[bool]) -> str:
    padded = [
        " " * (width - cell_len(cell)) + cell if is_number else set_cell_size(cell, width)
        for cell, width, is_number in zip(row, widths, are_numbers, strict=True)
    ]
    return (" " * _GAP).join(padded).rstrip()


def on_one_line(text: object) -> str:
    """Return a text from a file or a user with line ends as escapes."""
    return str(text).replace("\n", "\\n")


Part = str | tuple[str, str]
"""Part of a line: text, or text with a style of rich."""


def print_line(*parts: Part) -> None:
    """Print one line from parts. A part that is a status word gets its colour."""
    _print(parts, sys.stdout)


def print_heading(text: str) -> None:
    """Print a heading, after an empty line."""
    _print(["\n", (text, "bold")], sys.stdout)


def print_error(command: str, text: object) -> None:
    """Print an error message."""
    _print([(f"mpistrat {command}:", "bold red"), f" {text}"], sys.stderr)


def print_note(command: str, text: object) -> None:
    """Print a message on stderr that is not an error."""
    _print([(f"mpistrat {command}:", "bold"), f" {text}"], sys.stderr)


def _print(parts: Iterable[Part], stream: TextIO) -> None:
    pairs = [(each, _STYLES.get(each, "")) if isinstance(each, str) else each for each in parts]
    pairs = [(_printable(text, stream), style) for text, style in pairs]
    if _is_terminal(stream):
        # Let the terminal fold lines, so that they can be copied.
        _console(stream).print(Text.assemble(*pairs), soft_wrap=True)
    else:
        print("".join(text for text, _ in pairs), file=stream)


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
    """Return `text` with escapes for characters that `stream` must not or cannot show."""
    # Names come from files. A malicious one could contain escape sequences for the terminal.
    if text.isascii() and text.isprintable():
        return text
    safe = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    encoding = stream.encoding or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def check_can_draw() -> None:
    """Raise ValueError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed. Install it with: "
            "pip install matplotlib."
        ) from None


def check_can_write(path: Path) -> None:
    """Raise ValueError if `path` cannot be created. Call it before doing the work."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{path} cannot be written: its folder must exist, and it must not be a folder."
        )
