"""Benchmarks as data: what is measured, and the tables and pictures that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpistrat.system.text import readable_size, readable_time

__all__ = [
    "RESULTS",
    "Bars",
    "Benchmark",
    "Choices",
    "Column",
    "Findings",
    "Lines",
    "Row",
    "Table",
]

Row = Mapping[str, Any]

RESULTS = "results"
"""Key of the table that every benchmark has."""

_INCHES = (8.0, 4.5)
"""Width and height of one picture; several are stacked in one file."""

_MAX_LEVEL_LABELS = 4
"""With more bars, level labels would overlap."""


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
class Findings:
    """What a benchmark has measured."""

    tables: Mapping[str, Sequence[Row]]
    """Rows of JSON values by the key of their table, times in seconds."""
    notes: tuple[str, ...] = ()
    """What the reader must know about this run, such as a peer that is not installed."""


@dataclass(frozen=True)
class Column:
    """One column of the table that people read."""

    title: str
    format: Callable[[Row], str]
    """Returns the cell of a row."""

    @classmethod
    def text(cls, title: str, key: str) -> Column:
        """Return a column of texts and integers, ``-`` where a row has none."""
        return cls(title, lambda row: str(row[key]) if row.get(key) not in (None, "") else "-")

    @classmethod
    def size(cls, title: str, key: str) -> Column:
        """Return a column of sizes in bytes, ``-`` where a row has none."""
        return cls(title, lambda row: readable_size(row[key]) if key in row else "-")

    @classmethod
    def time(cls, title: str, key: str) -> Column:
        """Return a column of times and of differences, ``-`` where a row has none."""
        return cls(title, lambda row: _signed_time(row[key]) if key in row else "-")

    @classmethod
    def ratio(cls, title: str, key: str) -> Column:
        """Return a column of ratios, ``-`` where a row has none."""
        return cls(title, lambda row: f"{row[key]:.2f}" if key in row else "-")


def _signed_time(time_s: float) -> str:
    return f"-{readable_time(-time_s)}" if time_s < 0 else readable_time(time_s)


@dataclass(frozen=True)
class Table:
    """How the rows under one key are shown."""

    columns: tuple[Column, ...]
    key: str = RESULTS
    """The name of the rows in the JSON."""
    title: str = ""
    """The line above, where a benchmark has several tables."""


class _Picture(Protocol):
    """How the rows of one table are drawn."""

    @property
    def table(self) -> str:
        """Key of the table."""

    @property
    def title(self) -> str:
        """The line above, where a benchmark has several pictures."""

    @property
    def y_label(self) -> str:
        """Label of the vertical axis."""

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw the rows into `axes`, each series with its label for the legend."""


@dataclass(frozen=True)
class Lines:
    """A picture with one line for each series, on logarithmic axes."""

    x: str
    """Key of the quantity on the horizontal axis."""
    series: Mapping[str, str]
    """Labels of the legend, by key."""
    x_label: str
    y_label: str
    table: str = RESULTS
    title: str = ""

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw the rows that have the key of a series as its points."""
        for key, label in self.series.items():
            points = [(row[self.x], row[key]) for row in rows if key in row]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(self.x_label)
        axes.grid(alpha=0.3)


@dataclass(frozen=True)
class Bars:
    """A picture with a group of bars for each row."""

    label: Callable[[Row], str]
    """Returns the label below a group."""
    series: Mapping[str, str]
    """Labels of the legend, by key."""
    y_label: str
    table: str = RESULTS
    title: str = ""
    line_at: float | None = None
    """Where a horizontal line helps to compare."""

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw the groups next to each other."""
        places = range(len(rows))
        width = 0.8 / len(self.series)
        for number, (key, label) in enumerate(self.series.items()):
            shift = (number - (len(self.series) - 1) / 2) * width
            heights = [float(row.get(key, 0)) for row in rows]
            axes.bar([place + shift for place in places], heights, width, label=label)
        if self.line_at is not None:
            axes.axhline(self.line_at, color="black", linewidth=0.8)
        slanted = {"rotation": 30, "ha": "right"} if len(rows) > _MAX_LEVEL_LABELS else {}
        axes.set_xticks(places, [self.label(row) for row in rows], fontsize="small", **slanted)


@dataclass(frozen=True)
class Benchmark:
    """One measurement and its peers, in one run."""

    name: str
    """As on the command line and in the report."""
    summary: str
    """One line, above the pictures."""
    measure: Callable[[Choices], Findings]
    """**Collective** over COMM_WORLD; what rank 0 returns is shown."""
    tables: tuple[Table, ...]
    pictures: tuple[_Picture, ...]
    sizes: tuple[int, ...] = ()
    """The default sizes to sweep over; empty where the benchmark does not sweep."""
    num_examples: int = 0
    """The default number of examples to read; 0 where the benchmark reads none."""

    def draw(self, tables: Mapping[str, Sequence[Row]], heading: str, path: Path) -> None:
        """Draw the pictures of all `tables` that there are into one PNG."""
        from matplotlib.figure import Figure

        drawn = [each for each in self.pictures if tables.get(each.table)]
        figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(drawn)), layout="constrained")
        figure.suptitle(heading, fontsize="small")
        grid = figure.subplots(len(drawn), 1, squeeze=False)
        for axes, picture in zip(grid[:, 0], drawn, strict=True):
            picture.draw(axes, tables[picture.table])
            axes.set_title(picture.title, fontsize="medium")
            axes.set_ylabel(picture.y_label)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
        figure.savefig(path, format="png", dpi=150)
