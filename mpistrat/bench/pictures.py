"""Pictures of findings: lines over a quantity, and bars beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bars", "Lines", "draw", "is_available"]

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
    """Return whether matplotlib is installed. Local."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(
    pictures: Sequence[Lines | Bars], tables: Mapping[str, _Rows], heading: str, path: Path
) -> None:
    """Draw the findings into a PNG. Local.

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
