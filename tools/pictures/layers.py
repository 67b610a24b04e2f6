"""Layers of the package, from the table of docs/architecture.md."""

from tools.house import PACKAGE, layers
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw"]

_WIDTH, _HEIGHT, _GAP, _BAND = 900, 26, 8, 42
_LEFT, _TOP = 40, 8
_CHARACTER = 7.3
_DIVIDE_BELOW = "context"
"""The first module that speaks of replicas; the modules of lower layers speak of ranks."""


def draw(palette: Palette) -> str:
    """Return the picture: one band for each layer, a box for each module, folders in colour."""
    p = palette
    rows = list(enumerate(layers()))[::-1]
    d = Drawing(_WIDTH, _TOP + _BAND * len(rows) + 34, p, "The layers of the package")
    divide = next(level for level, modules in rows[::-1] if _DIVIDE_BELOW in modules)
    for place, (level, modules) in enumerate(rows):
        top = _TOP + _BAND * place
        shade = d.tint(p.blue, 0.07) if level >= divide else d.tint(p.orange, 0.08)
        d.rect(0, top, _WIDTH, _BAND - 4, fill=shade, radius=4)
        d.text(12, top + 24, str(level), size=12, colour=p.muted, mono=True)
        left = _LEFT
        for module in modules:
            width = round(len(module) * _CHARACTER + 18)
            is_folder = (PACKAGE / module).is_dir()
            fill, line = (d.tint(p.blue, 0.2), p.blue) if is_folder else (p.ground, p.muted)
            d.rect(left, top + 6, width, _HEIGHT, fill=fill, stroke=line, radius=4)
            d.text(left + width / 2, top + 23, module, size=12, anchor="middle", mono=True)
            left += width + _GAP
        if level == divide:
            d.text(_WIDTH - 12, top + 23, "replicas above, ranks below", size=12, anchor="end",
                   colour=p.muted)  # fmt: skip
    d.text(12, _TOP + _BAND * len(rows) + 18, "Imports point downward. Filled: a folder; empty: "
           "a single module.", size=12, colour=p.muted)  # fmt: skip
    return d.render()
