"""Loss of a run that loses two of its four ranks and goes on, and of an undisturbed run."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.mpi.survival import FLAG
from mpistrat.testing import launch
from tools.house import ROOT
from tools.pictures.chart import Axis, Chart
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing

__all__ = ["draw", "record"]

_RANKS = 4
_EPOCHS = 20
_LOST = {3: 70, 1: 150}
"""By rank, the step after which it ends."""
_LIMIT_S = 120
_PAGE = ROOT / "docs" / "howto" / "resuming.md"

_EACH_STEP = """
        if comm.rank == 0:
            error = images @ weight.numpy() - labels
            print("loss", state["step"], comm.size, float(np.mean(error**2)), flush=True)
        step_to_die = lost.get(MPI.COMM_WORLD.rank)
        if step_to_die == state["step"]:
            os.kill(os.getpid(), 9)
"""


def _program(lost: dict[int, int]) -> str:
    """Return the loop of the page, which prints the loss of all examples after each step."""
    blocks = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    loop: str = next(each for each in blocks if "Shrink" in each)
    head = f"""
import os
import h5py
import numpy as np
import mpistrat as ms
NUM_EPOCHS = {_EPOCHS}
lost = {lost}
with h5py.File("data/digits.h5") as file:
    images = file["train/image"][...].reshape(-1, 64).astype(np.float32) / 16
    labels = file["train/label"][...]
"""
    return head + loop.replace("        yield state\n", _EACH_STEP + "        yield state\n")


def record() -> dict[str, Any]:
    """Train without a disturbance; then with two ranks that are killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare = ["jobs/prepare_digits.py", "--output", str(folder / "data" / "digits.h5")]
        subprocess.run(
            [sys.executable, *prepare],
            cwd=ROOT,
            env=launch.environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        whole = _run(folder, {})
        disturbed = _run(folder, _LOST)
    if whole["digest"] != disturbed["digest"]:
        raise RuntimeError("The run that lost ranks ended with other bits.")
    return {
        "undisturbed": whole["losses"],
        "disturbed": disturbed["losses"],
        "ranks": disturbed["ranks"],
    }


def _run(folder: Path, lost: dict[int, int]) -> dict[str, Any]:
    (folder / "train.py").write_text(_program(lost))
    program, *options = mpiexec(_RANKS)
    done = subprocess.run(
        [program, *FLAG.split()[1:], *options, sys.executable, "train.py"],
        cwd=folder,
        env=launch.environment({"PYTHONPATH": os.fspath(ROOT)}),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    digests = set(re.findall(r"^digest (\w+)", done.stdout, re.MULTILINE))
    if done.returncode != 0 or len(digests) != 1:
        raise RuntimeError(f"The loop of {_PAGE.name} failed:\n{done.stdout}{done.stderr}")
    # A step that was done again after a loss counts once.
    found = {int(a): (int(b), float(c)) for a, b, c in re.findall(
        r"^loss (\d+) (\d+) (\S+)", done.stdout, re.MULTILINE)}  # fmt: skip
    steps = sorted(found)
    return {
        "digest": digests.pop(),
        "ranks": [found[step][0] for step in steps],
        "losses": [found[step][1] for step in steps],
    }


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    p = palette
    whole, disturbed, ranks = (recorded[key] for key in ("undisturbed", "disturbed", "ranks"))
    is_equal = whole == disturbed
    d = Drawing(820, 350, p, "A run that loses two of four ranks goes on, with the same losses")
    d.text(10, 26, "12 replicas on 4 ranks, of which two are killed", bold=True, size=16)
    d.text(10, 47, "the loop of \"How to resume a job\" against an undisturbed run", size=13,
           colour=p.muted)  # fmt: skip
    steps = list(range(1, len(whole) + 1))
    y = Axis(0, max(whole) * 1.05, "loss of all training examples")
    chart = Chart(d, (60, 84, 660, 296), Axis(0, len(whole), "step"), y)
    chart.frame()
    chart.curve(zip(steps, whole, strict=True), p.slate, width=7)
    points = list(zip(steps, disturbed, strict=True))
    starts = [0, *(i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1])]
    parts = zip(starts, [*starts[1:], len(points)], (p.blue, p.green, p.purple), strict=True)
    for start, end, colour in parts:
        chart.curve(points[max(start - 1, 0) : end], colour)
        chart.label(points[(start + end) // 2], f"{ranks[start]} ranks", colour, bold=True,
                    shift=(0, -14))  # fmt: skip
        if start:
            x, _ = chart.at(*points[start - 1])
            d.line([(x, chart.top), (x, chart.bottom)], colour=p.red, dashed=True)
            d.text(x + 6, chart.top + 12, f"SIGKILL after step {start}", size=13, colour=p.red)
    d.line([(690, 100), (724, 100)], colour=p.slate, width=7)
    d.text(732, 104, "undisturbed", size=13, colour=p.muted)
    d.text(690, 124, "equal in every bit" if is_equal else "not equal", size=13, colour=p.muted)
    return d.render()
