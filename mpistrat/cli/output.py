"""What the commands print: tables for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_error", "print_json", "print_line", "print_table"]

_WIDTH_OF_A_PIPE = 1_000_000
"""No line is folded or cut where the output is not a terminal."""


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells wrap on a terminal only. Local."""
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(Text(_printable(str(cell))) for cell in row))
    _console().print(table)


def print_line(text: str) -> None:
    """Print one line. Local."""
    print(_printable(text))


def print_error(command: str, text: object) -> None:
    """Print an error message. Local."""
    print(f"mpistrat {command}: {_printable(str(text))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print `value` as strict JSON: infinities and NaN become strings. Local."""
    print(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _printable(text: str) -> str:
    """Return `text` without control characters, which a hostile file could bring."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
