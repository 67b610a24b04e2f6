"""Descriptions of benchmarks: their measurements, and the tables and pictures that show them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpistrat.system.plots import (
    LIGHT,
    add_heading,
    label_sizes,
    label_times,
    new_figure,
    save_plot,
    styled,
)
from mpistrat.system.text import readable_size, readable_time

Row = Mapping[str, Any]

RESULTS = "results"
"""Key of the table that every benchmark has."""

SECONDS = "seconds"
"""Label of an axis whose ticks are times with units."""

_WIDTH = 9.0
_INCHES_OF_LINES = 4.2
_INCHES_PER_BAR = 0.2
_WIDE = 20
"""Ratios that differ by more than this factor are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Choices:
    """Choices of the user for a run."""

    num_samples: int
    """Samples for each median."""
    sizes: tuple[int, ...]
    """Sizes of float32 arrays in bytes, for benchmarks that sweep over them."""
    num_examples: int = 0
    """Number of examples in the files, for benchmarks that read files."""
    num_ranks: int = 2
    """Number of ranks in jobs that a benchmark starts itself."""
    device: str = "cpu"
    """Device as for `MPIStrategy`, for benchmarks that run on devices."""


@dataclass(frozen=True)
class Findings:
    """Results of a benchmark."""

    tables: Mapping[str, Sequence[Row]]
    """Rows of JSON values by the key of their table, with times in seconds."""
    notes: tuple[str, ...] = ()
    """Notes that the reader needs about this run, such as a peer that is not installed."""
    num_ranks: int | None = None
    """Number of ranks that were timed, if it differs from the ranks of this job."""


@dataclass(frozen=True)
class Column:
    """One column of a printed table."""

    title: str
    format: Callable[[Row], str]
    """Returns the cell of a row."""

    @classmethod
    def text(cls, title: str, key: str) -> Column:
        """Return a column of strings and integers, with ``-`` if a row has no value."""
        return cls(title, lambda row: str(row[key]) if row.get(key) not in (None, "") else "-")

    @classmethod
    def size(cls, title: str, key: str) -> Column:
        """Return a column of sizes in bytes, with ``-`` if a row has no value."""
        return cls(title, lambda row: readable_size(row[key]) if key in row else "-")

    @classmethod
    def time(cls, title: str, key: str) -> Column:
        """Return a column of times or time differences, with ``-`` if a row has no value."""
        return cls(title, lambda row: _signed_time(row[key]) if key in row else "-")

    @classmethod
    def speed_up(cls, title: str, key: str) -> Column:
        """Return a column of speed-ups over a peer, from the time of mpistrat over that of it."""
        return cls(title, lambda row: f"{1 / row[key]:.2f}" if key in row else "-")

    @classmethod
    def ratio(cls, title: str, key: str) -> Column:
        """Return a column of ratios, with ``-`` if a row has no value."""
        return cls(title, lambda row: f"{row[key]:.2f}" if key in row else "-")


def _signed_time(time_s: float) -> str:
    return f"-{readable_time(-time_s)}" if time_s < 0 else readable_time(time_s)


@dataclass(frozen=True)
class Table:
    """Printed table of the rows under one key."""

    columns: tuple[Column, ...]
    key: str = RESULTS
    """Name of the rows in the JSON."""
    title: str = ""
    """Line above the table, if a benchmark has several tables."""
    more_columns: tuple[Column, ...] = ()
    """Columns that are only shown on request."""

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """All columns, those that are shown on request last."""
        return self.columns + self.more_columns


class _Picture(Protocol):
    """Picture of the rows of one table."""

    @property
    def table(self) -> str:
        """Key of the table."""

    @property
    def title(self) -> str:
        """Line above the picture, if a benchmark has several pictures."""

    def height(self, rows: Sequence[Row]) -> float:
        """Return the height of the picture in inches."""

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw the rows into `axes`. Each series has its label for the legend."""


@dataclass(frozen=True)
class Lines:
    """Picture with one line per series, on logarithmic axes."""

    x: str
    """Key of the quantity on the horizontal axis."""
    series: Mapping[str, str]
    """Labels of the legend, by key."""
    x_label: str
    y_label: str
    table: str = RESULTS
    title: str = ""

    def height(self, rows: Sequence[Row]) -> float:
        """Return how many inches the rows need."""
        return _INCHES_OF_LINES

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw a point for each row with the key of a series, and the quartiles as a band."""
        for key, label in self.series.items():
            points = [row for row in rows if key in row]
            at = [row[self.x] for row in points]
            (line,) = axes.plot(at, [row[key] for row in points], marker="o", ms=4, label=label)
            spread = [_quartiles(row, key) for row in points]
            axes.fill_between(at, *zip(*spread, strict=True), color=line.get_color(), alpha=0.18)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        axes.grid()
        at = sorted({row[self.x] for row in rows})
        if self.x == "num_bytes":
            label_sizes(axes.xaxis, at)
        else:
            axes.set_xticks(at, [str(each) for each in at])
        if self.y_label == SECONDS:
            label_times(axes.yaxis)


@dataclass(frozen=True)
class Bars:
    """Picture with a group of bars per row."""

    label: Callable[[Row], str]
    """Returns the label of a group."""
    series: Mapping[str, str]
    """Labels of the legend, by key."""
    y_label: str
    table: str = RESULTS
    title: str = ""
    line_at: float | None = None
    """Value at which a line is drawn, to help comparison."""

    def height(self, rows: Sequence[Row]) -> float:
        """Return how many inches the rows need."""
        return 1.2 + len(rows) * (0.14 + _INCHES_PER_BAR * len(self.series))

    def draw(self, axes: Any, rows: Sequence[Row]) -> None:
        """Draw the groups below each other. If values are far apart, bars start at `line_at`."""
        thickness = 0.8 / len(self.series)
        values = [float(row[key]) for row in rows for key in self.series if row.get(key)]
        is_wide = self.line_at is not None and max(values) > _WIDE * min(values)
        start = (self.line_at or 0.0) if is_wide else 0.0
        for number, (key, label) in enumerate(self.series.items()):
            shift = (number - (len(self.series) - 1) / 2) * thickness
            for place, row in enumerate(rows):
                if not row.get(key):
                    continue
                at, value = place + shift, float(row[key])
                colour = LIGHT.series[number]
                name = label if place == 0 else None
                axes.barh(at, value - start, 0.9 * thickness, left=start, color=colour, label=name)
                low, high = _quartiles(row, key)
                axes.plot([low, high], [at, at], color=LIGHT.ink, linewidth=1, alpha=0.6)
                text = readable_time(value) if self.y_label == SECONDS else f"{value:.2g}"
                is_left = value < start
                _write(axes, text, min(value, low) if is_left else max(value, high), at, is_left)
        if is_wide:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if self.line_at is not None:
            axes.axvline(self.line_at, color=LIGHT.ink, linewidth=0.8)
        axes.margins(x=0.14)
        axes.set_yticks(range(len(rows)), [self.label(row) for row in rows])
        axes.tick_params(axis="y", length=0, labelcolor=LIGHT.ink)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.set_xlabel(self.y_label)
        if self.y_label == SECONDS:
            label_times(axes.xaxis)


def _write(axes: Any, text: str, x: float, y: float, is_left: bool) -> None:
    """Write a text at the end of a bar."""
    axes.annotate(
        text,
        (x, y),
        (-4 if is_left else 4, 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        color=LIGHT.muted,
        fontsize=8,
    )


@dataclass(frozen=True)
class Benchmark:
    """One measurement and its peers, in one run."""

    name: str
    """Name on the command line and in the report."""
    summary: str
    """One line for the heading of the pictures."""
    measure: Callable[[Choices], Findings]
    """**Collective** over COMM_WORLD. The findings of rank 0 are shown."""
    tables: tuple[Table, ...]
    pictures: tuple[_Picture, ...]
    sizes: tuple[int, ...] = ()
    """Default sizes to sweep over; empty if the benchmark does not sweep."""
    num_examples: int = 0
    """Default number of examples to read; 0 if the benchmark reads none."""
    starts_ranks: bool = False
    """Whether it starts the ranks that it measures."""
    runs_on_devices: bool = False
    """Whether it can measure arrays in the memory of devices."""

    def draw(self, tables: Mapping[str, Sequence[Row]], heading: str, path: Path) -> None:
        """Draw the pictures of all existing `tables` into one PNG, or raise `ValueError`."""
        drawn = [(each, tables[each.table]) for each in self.pictures if tables.get(each.table)]
        heights = [picture.height(rows) for picture, rows in drawn]
        with styled():
            figure = new_figure(_WIDTH, 0.9 + sum(heights))
            grid = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
            for axes, (picture, rows) in zip(grid[:, 0], drawn, strict=True):
                picture.draw(axes, rows)
                axes.set_title(picture.title)
                if len(axes.get_legend_handles_labels()[1]) > 1:
                    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
            lines = (each for line in heading.splitlines() for each in textwrap.wrap(line, 120))
            add_heading(figure, f"{self.name}: {self.summary}", *lines)
            save_plot(figure, path)


def _quartiles(row: Row, key: str) -> tuple[float, float]:
    """Return the quartiles of a figure, or the figure twice if the row has no quartiles."""
    low, high = row.get(f"{key}_quartiles", (row[key], row[key]))
    return float(low), float(high)
