"""Pictures of findings: lines over a quantity, and bars beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "draw",
    "is_available",
    "ratio",
    "size",
    "text",
    "time",
]

_Rows = Sequence[Mapping[str, Any]]

_INCHES = (8.0, 4.5)
"""Width and height of one picture; several stand one below the other."""


_MAX_LEVEL_LABELS = 4
"""More of them would run into each other."""


def _all(rows: _Rows) -> _Rows:
    return rows


@dataclass(frozen=True)
class Lines:
    """One line for each series, over a quantity on a logarithmic axis."""

    x: str
    """Key of the quantity."""
    series: Mapping[str, str]
    """Words of the legend, by key."""
    x_label: str
    y_label: str
    table: str = "results"
    title: str = ""
    rows: Callable[[_Rows], _Rows] = _all
    """Returns the rows that are drawn."""
    is_y_logarithmic: bool = True


@dataclass(frozen=True)
class Bars:
    """A group of bars for each row."""

    label: Callable[[Mapping[str, Any]], str]
    """Returns the words under a group."""
    series: Mapping[str, str]
    """Words of the legend, by key."""
    y_label: str
    table: str = "results"
    title: str = ""
    line_at: float | None = None
    """Where a horizontal line helps to compare."""
    stacked: bool = False
    """Whether the bars of a group stand one on the other."""
    rows: Callable[[_Rows], _Rows] = _all
    """Returns the rows that are drawn."""


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(
    pictures: Sequence[Lines | Bars], tables: Mapping[str, _Rows], heading: str, path: Path
) -> None:
    """Draw the findings into a PNG.

    Parameters
    ----------
    pictures : sequence of Lines and Bars
        A picture of a table that is not there is left out.
    tables : mapping
        Rows by the key of their table.
    heading : str
    path : Path

    Raises
    ------
    ImportError
        Without matplotlib.
    OSError
        If the file cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [each for each in pictures if tables.get(each.table)]
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(drawn)), layout="constrained")
    figure.suptitle(heading, fontsize="small")
    grid = figure.subplots(len(drawn), 1, squeeze=False)
    for axes, picture in zip(grid[:, 0], drawn, strict=True):
        rows = picture.rows(tables[picture.table])
        if isinstance(picture, Lines):
            _draw_lines(axes, picture, rows)
        else:
            _draw_bars(axes, picture, rows)
        axes.set_title(picture.title, fontsize="medium")
        axes.set_ylabel(picture.y_label)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def _draw_lines(axes: Any, picture: Lines, rows: _Rows) -> None:
    for key, words in picture.series.items():
        points = [(row[picture.x], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=words)
    axes.set_xscale("log", base=2)
    if picture.is_y_logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(picture.x_label)
    axes.grid(alpha=0.3)


def _draw_bars(axes: Any, picture: Bars, rows: _Rows) -> None:
    places = range(len(rows))
    width = 0.8 if picture.stacked else 0.8 / len(picture.series)
    floor = [0.0] * len(rows)
    for number, (key, words) in enumerate(picture.series.items()):
        shift = 0.0 if picture.stacked else (number - (len(picture.series) - 1) / 2) * width
        heights = [float(row.get(key, 0)) for row in rows]
        axes.bar([p + shift for p in places], heights, width, bottom=floor, label=words)
        if picture.stacked:
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
    if picture.line_at is not None:
        axes.axhline(picture.line_at, color="black", linewidth=0.8)
    slanted = {"rotation": 30, "ha": "right"} if len(rows) > _MAX_LEVEL_LABELS else {}
    axes.set_xticks(places, [picture.label(row) for row in rows], fontsize="small", **slanted)


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
    format: Callable[[Row], str]
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
    """Return a column of words and whole numbers, ``-`` where a row has none."""
    return Column(title, lambda row: str(row[key]) if row.get(key) not in (None, "") else "-")


def size(title: str, key: str) -> Column:
    """Return a column of sizes in bytes, ``-`` where a row has none."""
    return Column(title, lambda row: readable_size(row[key]) if key in row else "-")


def time(title: str, key: str) -> Column:
    """Return a column of times and of differences, ``-`` where a row has none."""
    return Column(title, lambda row: _signed_time(row[key]) if key in row else "-")


def ratio(title: str, key: str) -> Column:
    """Return a column of ratios, ``-`` where a row has none."""
    return Column(title, lambda row: f"{row[key]:.2f}" if key in row else "-")


def _signed_time(time_s: float) -> str:
    return f"-{readable_time(-time_s)}" if time_s < 0 else readable_time(time_s)
