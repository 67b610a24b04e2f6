"""Where a GPU comes in: arrays stay on the device, and three ways lead to the other ranks."""

from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw"]


def draw(palette: Palette) -> str:
    """Return the picture."""
    p = palette
    d = Drawing(820, 432, p, "Where a GPU comes in: NCCL, CUDA-aware MPI, or staging in the host")
    for left, rank in ((10, 0), (570, 1)):
        d.rect(left, 10, 240, 372, stroke=p.line, fill=p.panel, radius=10)
        d.text(left + 120, 34, f"rank {rank}", bold=True, anchor="middle")
        d.rect(left + 14, 48, 212, 152, stroke=p.green, fill=d.tint(p.green, 0.08))
        d.text(left + 26, 70, "device memory", size=13, colour=p.muted)
        d.box(left + 30, 82, 180, 48, ("gradients", "CuPy or PyTorch"), colour=p.green)
        d.box(left + 30, 140, 180, 48, ("optimizer step", "one kernel"), colour=p.green)
        d.rect(left + 14, 246, 212, 122, stroke=p.blue, fill=d.tint(p.blue, 0.08))
        d.text(left + 26, 361, "host memory", size=13, colour=p.muted)
        d.box(left + 30, 264, 84, 76, ("copies", "staging"), colour=p.blue, size=13.5)
        d.box(left + 126, 264, 84, 76, ("batches", "HDF5"), colour=p.orange, size=13.5)
        # Staging goes down, batches go up.
        d.line([(left + 72, 202), (left + 72, 261)], both=True, colour=p.blue)
        d.line([(left + 168, 261), (left + 168, 203)], arrow=True, colour=p.orange)
    _way(d, 84, p.green, "1  NCCL", "if CuPy has it", "and each rank its own GPU")
    _way(d, 152, p.red, "2  CUDA-aware MPI", "if a trial proves that", "MPI takes device arrays")
    _way(
        d,
        312,
        p.blue,
        "3  staging through the host",
        "works with every MPI;",
        "the default elsewhere",
    )
    d.text(
        10, 418, "A collective takes the first way that all ranks can go. mpistrat doctor says "
        "which, and why.", size=13, colour=p.muted,
    )  # fmt: skip
    return d.render()


def _way(d: Drawing, y: float, colour: str, name: str, *details: str) -> None:
    d.line([(244, y + 8), (576, y + 8)], both=True, colour=colour, width=2)
    d.text(410, y, name, bold=True, anchor="middle", size=13.5)
    for number, detail in enumerate(details):
        d.text(410, y + 27 + 17 * number, detail, anchor="middle", size=12.5,
               colour=d.palette.muted)  # fmt: skip
