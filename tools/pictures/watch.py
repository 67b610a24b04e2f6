"""A plain mpi4py program that hangs, and the report of ``mpistrat watch``."""

from pathlib import Path
from typing import Any

from mpistrat.testing import launch
from tools.house import ROOT
from tools.pictures.palette import Palette
from tools.pictures.svg import Drawing
from tools.pictures.terminal import height_of, terminal, wrap

__all__ = ["draw", "record"]

_PROGRAMS = Path(__file__).parent / "programs"
_PROGRAM = "solver.py"
_COLUMNS = 104
_MARKS = (
    (r"cause: [a-z ]+:", "red"),
    (r"ranks? [\d, -]+\d:", "orange"),
    (r"solver\.py:\d+", "blue"),
    (r"<- odd", "red"),
    (r"^\$ .*", "green"),
)


def record() -> dict[str, Any]:
    """Run the program on four ranks under the watch."""
    command = ["watch", "-n", "4", "--oversubscribe", "--after", "5", _PROGRAM]
    done = launch.run(
        ["-m", "mpistrat", *command], None, 100, cwd=_PROGRAMS, env={"PYTHONPATH": str(ROOT)}
    )
    return {"exit": done.returncode, "lines": done.stderr.strip().splitlines()}


def draw(palette: Palette, recorded: dict[str, Any]) -> str:
    """Return the picture."""
    program = (_PROGRAMS / _PROGRAM).read_text().splitlines()
    lines = [
        f"$ tail -n 7 {_PROGRAM}",
        *program[-7:],
        f"$ mpistrat watch -n 4 --after 5 {_PROGRAM}",
        *wrap(recorded["lines"], _COLUMNS),
    ]
    d = Drawing(840, round(height_of(len(lines)) + 2), palette, "mpistrat watch names the rank")
    terminal(d, 1, "plain mpi4py: one rank leaves the loop too early", lines, _MARKS)
    return d.render()
