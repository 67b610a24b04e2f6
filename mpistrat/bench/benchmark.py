"""What a benchmark consists of: a measurement, and how its rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.spelling import readable_time

__all__ = ["Benchmark", "Choices", "Column", "Row", "ratio", "time"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Choices:
    """What the user chooses for a run."""

    num_samples: int
    """Samples for each median."""
    sizes: tuple[int, ...]
    """Array sizes in bytes, for benchmarks that sweep over them."""


@dataclass(frozen=True)
class Column:
    """One column of the table that people read."""

    title: str
    spell: Callable[[Row], str]
    """Returns the cell of a row."""


@dataclass(frozen=True)
class Benchmark:
    """One measurement beside its peers, in one run."""

    name: str
    """The word after ``mpistrat bench``."""
    summary: str
    measure: Callable[[Choices], Sequence[Row]]
    """**Collective** over COMM_WORLD. Returns rows of JSON values, times in seconds."""
    columns: tuple[Column, ...]


def time(title: str, key: str) -> Column:
    """Return a column of times, ``-`` where a row has none. Local."""
    return Column(title, lambda row: readable_time(row[key]) if key in row else "-")


def ratio(title: str, key: str) -> Column:
    """Return a column of ratios, ``-`` where a row has none. Local."""
    return Column(title, lambda row: f"{row[key]:.2f}" if key in row else "-")
