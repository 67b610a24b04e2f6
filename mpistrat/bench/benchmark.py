"""What a benchmark consists of: a measurement, and how its findings are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.bench.pictures import Bars, Lines
from mpistrat.spelling import readable_size, readable_time

__all__ = [
    "RESULTS",
    "Benchmark",
    "Choices",
    "Column",
    "Findings",
    "Row",
    "Table",
    "ratio",
    "size",
    "text",
    "time",
]

Row = Mapping[str, Any]

RESULTS = "results"
"""Key of the table that every benchmark has."""


@dataclass(frozen=True)
class Choices:
    """What the user chooses for a run."""

    num_samples: int
    """Samples for each median."""
    sizes: tuple[int, ...]
    """Sizes of float32 arrays in bytes, for benchmarks that sweep over them."""
    num_examples: int = 0
    """Examples in files, for benchmarks that read some."""


@dataclass(frozen=True)
class Column:
    """One column of the table that people read."""

    title: str
    spell: Callable[[Row], str]
    """Returns the cell of a row."""


@dataclass(frozen=True)
class Table:
    """How the rows under one key are shown."""

    columns: tuple[Column, ...]
    key: str = RESULTS
    """The name of the rows in the JSON."""
    title: str = ""
    """The line above, where a benchmark has several tables."""


@dataclass(frozen=True)
class Findings:
    """What a benchmark has found."""

    tables: Mapping[str, Sequence[Row]]
    """Rows of JSON values by the key of their table, times in seconds."""
    notes: tuple[str, ...] = ()
    """What the reader must know of this run, such as a peer that is not installed."""


@dataclass(frozen=True)
class Benchmark:
    """One measurement beside its peers, in one run."""

    name: str
    """As on the command line and in the report."""
    summary: str
    """One line, above the pictures."""
    measure: Callable[[Choices], Findings]
    """**Collective** over COMM_WORLD; what rank 0 returns is shown."""
    tables: tuple[Table, ...]
    pictures: tuple[Lines | Bars, ...]
    sizes: tuple[int, ...] = ()
    """The sizes it sweeps over where the user names none; empty where it does not sweep."""
    num_examples: int = 0
    """How many examples it reads where the user does not say; 0 where it reads none."""


def text(title: str, key: str) -> Column:
    """Return a column of words and whole numbers, ``-`` where a row has none. Local."""
    return Column(title, lambda row: str(row[key]) if row.get(key) not in (None, "") else "-")


def size(title: str, key: str) -> Column:
    """Return a column of sizes in bytes, ``-`` where a row has none. Local."""
    return Column(title, lambda row: readable_size(row[key]) if key in row else "-")


def time(title: str, key: str) -> Column:
    """Return a column of times and of differences, ``-`` where a row has none. Local."""
    return Column(title, lambda row: _signed_time(row[key]) if key in row else "-")


def ratio(title: str, key: str) -> Column:
    """Return a column of ratios, ``-`` where a row has none. Local."""
    return Column(title, lambda row: f"{row[key]:.2f}" if key in row else "-")


def _signed_time(time_s: float) -> str:
    return f"-{readable_time(-time_s)}" if time_s < 0 else readable_time(time_s)
