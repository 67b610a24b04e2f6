"""Sharding of a batch: two files, one shuffled order, and the same order on any number of ranks."""

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import mpistrat as ms
from mpistrat.sharding import slice_of_rank
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "record"]

_NUM_ROWS, _BATCH_SIZE = 8, 8
_CELL, _LEFT = 42, 120


def record() -> dict[str, Any]:
    """Return the order in which the package reads two small files."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            with h5py.File(Path(folder) / f"part-{number}.h5", "w") as file:
                file["x"] = np.arange(number * _NUM_ROWS, (number + 1) * _NUM_ROWS)
        data = ms.data.Dataset.from_hdf5(Path(folder) / "part-*.h5", fields="x")
        batches = data.shuffle(seed=1).batch(_BATCH_SIZE)
        return {"batches": [batch.tolist() for batch in batches]}


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    p = palette
    d = Drawing(820, 470, p, "A global batch of 8 examples over 3 ranks, in the same order as on 2")
    for number, colour in enumerate((p.blue, p.orange)):
        x = _LEFT + number * (_NUM_ROWS * _CELL + 12)
        d.text(x, 24, f"part-{number}.h5", mono=True, size=13, colour=p.muted)
        _cells(d, x, 34, range(number * _NUM_ROWS, (number + 1) * _NUM_ROWS), colour)
    d.text(20, 59, "files", bold=True)
    d.text(20, 146, "one order", bold=True)
    d.text(_LEFT, 108, "shuffled: decided by the files, the seed, the epoch and the batch size",
           size=13, colour=p.muted)  # fmt: skip
    for number, batch in enumerate(recorded["batches"]):
        x = _LEFT + number * (_NUM_ROWS * _CELL + 12)
        _cells(d, x, 121, batch)
        d.line([(x, 170), (x, 176), (x + 8 * _CELL - 2, 176), (x + 8 * _CELL - 2, 170)])
        d.text(x + 4 * _CELL, 193, f"global batch {number}", size=13, anchor="middle",
               colour=p.muted)  # fmt: skip
    for place, size in enumerate((3, 2)):
        _ranks(d, 226 + 116 * place, size, recorded["batches"])
    d.text(
        20, 460, "Each rank finds its slice alone. A run that stops on 3 ranks can resume on 2.",
        size=13, colour=p.muted,
    )  # fmt: skip
    return d.render()


def _ranks(d: Drawing, top: float, size: int, batches: list[list[int]]) -> None:
    d.text(20, top + 44, f"{size} ranks", bold=True)
    for number, batch in enumerate(batches):
        x = _LEFT + number * (_NUM_ROWS * _CELL + 12)
        for rank in range(size):
            part = slice_of_rank(len(batch), size, rank)
            left = x + part.start * _CELL
            width = (part.stop - part.start) * _CELL
            d.rect(left - 1, top, width - 2, 74, fill=d.palette.panel, stroke=d.palette.line)
            d.text(left + width / 2 - 2, top + 18, f"rank {rank}", size=13, anchor="middle")
            _cells(d, left + 3, top + 27, batch[part], size=_CELL - 8 / max(1, len(batch[part])))


def _cells(
    d: Drawing, x: float, y: float, examples: Any, colour: str | None = None, size: float = _CELL
) -> None:
    p = d.palette
    for place, example in enumerate(examples):
        own = colour or (p.blue if example < _NUM_ROWS else p.orange)
        d.rect(x + place * size, y, size - 4, 38, fill=d.tint(own, 0.2), stroke=own, radius=4)
        d.text(x + place * size + (size - 4) / 2, y + 24, str(example), anchor="middle", mono=True)
