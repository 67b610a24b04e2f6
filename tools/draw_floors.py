"""SVG picture of the floors of the package, drawn from the table of docs/architecture.md.

python -m tools.draw_floors   # writes docs/images/floors.svg
"""

from html import escape

from tools.house import PACKAGE, ROOT, floors

PICTURE = ROOT / "docs" / "images" / "floors.svg"

_WIDTH, _HEIGHT, _GAP, _BAND = 900, 26, 8, 42
_LEFT, _TOP = 40, 16
_CHARACTER = 7.3
_DIVIDE_BELOW = "context"
"""The first room that speaks of replicas; the rooms of lower floors speak of ranks."""


def draw() -> str:
    """Return the picture: one band for each floor, a box for each room, folders in colour."""
    rows = list(enumerate(floors()))[::-1]
    height = _TOP + _BAND * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    divide = next(level for level, rooms in rows[::-1] if _DIVIDE_BELOW in rooms)
    for place, (level, rooms) in enumerate(rows):
        top = _TOP + _BAND * place
        shade = "#f4f7fb" if level >= divide else "#f7f5f0"
        parts.append(
            f'<rect x="0" y="{top}" width="{_WIDTH}" height="{_BAND - 4}" fill="{shade}"/>'
            f'<text x="12" y="{top + 23}" fill="#777777">{level}</text>'
        )
        left = _LEFT
        for room in rooms:
            width = len(room) * _CHARACTER + 18
            is_folder = (PACKAGE / room).is_dir()
            fill, line = ("#dbe7f6", "#5b84b8") if is_folder else ("#ffffff", "#aaaaaa")
            parts.append(
                f'<rect x="{left}" y="{top + 6}" width="{width:.0f}" height="{_HEIGHT}" rx="4" '
                f'fill="{fill}" stroke="{line}"/>'
                f'<text x="{left + 9}" y="{top + 23}" fill="#222222">{escape(room)}</text>'
            )
            left += round(width) + _GAP
        if level == divide:
            parts.append(
                f'<text x="{_WIDTH - 12}" y="{top + 23}" text-anchor="end" fill="#5b84b8">'
                "replicas above, ranks below</text>"
            )
    parts.append(
        f'<text x="12" y="{height - 12}" fill="#777777">Imports point downward. '
        "Blue: a folder; white: a single module.</text></svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw())
