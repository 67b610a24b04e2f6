"""A picture of where the time of each rank went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpistrat.timeline.summary import CATEGORIES, COMPUTING, RankTimes

__all__ = ["draw"]

_COLOURS = {
    COMPUTING: "#4c9f70",
    CATEGORIES["move"]: "#3b6fb6",
    CATEGORIES["wait"]: "#d1495b",
    CATEGORIES["data"]: "#edae49",
    CATEGORIES["checkpoint"]: "#7d7d7d",
}
_INCHES_PER_RANK = 0.3
_MAX_INCHES = 40.0


def draw(times: Sequence[RankTimes], path: Path) -> None:
    """Draw a bar for each rank, in pieces by what took the time, into a PNG. Local.

    Raises
    ------
    ImportError
        Without matplotlib.
    OSError
        If the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    height = min(1.5 + _INCHES_PER_RANK * len(times), _MAX_INCHES)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    ranks = [each.rank for each in times]
    left = [0.0] * len(times)
    for words, colour in _COLOURS.items():
        widths = [each.seconds[words] for each in times]
        axes.barh(ranks, widths, left=left, color=colour, label=words)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds")
    axes.set_ylabel("rank")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(_COLOURS), frameon=False)
    figure.savefig(path, format="png", dpi=150)
