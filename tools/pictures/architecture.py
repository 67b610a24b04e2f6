"""Architecture: what a program calls, and which layers below answer."""

from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw"]

_LEFT, _WIDTH = 20, 560


def draw(palette: Palette) -> str:
    """Return the picture."""
    p = palette
    d = Drawing(820, 470, p, "Layers of mpistrat: a program calls strategies, which reach MPI")
    d.box(_LEFT, 16, 780, 44, "your program: NumPy, CuPy, PyTorch or JAX", colour=p.slate)
    rows = [
        ("strategies", "MPIStrategy, replicas, variables, optimizers, metrics", p.blue),
        ("collectives", "all_reduce, gather, broadcast: arrays and nests of arrays", p.blue),
        ("agreement", "all ranks prove that they make the same call", p.red),
        ("comm", "shared memory within a node, packing, device memory", p.green),
    ]
    top, height, gap = 92, 58, 16
    for number, (name, detail, colour) in enumerate(rows):
        y = top + number * (height + gap)
        d.box(_LEFT, y, _WIDTH, height, (name, detail), colour=colour)
        d.line([(_LEFT + 280, y - gap + 2), (_LEFT + 280, y - 3)], arrow=True)
    d.line([(_LEFT + 280, 62), (_LEFT + 280, top - 3)], arrow=True)
    bottom = top + 4 * (height + gap)
    d.line([(_LEFT + 280, bottom - gap + 2), (_LEFT + 280, bottom - 3)], arrow=True)
    d.box(_LEFT, bottom, 780, 44, "MPI: MPICH or Open MPI, by mpi4py", colour=p.slate)
    right, width = _LEFT + _WIDTH + 24, 780 - _WIDTH - 24
    tall = 2 * height + gap
    d.box(right, top, width, height, ("data", "shuffled HDF5, one order"), colour=p.orange)
    d.box(
        right, top + height + gap, width, height, ("checkpoint", "one HDF5 file"), colour=p.purple
    )
    y = top + 2 * (height + gap)
    d.box(
        right, y, width, tall, ("failures", "who is late, stopped or gone;", "one report for all"),
        colour=p.red,
    )  # fmt: skip
    for x, start in ((right + width / 2, 62),):
        d.line([(x, start), (x, top - 3)], arrow=True)
    middle = y + height / 2
    d.line([(right - 3, middle), (_LEFT + _WIDTH + 3, middle)], both=True, colour=p.red)
    d.text(
        _LEFT, 460, "Above agreement the words are those of tf.distribute; below, those of MPI.",
        size=13, colour=p.muted,
    )  # fmt: skip
    return d.render()
