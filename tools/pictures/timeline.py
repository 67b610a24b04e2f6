"""Timeline of a run with a slow rank: the strips that `mpistrat timeline --plot` draws."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.cli.rank_times import spans_by_rank, summarize
from mpistrat.cli.timeline_plot import CATEGORY_COLOURS, fold
from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch
from tools.house import ROOT
from tools.pictures.chart import Axis, Chart
from tools.pictures.palette import LIGHT, Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "record"]

_PROGRAM = Path(__file__).parent / "programs" / "slow_rank.py"
_RANKS = 16
_ROW, _STRIP = 44, 36


def record() -> dict[str, Any]:
    """Run the program, and fold its timeline into strips."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "trace.json"
        changes = {
            "MPISTRAT_TIMELINE": str(target),
            "PYTHONPATH": str(ROOT),
            # More ranks than cores: a rank that waits lets another one run.
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        }
        subprocess.run(
            [*mpiexec(_RANKS), sys.executable, str(_PROGRAM)],
            cwd=folder,
            env=launch.environment(os.environ | changes),
            check=True,
            timeout=120,
        )
        events = json.loads(target.read_text())["traceEvents"]
    first = next(e["ts"] for e in events if e.get("cat") == "data")
    # Without the start of Python and MPI.
    events = [each for each in events if each.get("ph") == "X" and each["ts"] >= first]
    times = summarize(events)
    strips = fold(spans_by_rank(events), times)
    return {
        "seconds": round(max(each.total_s for each in times), 3),
        "labels": [strip.label for strip in strips],
        "waited_s": [round(strip.others_waited_s, 2) for strip in strips],
        "shares": [np.round(strip.shares, 2).tolist() for strip in strips],
    }


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    p, strips = palette, recorded["shares"]
    height = 60 + _ROW * len(strips) + 60
    d = Drawing(820, height, p, "Timeline of 16 ranks: rank 5 is slow, ranks 8-11 wait for data")
    d.text(10, 26, f"{_RANKS} ranks; those that spent their time alike share a strip", bold=True,
           size=16)  # fmt: skip
    colours = _colours(p)
    box = (206, 48, 680, 48 + _ROW * len(strips))
    chart = Chart(d, box, Axis(0, recorded["seconds"], "seconds"), Axis(0, 1, ticks=(0,)))
    for place, shares in enumerate(strips):
        top = box[1] + _ROW * place
        d.text(196, top + 23, recorded["labels"][place], anchor="end")
        waited = recorded["waited_s"][place]
        if waited >= 0.05:
            d.text(688, top + 23, f"others waited {waited:.0f} s", size=13, colour=p.muted)
        _strip(d, (box[0], top, box[2] - box[0], _STRIP), shares, list(colours.values()))
    d.line([(box[0], box[3]), (box[2], box[3])], colour=p.muted, width=1)
    for value in chart.x.marks():
        x, _ = chart.at(value, 0)
        d.text(x, box[3] + 18, f"{value:g} s", size=12.5, colour=p.muted, anchor="middle")
    left = 40.0
    for name, colour in colours.items():
        d.rect(left, box[3] + 40, 14, 14, fill=colour, radius=3)
        d.text(left + 20, box[3] + 52, name, size=13)
        left += 46 + 7.2 * len(name)
    return d.render()


def _colours(palette: Palette) -> dict[str, str]:
    """Return the colours of the categories in this palette."""
    names = {getattr(LIGHT, name): name for name in ("slate", "blue", "orange", "purple", "red")}
    return {what: getattr(palette, names[each]) for what, each in CATEGORY_COLOURS.items()}


def _strip(
    d: Drawing, box: tuple[float, float, float, float], shares: Any, colours: list[str]
) -> None:
    """Draw the share of each category over time, from the bottom to the top."""
    left, top, width, height = box
    until = np.minimum(np.cumsum(shares, axis=1), 1)
    step = width / len(shares)
    # Each area reaches down to the bottom, and those of the categories below cover it.
    for number, colour in reversed(list(enumerate(colours))):
        path = [f"M{left},{top + height}"]
        for place, row in enumerate(until):
            path.append(f"V{top + height * (1 - row[number]):.1f}H{left + step * (place + 1):.1f}")
        d.add(f'<path d="{"".join(path)}V{top + height}z" fill="{colour}"/>')
