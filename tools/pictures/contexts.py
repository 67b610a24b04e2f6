"""Contexts: which line of a program runs on which rank, and in which context."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "draw_narrow"]

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
_SHORTER = {
    "step, args=batch": "...",
    "error = x @ weight.value() - y": "error = ...",
    "optimizer.apply_gradients(...)": "opt.apply_gradients()",
    "'mean', losses": "...",
}
"""What the narrow picture writes in place of parts of the program."""


@dataclass(frozen=True)
class _Layout:
    """Where things are, in pixels."""

    width: int
    code: int
    """Left end of the program."""
    centres: Sequence[int]
    """Middle of the column of each rank."""
    top: int = 92
    step: int = 34

    def row(self, number: int) -> int:
        """Return the base line of a line of the program."""
        return self.top + number * self.step


def draw(palette: Palette) -> str:
    """Return the picture: a program on the left, what each of three ranks does on the right."""
    layout = _Layout(820, 20, (465, 605, 745))
    d = Drawing(820, 470, palette, _TITLE)
    d.text(20, 30, "One program", bold=True, size=15)
    d.text(20, 52, "every rank runs it from top to bottom", size=13, colour=palette.muted)
    for rank, x in enumerate(layout.centres):
        d.text(x, 30, f"rank {rank}", bold=True, anchor="middle")
        d.text(x, 52, f"replica {rank}", size=13, anchor="middle", colour=palette.muted)
    _program(d, layout)
    end = layout.row(len(_PROGRAM)) + 2
    _legend(d, layout, end, ["replica context: inside step, each rank works on its part"])
    _legend_of_one(d, 406, end)
    return d.render()


def draw_narrow(palette: Palette) -> str:
    """Return the picture for a phone, with shorter lines and narrow columns."""
    layout = _Layout(360, 8, (258, 298, 338), top=74, step=30)
    d = Drawing(360, 452, palette, _TITLE)
    d.text(8, 26, "One program, run by", bold=True)
    d.text(298, 20, "ranks", bold=True, anchor="middle", size=13)
    for rank, x in enumerate(layout.centres):
        d.text(x, 42, f"{rank}", bold=True, anchor="middle")
    _program(d, layout, _SHORTER)
    end = layout.row(len(_PROGRAM))
    _legend(d, layout, end, ["replica context: inside step,", "each rank works on its part"])
    _legend_of_one(d, 14, end + 92)
    return d.render()


_TITLE = "Who runs which line: three ranks, replica and cross-replica context"


def _program(d: Drawing, layout: _Layout, shorter: dict[str, str] | None = None) -> None:
    p = d.palette
    top = layout.row(5) - 0.65 * layout.step
    d.rect(4, top, layout.width - 8, 2 * layout.step, fill=d.tint(p.blue, 0.1), radius=4)
    for number, (line, kind) in enumerate(_PROGRAM):
        for long, short in (shorter or {}).items():
            line = line.replace(long, short)
        y = layout.row(number)
        d.text(layout.code, y, line, mono=True, size=12)
        _on_ranks(d, layout.centres, y - 5, kind)
        if number == 4:
            for x in layout.centres:
                d.line([(x, y + 3), (x, y + 12)], arrow=True)


def _on_ranks(d: Drawing, centres: Sequence[int], y: float, kind: str) -> None:
    p = d.palette
    if kind == "meet":
        d.line([(centres[0], y), (centres[-1], y)], colour=p.orange, width=3)
    for rank, x in enumerate(centres):
        if kind == "one" and rank:
            d.circle(x, y, 4, fill=p.line)
        elif kind == "replica":
            d.text(x, y + 5, f"part {rank}", size=12, anchor="middle", colour=p.blue)
        else:
            d.circle(x, y, 6, fill=p.orange if kind == "meet" else p.slate)


def _legend(d: Drawing, layout: _Layout, top: float, of_replicas: Sequence[str]) -> None:
    p, left = d.palette, layout.code
    d.circle(left + 6, top, 6, fill=p.slate)
    d.text(left + 20, top + 5, "cross-replica context: all ranks do the same", size=13)
    d.rect(left - 2, top + 17, 16, 14, fill=d.tint(p.blue, 0.3), radius=3)
    for number, line in enumerate(of_replicas):
        d.text(left + 20, top + 29 + 19 * number, line, size=13)
    y = top + 29 + 24 * len(of_replicas)
    d.line([(left - 2, y - 5), (left + 14, y - 5)], colour=p.orange, width=3)
    d.text(left + 20, y, "collective: all ranks must call it", size=13)


def _legend_of_one(d: Drawing, x: float, y: float) -> None:
    d.circle(x, y, 4, fill=d.palette.line)
    d.text(x + 14, y + 5, "runs the line, but prints nothing", size=13)
