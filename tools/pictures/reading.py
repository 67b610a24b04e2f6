"""Rates of reading shuffled HDF5 by mpistrat, h5py and PyTorch, relative to a scan by h5py."""

import json
from typing import Any

from tools.figures import RECORD
from tools.pictures.chart import Axis, Chart
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "record"]

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


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    p = palette
    d = Drawing(820, 306, p, "Shuffled batches of a compressed HDF5 file: mpistrat beside h5py")
    d.text(10, 26, "Batches of a gzip-compressed HDF5 file", bold=True, size=16)
    d.text(10, 47, "examples per second, relative to h5py reading the file in order",
           size=13, colour=p.muted)  # fmt: skip
    chart = Chart(d, (270, 66, 740, 240), Axis(0.005, 5, is_log=True), Axis(0, len(_SHOWN)))
    for value in (0.01, 0.1, 1):
        x, _ = chart.at(value, 0)
        d.line([(x, chart.top), (x, chart.bottom)], colour=p.line, width=0.8)
        d.text(x, chart.bottom + 19, f"{value:g}", size=12.5, colour=p.muted, anchor="middle")
    ours = recorded["rates"]["mpistrat, shuffled, gzip"][0]
    for number, (what, (name, colour)) in enumerate(_SHOWN.items()):
        rate, low, high = recorded["rates"][what]
        x, y = chart.at(rate, len(_SHOWN) - number - 0.5)
        d.text(chart.left - 10, y + 5, name, anchor="end", bold=number == 0)
        own = getattr(p, colour)
        d.rect(chart.left, y - 14, x - chart.left, 28, fill=own, radius=3)
        d.line([(chart.at(low, 0)[0], y), (chart.at(high, 0)[0], y)], colour=p.ink, width=1.2)
        text = f"{rate:.2g}" if rate != 1 else "1"
        if rate < ours and rate != 1:
            text += f"   ({ours / rate:.0f} times slower than mpistrat)"
        d.text(max(x, chart.at(high, 0)[0]) + 8, y + 5, text, size=13, bold=number == 0)
    d.text(10, 279, f"{recorded['num_ranks']} ranks on 2 cores; h5py reads on one of them, the "
           "DataLoader in 2 workers. 20,000 images of 3 KiB, 64 to a chunk;", size=12.5,
           colour=p.muted)  # fmt: skip
    d.text(10, 296, f"medians of {recorded['samples']} rounds, thin lines are quartiles. "
           "Logarithmic axis. Run it: mpiexec -n 2 python -m benchmarks data", size=12.5,
           colour=p.muted)  # fmt: skip
    return d.render()
