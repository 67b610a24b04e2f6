"""Life of a collective: ranks arrive, agree, reduce and return; or one disagrees, and all raise."""

from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw"]

_LANES = (70, 132, 194)
_ARRIVE = (190, 250, 330)


def draw(palette: Palette) -> str:
    """Return the picture: above all ranks agree, below rank 1 asks for something else."""
    d = Drawing(820, 500, palette, "Life of a collective: agreement, then data, or one error")
    _good(d, 0)
    d.line([(20, 250), (800, 250)], colour=palette.line, dashed=True)
    _bad(d, 252)
    return d.render()


def _ranks(d: Drawing, top: float, calls: tuple[str, str, str], until: float) -> None:
    p = d.palette
    for rank, (y, x) in enumerate(zip(_LANES, _ARRIVE, strict=True)):
        d.text(20, top + y + 5, f"rank {rank}", bold=True)
        d.line([(76, top + y), (x, top + y)], colour=p.slate, width=5)
        d.line([(x, top + y), (until, top + y)], colour=p.line, width=5)
        is_odd = calls[rank] != calls[0]
        d.circle(x, top + y, 5, fill=p.red if is_odd else p.blue)
        d.text(x, top + y - 12, calls[rank], mono=True, size=12, anchor="middle",
               colour=p.red if is_odd else None)  # fmt: skip


def _good(d: Drawing, top: float) -> None:
    p = d.palette
    d.text(20, top + 26, "All ranks make the same call", bold=True, size=15)
    _ranks(d, top, ("all_reduce(g)",) * 3, 470)
    _step(d, top, 400, 96, p.blue, ("agree", "equal digests", "of the call"))
    _step(d, top, 530, 120, p.green, ("reduce", "shared memory", "or MPI"))
    for y in _LANES:
        d.line([(650, top + y), (700, top + y)], colour=p.slate, width=5)
        d.text(708, top + y + 5, "the same sum", size=13)
    for y in _LANES:
        d.line([(496, top + y), (528, top + y)], arrow=True)
    d.text(20, top + 236, "An early rank waits. How long is in the timeline.", size=13,
           colour=p.muted)  # fmt: skip


def _bad(d: Drawing, top: float) -> None:
    p = d.palette
    d.text(20, top + 26, "Rank 1 makes another call", bold=True, size=15)
    _ranks(d, top, ("all_reduce(g)", "gather(g)", "all_reduce(g)"), 470)
    _step(d, top, 400, 96, p.red, ("agree", "digests", "differ"))
    x, y, width = 530, top + 44, 270
    d.rect(x, y, width, 176, fill=d.tint(p.red, 0.1), stroke=p.red)
    lines = ("CollectiveMismatchError", "on every rank", "rank 1     gather", "  train.py:41",
             "ranks 0, 2 all_reduce", "  train.py:38")  # fmt: skip
    for number, line in enumerate(lines):
        d.text(x + 14, y + 26 + 21 * number, line, mono=True, size=12,
               colour=p.red if number < 2 else None, bold=number < 2)  # fmt: skip
    d.text(x + 14, y + 164, "no rank waits forever", size=13, colour=p.muted)
    for lane in _LANES:
        d.line([(496, top + lane), (528, top + lane)], arrow=True, colour=p.red)
    d.text(20, top + 236, "No data moves before all ranks agree.", size=13, colour=p.muted)


def _step(
    d: Drawing, top: float, x: float, width: float, colour: str, lines: tuple[str, ...]
) -> None:
    d.box(x, top + _LANES[0] - 26, width, _LANES[2] - _LANES[0] + 52, lines, colour=colour)
