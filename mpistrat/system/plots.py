"""Plot style: one palette for all pictures of the package, axis labels for sizes, and saving.

matplotlib is optional, so only functions import it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.system.text import readable_size, readable_time


@dataclass(frozen=True)
class Palette:
    """Colours for one background, as ``#rrggbb``."""

    # The six hues follow Okabe and Ito (2008), which colour-blind readers can tell apart.
    # tests/tools/test_pictures.py checks this, and the contrast with the background.
    ground: str
    panel: str
    """Colour of areas, slightly different from the background."""
    line: str
    """Colour of frames and grids."""
    ink: str
    muted: str
    """Colour of less important text."""
    blue: str
    orange: str
    green: str
    red: str
    purple: str
    slate: str
    """Colour of things that are in order."""

    @property
    def series(self) -> tuple[str, ...]:
        """Colours of lines and bars, in this order."""
        return self.blue, self.orange, self.green, self.purple, self.red, self.muted


LIGHT = Palette(
    ground="#ffffff",
    panel="#f3f5f8",
    line="#cfd6de",
    ink="#1f2328",
    muted="#59636e",
    blue="#0f4c92",
    orange="#d67d00",
    green="#0f7d68",
    red="#c2330c",
    purple="#bf74b3",
    slate="#a9bccf",
)
"""Palette for white paper and light pages."""

_DPI = 150


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Context manager in which new figures and axes have the style of the package."""
    import matplotlib as mpl
    from cycler import cycler

    style: Any = {
        "font.size": 9.5,
        "text.color": LIGHT.ink,
        "axes.edgecolor": LIGHT.line,
        "axes.labelcolor": LIGHT.muted,
        "axes.titlesize": "medium",
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=LIGHT.series),
        "grid.color": LIGHT.line,
        "grid.linewidth": 0.6,
        "xtick.color": LIGHT.line,
        "ytick.color": LIGHT.line,
        "xtick.labelcolor": LIGHT.muted,
        "ytick.labelcolor": LIGHT.muted,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
    }
    with mpl.rc_context(style):
        yield


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure outside of pyplot. Sizes are in inches. Call it within `styled`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor=LIGHT.ground)


def add_heading(figure: Any, title: str, *details: str) -> None:
    """Write a bold title, and muted lines below it, at the top left of a figure."""
    # The constrained layout reserves space only for the suptitle. So an invisible suptitle has all
    # the lines.
    lines = [printable(each) for each in (title, *details)]
    width, height = figure.get_size_inches()
    left = 0.12 / width
    figure.suptitle("\n".join(lines), alpha=0, fontsize=11, linespacing=1.25, parse_math=False)
    for number, line in enumerate(lines):
        style: Any = (
            {"fontsize": 11, "fontweight": "bold"} if number == 0 else {"color": LIGHT.muted}
        )
        top = 1 - (0.1 + 0.195 * number) / height
        figure.text(left, top, line, va="top", parse_math=False, **style)


def printable(text: str) -> str:
    """Return `text` with ``?`` in place of characters that cannot be shown."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def label_sizes(axis: Any, sizes_bytes: list[int]) -> None:
    """Put ticks at these sizes, at most ten of them, as ``64 KiB`` or ``1 MiB``."""
    from matplotlib.ticker import NullLocator

    shown = sizes_bytes[:: len(sizes_bytes) // 10 + 1]
    axis.set_ticks(shown, [readable_size(size).replace(".0 ", " ") for size in shown])
    axis.set_minor_locator(NullLocator())


def label_times(axis: Any) -> None:
    """Write the ticks of an axis of seconds as ``10 us`` or ``2 ms``."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda time_s, _: readable_time(time_s)))
    axis.set_label_text("time")
    if axis.get_scale() == "log":
        axis.set_minor_formatter(NullFormatter())


def save_plot(figure: Any, path: Path) -> None:
    """Write a figure as PNG, or raise `ValueError`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        try:
            figure.savefig(path, format="png", dpi=_DPI)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}.") from None
