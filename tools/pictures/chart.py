"""Charts as SVG: axes with ticks, lines, points and bands, in the colours of a palette."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.pictures.svg import Drawing

__all__ = ["Axis", "Chart"]


@dataclass(frozen=True)
class Axis:
    """One axis: its range, and whether it is logarithmic."""

    low: float
    high: float
    label: str = ""
    is_log: bool = False
    ticks: Sequence[float] = ()
    """Where to write numbers; chosen where there are none."""

    def share(self, value: float) -> float:
        """Return where a value lies between the ends, from 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)

    def marks(self) -> list[float]:
        """Return the values at which there are ticks."""
        if self.ticks:
            return list(self.ticks)
        if self.is_log:
            exponents = range(
                math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1
            )
            return [10.0**exponent for exponent in exponents]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 3))
        step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [step * place for place in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Chart:
    """Axes in a part of a drawing, from `left` to `right` and from `top` to `bottom`."""

    def __init__(
        self, drawing: Drawing, box: tuple[float, float, float, float], x: Axis, y: Axis
    ) -> None:
        self.drawing = drawing
        self.left, self.top, self.right, self.bottom = box
        self.x, self.y = x, y

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a point."""
        return (
            self.left + (self.right - self.left) * self.x.share(x),
            self.bottom - (self.bottom - self.top) * self.y.share(y),
        )

    def frame(self, size: float = 12.5) -> None:
        """Draw grid, ticks and labels."""
        d, p = self.drawing, self.drawing.palette
        for value in self.y.marks():
            _, y = self.at(self.x.low, value)
            d.line([(self.left, y), (self.right, y)], colour=p.line, width=0.8)
            d.text(self.left - 8, y + size * 0.36, f"{value:g}", size=size, colour=p.muted,
                   anchor="end")  # fmt: skip
        d.line([(self.left, self.bottom), (self.right, self.bottom)], colour=p.muted, width=1)
        for value in self.x.marks():
            x, _ = self.at(value, self.y.low)
            d.line([(x, self.bottom), (x, self.bottom + 4)], colour=p.muted, width=1)
            d.text(x, self.bottom + 8 + size, f"{value:g}", size=size, colour=p.muted,
                   anchor="middle")  # fmt: skip
        middle = (self.left + self.right) / 2
        d.text(middle, self.bottom + 14 + 2 * size, self.x.label, size=size, anchor="middle",
               colour=p.muted)  # fmt: skip
        d.text(self.left, self.top - 10, self.y.label, size=size, colour=p.muted)

    def curve(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        *,
        width: float = 2.2,
        dashed: bool = False,
    ) -> None:
        """Draw a line through points."""
        self.drawing.line(
            [self.at(*point) for point in points], colour=colour, width=width, dashed=dashed
        )

    def label(
        self,
        point: tuple[float, float],
        text: str,
        colour: str,
        *,
        shift: tuple[float, float] = (8, 4.5),
        bold: bool = False,
    ) -> None:
        """Write beside a point, by default at its right."""
        x, y = self.at(*point)
        self.drawing.text(x + shift[0], y + shift[1], text, size=13, colour=colour, bold=bold)
