"""Rates of reading shuffled HDF5 by mpistrat, h5py and PyTorch, relative to a scan by h5py."""

import json
from collections.abc import Sequence
from typing import Any

from tools.figures import RECORD
from tools.pictures.chart import Axis, Chart
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "draw_narrow", "record"]

_SHOWN = {
    "mpistrat, shuffled, gzip": ("mpistrat, shuffled", "green"),
    "h5py, scan, gzip": ("h5py, in file order", "slate"),
    "torch DataLoader, shuffled, 2 workers, gzip": ("PyTorch DataLoader, shuffled", "orange"),
    "h5py, sorted index arrays, gzip": ("h5py, shuffled (sorted indices)", "red"),
}


def record() -> dict[str, Any]:
    """Return the rates that the pages name, from the recorded run of the benchmarks."""
    found = json.loads(RECORD.read_text())["data, 2 ranks"]
    rates = {
        row["what"]: [round(row["rate_over_scan"], 4)]
        + [round(each, 4) for each in row["rate_over_scan_quartiles"]]
        for row in found["results"]
        if row["what"] in _SHOWN
    }
    return {"num_ranks": found["num_ranks"], "samples": found["samples"], "rates": rates}


_TITLE = "Shuffled batches of a compressed HDF5 file: mpistrat compared with h5py"


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    p = palette
    d = Drawing(820, 306, p, _TITLE)
    d.text(10, 26, "Batches of a gzip-compressed HDF5 file", bold=True, size=16)
    d.text(10, 47, "examples per second, relative to h5py reading the file in order",
           size=13, colour=p.muted)  # fmt: skip
    chart = Chart(d, (270, 66, 740, 240), Axis(0.005, 5, is_log=True), Axis(0, len(_SHOWN)))
    _grid(chart)
    for number, (what, (name, colour)) in enumerate(_SHOWN.items()):
        _, y = chart.at(1, len(_SHOWN) - number - 0.5)
        d.text(chart.left - 10, y + 5, name, anchor="end", bold=number == 0)
        _bar(chart, y, 28, recorded["rates"][what], getattr(p, colour), is_bold=number == 0)
    d.text(10, 279, f"{recorded['num_ranks']} ranks on 2 cores; h5py reads on one of them, the "
           "DataLoader in 2 workers. 20,000 images of 3 KiB, 64 to a chunk;", size=12.5,
           colour=p.muted)  # fmt: skip
    d.text(10, 296, f"medians of {recorded['samples']} rounds, thin lines are quartiles. "
           "Logarithmic axis. Run it: mpiexec -n 2 python -m benchmarks data", size=12.5,
           colour=p.muted)  # fmt: skip
    return d.render()


def draw_narrow(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture for a phone: each name stands above its bar."""
    p = palette
    d = Drawing(360, 384, p, _TITLE)
    d.text(4, 22, "A gzip-compressed HDF5 file", bold=True, size=16)
    d.text(4, 42, "examples per second, relative to h5py", size=13, colour=p.muted)
    d.text(4, 58, "reading the file in order", size=13, colour=p.muted)
    chart = Chart(d, (4, 70, 320, 266), Axis(0.005, 5, is_log=True), Axis(0, len(_SHOWN)))
    _grid(chart)
    for number, (what, (name, colour)) in enumerate(_SHOWN.items()):
        _, y = chart.at(1, len(_SHOWN) - number - 0.5)
        d.text(chart.left, y - 7, name, size=13, bold=number == 0)
        _bar(chart, y + 10, 18, recorded["rates"][what], getattr(p, colour), is_bold=number == 0)
    notes = (
        f"{recorded['num_ranks']} ranks on 2 cores; h5py reads on one of them,",
        "the DataLoader in 2 workers. 20,000 images of",
        f"3 KiB, 64 to a chunk; medians of {recorded['samples']} rounds, thin",
        "lines are quartiles. Logarithmic axis. Run it:",
        "mpiexec -n 2 python -m benchmarks data",
    )
    for number, line in enumerate(notes):
        d.text(4, 306 + 17 * number, line, size=12.5, colour=p.muted)
    return d.render()


def _grid(chart: Chart) -> None:
    d, p = chart.drawing, chart.drawing.palette
    for value in (0.01, 0.1, 1):
        x, _ = chart.at(value, 0)
        d.line([(x, chart.top), (x, chart.bottom)], colour=p.line, width=0.8)
        d.text(x, chart.bottom + 19, f"{value:g}", size=12.5, colour=p.muted, anchor="middle")


def _bar(
    chart: Chart, y: float, height: float, rates: Sequence[float], colour: str, *, is_bold: bool
) -> None:
    """Draw a bar around `y` with its quartiles, and write the rate at its end."""
    d, (rate, low, high) = chart.drawing, rates
    x, _ = chart.at(rate, 0)
    d.rect(chart.left, y - height / 2, x - chart.left, height, fill=colour, radius=3)
    d.line([(chart.at(low, 0)[0], y), (chart.at(high, 0)[0], y)], colour=d.palette.ink, width=1.2)
    text = f"{rate:.2g}" if rate != 1 else "1"
    d.text(max(x, chart.at(high, 0)[0]) + 8, y + 5, text, size=13, bold=is_bold)
