"""Palettes of the pictures: that of the package for light pages, and its counterpart for dark ones.

Each picture is a pair of files, because no colour of text has enough contrast on both grounds.
"""

from mpistrat.system.plots import LIGHT, Palette

__all__ = ["DARK", "LIGHT", "THEMES", "Palette", "contrast", "mix", "seen_by"]

DARK = Palette(
    ground="#131416",
    panel="#1d2025",
    line="#414852",
    ink="#e7eaee",
    muted="#a1abb6",
    blue="#4f8fe0",
    orange="#f7cf4d",
    green="#3fd097",
    red="#ea6a33",
    purple="#f0a4e4",
    slate="#5b7088",
)
"""For the dark pages of furo (``#131416``) and of GitHub (``#0d1117``)."""

THEMES = {"light": LIGHT, "dark": DARK}

_BLINDNESS = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
"""Matrices of Machado, Oliveira and Fernandes (2009) at full severity, on linear RGB."""


def _linear(colour: str) -> list[float]:
    """Return red, green and blue in 0 to 1, proportional to light."""
    values = [int(colour[first : first + 2], 16) / 255 for first in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it, from 1 to 21."""
    low, high = sorted(
        sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), _linear(each), strict=True))
        for each in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def seen_by(blindness: str, colour: str) -> tuple[float, float, float]:
    """Return L, a and b (Oklab, Ottosson 2020) of a colour as a colour-blind reader sees it."""
    rgb = _linear(colour)
    if blindness != "none":
        rgb = [
            min(1.0, max(0.0, sum(m * v for m, v in zip(row, rgb, strict=True))))
            for row in _BLINDNESS[blindness]
        ]
    red, green, blue = rgb
    cones = (
        0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue,
        0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue,
        0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue,
    )
    long, middle, short = (each ** (1 / 3) for each in cones)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def mix(one: str, other: str, share: float) -> str:
    """Return `share` of the first colour over the second one."""
    pairs = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)
