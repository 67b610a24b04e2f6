"""Loss of a run that is killed on 2 ranks and resumes on 3, and of an undisturbed run."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch
from tools.house import ROOT
from tools.pictures.chart import Axis, Chart
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "draw_narrow", "record"]

_EPOCHS, _KILLED_AFTER = 30, 12
_BEFORE, _AFTER = 2, 3
_LIMIT_S = 300


def record() -> dict[str, Any]:
    """Train without a disturbance; then kill a run with SIGKILL, and resume it on more ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "digits.h5"
        _python("jobs/prepare_digits.py", "--output", str(data))
        _train(_BEFORE, data, folder / "whole")
        reached = _train_and_kill(data, folder / "killed")
        _train(_AFTER, data, folder / "killed", "--resume")
        return {
            "epochs": _EPOCHS,
            "killed_after": reached,
            "ranks": [_BEFORE, _AFTER],
            "undisturbed": _losses(folder / "whole"),
            "resumed": _losses(folder / "killed"),
        }


def _python(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=launch.environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _job(data: Path, output: Path) -> list[str]:
    options = ["--data", str(data), "--output", str(output), "--epochs", str(_EPOCHS)]
    return ["jobs/train_digits.py", *options, "--device", "cpu"]


def _train(num_ranks: int, data: Path, output: Path, *options: str) -> None:
    done = launch.run([*_job(data, output), *options], num_ranks, _LIMIT_S, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"train_digits.py failed:\n{done.stdout}{done.stderr}")


def _train_and_kill(data: Path, output: Path) -> int:
    """Send SIGKILL to a run once it has saved `_KILLED_AFTER` epochs; return how many it saved."""
    job = subprocess.Popen(
        [*mpiexec(_BEFORE), sys.executable, *_job(data, output)],
        cwd=ROOT,
        env=launch.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + _LIMIT_S
    while _last_epoch(output) < _KILLED_AFTER and job.poll() is None:
        if time.monotonic() > end:
            break
        time.sleep(0.002)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    return _last_epoch(output)


def _last_epoch(output: Path) -> int:
    names = (re.fullmatch(r"checkpoint-(\d+)\.h5", path.name) for path in output.glob("*.h5"))
    return max((int(match[1]) for match in names if match), default=0)


def _losses(output: Path) -> list[float]:
    rows = json.loads((output / "learning_curve.json").read_text())
    return [round(row["loss"], 6) for row in rows]


_TITLE = "A run killed on 2 ranks resumes on 3 ranks, with the same losses"


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    before, after = recorded["ranks"]
    d = Drawing(820, 266, palette, _TITLE)
    d.text(10, 26, f"Killed on {before} ranks, resumed on {after}", bold=True, size=16)
    d.text(10, 47, "jobs/train_digits.py: the losses are those of an undisturbed run", size=13,
           colour=palette.muted)  # fmt: skip
    _curves(d, (60, 84, 790, 222), recorded, legend=(560, 100))
    return d.render()


def draw_narrow(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture for a phone."""
    before, after = recorded["ranks"]
    d = Drawing(360, 340, palette, _TITLE)
    d.text(4, 22, f"Killed on {before} ranks, resumed on {after}", bold=True, size=16)
    d.text(4, 42, "jobs/train_digits.py, and an undisturbed run", size=13, colour=palette.muted)
    _curves(d, (44, 76, 352, 296), recorded, legend=(152, 112))
    return d.render()


def _curves(
    d: Drawing,
    box: tuple[float, float, float, float],
    recorded: dict[str, Any],
    legend: tuple[float, float],
) -> None:
    """Draw both curves in a part of the drawing, and the legend within it."""
    p = d.palette
    killed, (before, after) = recorded["killed_after"], recorded["ranks"]
    whole, resumed = recorded["undisturbed"], recorded["resumed"]
    y = Axis(0.02, 3, "training loss", is_log=True, ticks=(0.03, 0.1, 0.3, 1, 3))
    chart = Chart(d, box, Axis(0, recorded["epochs"], "epoch"), y)
    chart.frame()
    epochs = range(1, len(whole) + 1)
    chart.curve(zip(epochs, whole, strict=True), p.slate, width=7)
    points = list(zip(epochs, resumed, strict=True))
    chart.curve(points[:killed], p.blue)
    chart.curve(points[killed - 1 :], p.green)
    x, y_kill = chart.at(*points[killed - 1])
    d.line([(x, chart.top), (x, chart.bottom)], colour=p.red, dashed=True)
    for shift in (-1, 1):
        d.line([(x - 5, y_kill - 5 * shift), (x + 5, y_kill + 5 * shift)], colour=p.red, width=2.6)
    d.text(x + 8, chart.top + 12, f"SIGKILL after epoch {killed}", size=13, colour=p.red)
    chart.label(points[killed // 2], f"{before} ranks", p.blue, bold=True, shift=(2, -12))
    middle = points[(killed + len(points)) // 2]
    chart.label(middle, f"--resume on {after} ranks", p.green, bold=True, shift=(-74, -24))
    gap = max(abs(a - b) / a for a, b in zip(whole, resumed, strict=True))
    equal = "equal to 5 digits" if gap < 1e-5 else f"within {gap:.1g} of it"
    left, top = legend
    left = max(left, x + 8)
    d.line([(left, top), (left + 34, top)], colour=p.slate, width=7)
    d.text(left + 42, top + 4, "undisturbed run:", size=13, colour=p.muted)
    d.text(left + 42, top + 22, equal, size=13, colour=p.muted)
