"""One mistake, two programs: mpi4py alone hangs, mpistrat names the ranks and their lines."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch
from tools.house import ROOT
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing
from tools.pictures.terminal import height_of, terminal, wrap

__all__ = ["draw", "draw_narrow", "record"]

_PROGRAMS = Path(__file__).parent / "programs"
_PLAIN, _OURS = "evaluate_mpi4py.py", "evaluate_mpistrat.py"
_LIMIT_S = 30
_COLUMNS = 104
_NARROW_COLUMNS = 42
"""Of a terminal in the picture for phones."""
_MARKS = (
    (r"mpistrat\.errors\.\w+", "red"),
    (r"rank \d:", "orange"),
    (r"evaluate_mpistrat\.py:\d+", "blue"),
    (r"^\$ .*", "green"),
    (r"^# .*", "muted"),
)


def record() -> dict[str, Any]:
    """Run both programs on two ranks."""
    began = time.monotonic()
    limit = ["timeout", "--kill-after=5", str(_LIMIT_S)]
    plain = subprocess.Popen(
        [*limit, *mpiexec(2), sys.executable, _PLAIN],
        cwd=_PROGRAMS,
        env=launch.environment({"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed, _ = plain.communicate()
    # What mpiexec says about being killed is not the program's.
    said = [line for line in printed.splitlines() if line.startswith("loss")]
    took_s = time.monotonic() - began
    ours = launch.run([_OURS], 2, 60, cwd=_PROGRAMS, env={"PYTHONPATH": str(ROOT)})
    text = (ours.stdout + ours.stderr).replace(f"{_PROGRAMS}/", "").strip()
    return {
        "plain": {"exit": plain.returncode, "seconds": round(took_s), "lines": said},
        "mpistrat": {"exit": ours.returncode, "lines": text.splitlines()},
    }


_TITLE = "mpi4py hangs; mpistrat names the ranks and lines"


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    titles = ("mpi4py: rank 0 makes a collective call that rank 1 does not", _SAME)
    return _terminals(palette, 840, titles, *_texts(recorded, _COLUMNS))


def draw_narrow(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture for a phone, with wrapped lines."""
    above, below = _texts(recorded, _NARROW_COLUMNS)
    titles = ("mpi4py: only rank 0 calls Allreduce", _SAME)
    return _terminals(palette, 360, titles, wrap(above, _NARROW_COLUMNS), below)


_SAME = "mpistrat: the same mistake"


def _texts(recorded: dict[str, Any], columns: int) -> tuple[list[str], list[str]]:
    """Return what the two terminals show."""
    plain, ours = recorded["plain"], recorded["mpistrat"]
    program = (_PROGRAMS / _PLAIN).read_text().splitlines()
    above = [
        f"$ tail -n 4 {_PLAIN}",
        *program[-4:],
        f"$ timeout {plain['seconds']} mpiexec -n 2 python {_PLAIN}",
        *plain["lines"],
        f"# {'nothing' if not plain['lines'] else 'no more'} for {plain['seconds']} s, "
        f"until timeout kills it: exit code {plain['exit']}",
    ]
    below = [f"$ mpiexec -n 2 python {_OURS}", *ours["lines"]]
    return above, wrap(below, columns)


def _terminals(
    palette: Palette, width: int, titles: tuple[str, str], above: list[str], below: list[str]
) -> str:
    gap = 18
    height = height_of(len(above)) + gap + height_of(len(below)) + 2
    d = Drawing(width, round(height), palette, _TITLE)
    terminal(d, 1, titles[0], above, _MARKS)
    terminal(d, 1 + height_of(len(above)) + gap, titles[1], below, _MARKS)
    return d.render()
