"""SVG drawing: boxes, arrows and text in the colours of a palette.

Coordinates are pixels; the ground stays transparent. The text is text, so that it can be read
aloud, searched and tested.
"""

from collections.abc import Iterable
from html import escape

from tools.pictures.palette import Palette, mix

__all__ = ["MONO", "SANS", "Drawing"]

SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Drawing:
    """A picture of `width` by `height` pixels, with a title for screen readers."""

    def __init__(self, width: int, height: int, palette: Palette, title: str) -> None:
        self.palette = palette
        self._size = width, height
        self._title = title
        self._parts: list[str] = []
        self._markers: dict[str, str] = {}

    @property
    def width(self) -> int:
        """Pixels from left to right."""
        return self._size[0]

    def render(self) -> str:
        """Return the SVG."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{SANS}" font-size="14" '
            f'fill="{self.palette.ink}">\n<title>{escape(self._title)}</title>'
        )
        defs = [f"<defs>{''.join(self._markers.values())}</defs>"] if self._markers else []
        return "\n".join([head, *defs, *self._parts, "</svg>"]) + "\n"

    def add(self, part: str) -> None:
        """Add an element."""
        self._parts.append(part)

    def tint(self, colour: str, share: float = 0.14) -> str:
        """Return a pale version of a colour, for areas behind text."""
        return mix(colour, self.palette.ground, share)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 6,
        dashed: bool = False,
        stroke_width: float = 1.2,
    ) -> None:
        """Draw a rectangle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = "" if stroke == "none" else f' stroke="{stroke}" stroke-width="{_n(stroke_width)}"'
        self.add(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'rx="{_n(radius)}" fill="{fill}"{line}{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        colour: str | None = None,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        rotate: float = 0,
    ) -> None:
        """Write one line; `y` is the base line."""
        style = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style += "" if size == 14 else f' font-size="{_n(size)}"'
        style += "" if colour is None else f' fill="{colour}"'
        style += ' font-weight="600"' if bold else ""
        style += f' font-family="{MONO}" xml:space="preserve"' if mono else ""
        style += f' transform="rotate({_n(rotate)} {_n(x)} {_n(y)})"' if rotate else ""
        self.add(f'<text x="{_n(x)}" y="{_n(y)}"{style}>{escape(text)}</text>')

    def spans(
        self, x: float, y: float, parts: Iterable[tuple[str, str]], *, size: float = 13
    ) -> None:
        """Write one line of monospaced text in parts of several colours."""
        inner = "".join(f'<tspan fill="{colour}">{escape(text)}</tspan>' for text, colour in parts)
        self.add(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" font-family="{MONO}" '
            f'xml:space="preserve">{inner}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: str | Iterable[str],
        *,
        colour: str | None = None,
        solid: bool = False,
        mono: bool = False,
        size: float = 14,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle with centred lines in it; the first one is bold if there are more."""
        p = self.palette
        stroke = colour or p.line
        fill = stroke if solid else self.tint(colour) if colour else p.ground
        self.rect(x, y, width, height, fill=fill, stroke=stroke, dashed=dashed)
        lines = [lines] if isinstance(lines, str) else list(lines)
        step = size * 1.32
        top = y + height / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for number, line in enumerate(lines):
            is_head = number == 0
            self.text(
                x + width / 2,
                top + step * number,
                line,
                size=size if is_head else size - 1.5,
                colour=p.ground if solid else None if is_head else p.muted,
                anchor="middle",
                bold=is_head and len(lines) > 1,
                mono=mono,
            )

    def line(
        self,
        points: Iterable[tuple[float, float]],
        *,
        colour: str | None = None,
        width: float = 1.4,
        dashed: bool = False,
        arrow: bool = False,
        both: bool = False,
    ) -> None:
        """Draw a line through points, with arrow heads at its end or at both ends."""
        colour = colour or self.palette.muted
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        style = ' stroke-dasharray="5 4"' if dashed else ""
        if arrow or both:
            style += f' marker-end="url(#{self._marker(colour)})"'
        if both:
            style += f' marker-start="url(#{self._marker(colour)})"'
        self.add(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{_n(width)}" stroke-linejoin="round"{style}/>'
        )

    def circle(self, x: float, y: float, radius: float, *, fill: str, stroke: str = "none") -> None:
        """Draw a disc."""
        line = "" if stroke == "none" else f' stroke="{stroke}" stroke-width="1.2"'
        self.add(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{line}/>')

    def _marker(self, colour: str) -> str:
        name = f"head-{colour[1:]}"
        self._markers[name] = (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0,0.6 L8,4 L0,7.4 z" fill="{colour}"/></marker>'
        )
        return name


def _n(number: float) -> str:
    """Return a number in as few characters as it needs."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
