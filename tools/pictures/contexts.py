"""Contexts: which line of a program runs on which rank, and in which context."""

from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw"]

_PROGRAM = (
    ("strategy = ms.MPIStrategy()", "cross"),
    ("with strategy.scope():", "cross"),
    ("    weight = ms.Variable(...)", "cross"),
    ("for batch in batches:", "cross"),
    ("    losses = strategy.run(step, args=batch)", "cross"),
    ("        error = x @ weight.value() - y", "replica"),
    ("        optimizer.apply_gradients(...)", "meet"),
    ("    loss = strategy.reduce('mean', losses)", "meet"),
    ("ms.print(loss)", "one"),
)
_TOP, _STEP, _CODE, _RANKS, _WIDTH = 92, 34, 20, 400, 130


def draw(palette: Palette) -> str:
    """Return the picture: a program on the left, what each of three ranks does on the right."""
    p = palette
    d = Drawing(820, 470, p, "Who runs which line: three ranks, replica and cross-replica context")
    d.text(_CODE, 30, "One program", bold=True, size=15)
    d.text(_CODE, 52, "every rank runs it from top to bottom", size=13, colour=p.muted)
    for rank in range(3):
        x = _RANKS + rank * (_WIDTH + 10)
        d.text(x + _WIDTH / 2, 30, f"rank {rank}", bold=True, anchor="middle")
        d.text(x + _WIDTH / 2, 52, f"replica {rank}", size=13, anchor="middle", colour=p.muted)
    replica_top = _TOP + 5 * _STEP - 22
    d.rect(_CODE - 8, replica_top, 808, 2 * _STEP, fill=d.tint(p.blue, 0.1), radius=4)
    for number, (line, kind) in enumerate(_PROGRAM):
        y = _TOP + number * _STEP
        d.text(_CODE, y, line, mono=True, size=12)
        _on_ranks(d, y - 5, kind, number)
    _legend(d, _TOP + len(_PROGRAM) * _STEP + 2)
    return d.render()


def _on_ranks(d: Drawing, y: float, kind: str, number: int) -> None:
    p = d.palette
    centres = [_RANKS + rank * (_WIDTH + 10) + _WIDTH / 2 for rank in range(3)]
    if kind == "meet":
        d.line([(centres[0], y), (centres[2], y)], colour=p.orange, width=3)
    for rank, x in enumerate(centres):
        if kind == "one" and rank:
            d.circle(x, y, 4, fill=p.line)
        elif kind == "replica":
            d.text(x, y + 5, f"part {rank}", size=13, anchor="middle", colour=p.blue)
        else:
            d.circle(x, y, 6, fill=p.orange if kind == "meet" else p.slate)
    if number == 4:
        for x in centres:
            d.line([(x, y + 8), (x, y + 18)], arrow=True)


def _legend(d: Drawing, top: float) -> None:
    p = d.palette
    d.circle(_CODE + 6, top, 6, fill=p.slate)
    d.text(_CODE + 20, top + 5, "cross-replica context: all ranks do the same", size=13)
    d.rect(_CODE - 2, top + 17, 16, 14, fill=d.tint(p.blue, 0.3), radius=3)
    d.text(
        _CODE + 20, top + 29, "replica context: inside step, each rank works on its part", size=13
    )
    d.line([(_CODE - 2, top + 48), (_CODE + 14, top + 48)], colour=p.orange, width=3)
    d.text(_CODE + 20, top + 53, "collective: all ranks must call it", size=13)
    d.circle(_RANKS + 6, top, 4, fill=p.line)
    d.text(_RANKS + 20, top + 5, "runs the line, but prints nothing", size=13)
