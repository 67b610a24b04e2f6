"""Layout of a checkpoint file: the tree of groups, and what protects each of its parts."""

from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw"]

_ROWS = (
    (0, "/", "group", "format, version, step, replicas, created; digest of these"),
    (1, "variables/", "group", "one group for each level of an object's path"),
    (2, "model/", "group", ""),
    (3, "kernel", "array", "float32 (64, 10): synchronization, aggregation, a digest"),
    (3, "bias", "array", "float32 (10,): the same attributes"),
    (2, "optimizer/", "group", ""),
    (3, "momentum/model/kernel", "array", "slots lie below the optimizer"),
    (3, "iterations", "array", "int64 ()"),
    (1, "state/", "group", "what is no array, as JSON"),
    (2, "batches", "text", '{"pass": 3, "batch": 120, "global_batch_size": 128, ...}'),
    (2, "history", "text", '{"rows": [...]}, with a digest as well'),
)
_TOP, _ROW, _INDENT = 64, 32, 26


def draw(palette: Palette) -> str:
    """Return the picture."""
    p = palette
    height = _TOP + _ROW * len(_ROWS) + 52
    d = Drawing(820, height, p, "Layout of a checkpoint: variables and state in one HDF5 file")
    d.rect(10, 10, 800, height - 56, stroke=p.line, fill=p.panel, radius=10)
    d.text(28, 37, "checkpoint-120.h5", bold=True, mono=True)
    d.text(790, 37, "one file, read by h5ls, h5dump, HDFView and h5py", size=13, anchor="end",
           colour=p.muted)  # fmt: skip
    colours = {"group": p.slate, "array": p.blue, "text": p.orange}
    for number, (depth, name, kind, detail) in enumerate(_ROWS):
        x, y = 32.0 + _INDENT * depth, _TOP + _ROW * number
        if depth:
            parent = max(i for i in range(number) if _ROWS[i][0] == depth - 1)
            trunk = x - _INDENT + 9
            d.line([(trunk, _TOP + _ROW * parent + 20), (trunk, y + 11), (x - 3, y + 11)],
                   colour=p.muted, width=1)  # fmt: skip
        _icon(d, x, y, kind, colours[kind])
        d.text(x + 26, y + 16, name, mono=True, size=13.5, bold=depth == 1)
        d.text(330, y + 16, detail, size=13, colour=p.muted)
    y = height - 20
    for x, kind, name in ((20, "group", "group"), (120, "array", "dataset of numbers"),
                          (310, "text", "dataset of JSON text")):  # fmt: skip
        _icon(d, x, y - 14, kind, colours[kind])
        d.text(x + 26, y + 2, name, size=13)
    d.text(800, y + 2, "written under a temporary name, then renamed", size=13, anchor="end",
           colour=p.muted)  # fmt: skip
    return d.render()


def _icon(d: Drawing, x: float, y: float, kind: str, colour: str) -> None:
    if kind == "group":
        d.rect(x, y + 4, 18, 14, fill=d.tint(colour, 0.6), stroke=d.palette.muted, radius=2)
        d.rect(x, y + 1, 9, 4, fill=d.tint(colour, 0.6), stroke=d.palette.muted, radius=1)
        return
    d.rect(x, y + 2, 18, 17, fill=d.tint(colour, 0.2), stroke=colour, radius=2)
    if kind == "array":
        for column in (6, 12):
            d.line([(x + column, y + 2), (x + column, y + 19)], colour=colour, width=1)
        d.line([(x, y + 10.5), (x + 18, y + 10.5)], colour=colour, width=1)
    else:
        for row in (6.5, 10.5, 14.5):
            d.line([(x + 4, y + row), (x + 14, y + row)], colour=colour, width=1)
