"""Plot of a timeline: a time strip per group of similar ranks, with the slowest on top."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.cli.rank_times import CATEGORIES, COMPUTING, RankTimes, segments, spans_by_rank
from mpistrat.system.plots import LIGHT, add_heading, new_figure, save_plot, styled
from mpistrat.system.text import rank_spans, readable_time

CATEGORY_COLOURS = {
    COMPUTING: LIGHT.slate,
    CATEGORIES["move"]: LIGHT.blue,
    CATEGORIES["data"]: LIGHT.orange,
    CATEGORIES["checkpoint"]: LIGHT.purple,
    CATEGORIES["wait"]: LIGHT.red,
}
"""Colours from the bottom of a strip to its top. Those that cost other ranks time stand out."""

_MIN_BINS, _MAX_BINS = 80, 1200
"""Number of time bins in a strip, about one per pixel."""
_BINS_COMPARED = 10
"""Number of coarser time bins, in which ranks are compared."""
_MAX_EXACT = 240
"""With more changes of category, a time bin shows the shares of several changes."""
_CHANGES_PER_BIN = 12
_ROWS = 48
"""Height of a strip in pixels."""
_ALIKE = 0.05
"""Share of the time in which ranks may differ and still share a strip."""
_MAX_STRIPS = 16
_INCHES_PER_STRIP = 0.36
_LONGEST_LABEL = 26
_DETAIL = (
    "The slowest rank is on top. Ranks with similar times share a strip; the height of a colour is "
    "its share of the time."
)


@dataclass
class Strip:
    """Ranks that spend their time in similar ways."""

    ranks: list[int]
    shares: np.ndarray
    """Share of each category in each time bin, with shape ``(bins, len(CATEGORY_COLOURS))``."""
    others_waited_s: float
    """Time for which other ranks waited for these ranks, summed over all of them."""

    @property
    def label(self) -> str:
        """Short list of the ranks."""
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        spans = [str(a) if a == b else f"{a}-{b}" for a, b in rank_spans(self.ranks)]
        text = f"ranks {', '.join(spans)}"
        if len(text) > _LONGEST_LABEL:
            kept = text[:_LONGEST_LABEL].rpartition(",")[0]
            text = f"{kept}, ..." if kept else f"ranks {spans[0]}, ..."
        return f"{text} ({len(self.ranks)})"


def fold(
    of_ranks: Mapping[int, Sequence[Mapping[str, Any]]], times: Sequence[RankTimes]
) -> list[Strip]:
    """Return one strip per group of similar ranks. Ranks for which others waited come first."""
    began_us = min(span["ts"] for spans in of_ranks.values() for span in spans)
    ended_us = max(span["ts"] + span["dur"] for spans in of_ranks.values() for span in spans)
    edges = np.linspace(began_us, max(ended_us, began_us + 1), _num_bins(of_ranks) + 1)
    waited_s = {each.rank: each.others_waited_s for each in times}
    slowest_first = sorted(of_ranks, key=lambda rank: (-waited_s[rank], rank))
    shares = {rank: _shares(of_ranks[rank], edges) for rank in slowest_first}
    tolerance = _ALIKE
    while len(groups := _groups(shares, tolerance)) > _MAX_STRIPS:
        tolerance *= 1.5
    strips = [
        Strip(
            sorted(group),
            np.mean([shares[rank] for rank in group], axis=0),
            sum(waited_s[rank] for rank in group),
        )
        for group in groups
    ]
    waiting = list(CATEGORY_COLOURS).index(CATEGORIES["wait"])
    return sorted(
        strips,
        key=lambda each: (
            -each.others_waited_s / len(each.ranks),
            each.shares[:, waiting].mean(),
        ),
    )


def _num_bins(of_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """Return the number of time bins, a multiple of `_BINS_COMPARED`."""
    changes = 2 * statistics.median(
        sum(span["cat"] in CATEGORIES for span in spans) for spans in of_ranks.values()
    )
    if changes <= _MAX_EXACT:
        return _MAX_BINS
    wanted = round(changes / _CHANGES_PER_BIN / _BINS_COMPARED) * _BINS_COMPARED
    return min(max(wanted, _MIN_BINS), _MAX_BINS)


def _shares(spans: Sequence[Mapping[str, Any]], edges: np.ndarray) -> np.ndarray:
    parts = list(segments(spans))
    ends = np.array([edges[0], *(end for _, end, _ in parts)])
    ends[0] = parts[0][0] if parts else edges[0]
    shares = np.empty((edges.size - 1, len(CATEGORY_COLOURS)))
    for number, name in enumerate(CATEGORY_COLOURS):
        lengths = [end - begin if each == name else 0.0 for begin, end, each in parts]
        until = np.concatenate([[0.0], np.cumsum(lengths)])
        shares[:, number] = np.diff(np.interp(edges, ends, until)) / np.diff(edges)
    return shares


def _groups(shares: Mapping[int, np.ndarray], tolerance: float) -> list[list[int]]:
    """Return groups of ranks that differ by at most `tolerance` from the first of their group."""
    found: list[tuple[np.ndarray, list[int]]] = []
    for rank, fine in shares.items():
        own = fine.reshape(_BINS_COMPARED, -1, len(CATEGORY_COLOURS)).mean(axis=1)
        for number, (first, group) in enumerate(found):
            # The slowest rank keeps its strip, even if many other ranks have to share theirs.
            limit = _ALIKE if number == 0 else tolerance
            if np.abs(own - first).sum(axis=1).mean() / 2 <= limit:
                group.append(rank)
                break
        else:
            found.append((own, [rank]))
    return [group for _, group in found]


def _image(shares: np.ndarray) -> np.ndarray:
    """Return the strip as RGB pixels. Each time bin has the categories on top of each other."""
    colours = [bytes.fromhex(each[1:]) for each in (*CATEGORY_COLOURS.values(), LIGHT.panel)]
    heights = (np.arange(_ROWS) + 0.5) / _ROWS
    until = np.cumsum(shares, axis=1)
    until[until > 1 - 1e-6] = 1.0
    which = (heights[:, None, None] > until[None]).sum(axis=2)
    image: np.ndarray = np.array([list(each) for each in colours], np.uint8)[which]
    return image


def draw(events: Iterable[Mapping[str, Any]], times: Sequence[RankTimes], path: Path) -> None:
    """Draw the events of a trace into a PNG, or raise `ValueError`."""
    of_ranks = spans_by_rank(events)
    if not of_ranks:
        raise ValueError("The timeline has no spans to draw.")
    strips = fold(of_ranks, times)
    total_s = max(each.total_s for each in times)
    scale, unit = (1.0, "s") if total_s >= 1 else (1e3, "ms")
    with styled():
        figure = new_figure(9.5, 1.75 + _INCHES_PER_STRIP * len(strips))
        axes = figure.subplots()
        for place, strip in enumerate(strips):
            extent = (0, total_s * scale, place + 0.41, place - 0.41)
            axes.imshow(
                _image(strip.shares),
                extent=extent,
                aspect="auto",
                origin="lower",
                interpolation="nearest",
            )
            if strip.others_waited_s >= 0.0005:
                waited = readable_time(strip.others_waited_s)
                axes.annotate(
                    f"others waited {waited}" if place == 0 else waited,
                    (1, place),
                    (6, 0),
                    xycoords=axes.get_yaxis_transform(),
                    textcoords="offset points",
                    va="center",
                    color=LIGHT.muted,
                    fontsize=8.5,
                )
        axes.set(xlim=(0, total_s * scale), ylim=(len(strips) - 0.5, -0.5))
        axes.set_xlabel(f"time in {unit}")
        axes.set_yticks(range(len(strips)), [each.label for each in strips])
        axes.tick_params(axis="y", length=0, labelcolor=LIGHT.ink)
        axes.spines["left"].set_visible(False)
        _add_legend(figure, strips)
        title = f"{len(of_ranks)} rank{'s' if len(of_ranks) > 1 else ''}, {_steps(of_ranks)}"
        add_heading(figure, title, _DETAIL)
        save_plot(figure, path)


def _add_legend(figure: Any, strips: Sequence[Strip]) -> None:
    from matplotlib.patches import Patch

    seen = sum(strip.shares.sum(axis=0) for strip in strips)
    patches = [
        Patch(color=colour, label=name)
        for (name, colour), share in zip(CATEGORY_COLOURS.items(), seen, strict=True)
        if share > 0
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        handlelength=1.2,
        fontsize=9,
    )


def _steps(of_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """Return how many steps each rank made, as text: optimizer steps, runs or collectives."""
    counts = [Counter(span["cat"] for span in spans) for spans in of_ranks.values()]
    for category, name in (("optimizer", "optimizer steps"), ("run", "runs")):
        number = int(statistics.median(each[category] for each in counts))
        if number:
            return f"{number:,} {name}"
    return f"{int(statistics.median(each['collective'] for each in counts)):,} collectives"
