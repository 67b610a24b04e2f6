"""How many lines of a training script change, as docs/coming-from/pytorch.md says."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.testing import launch
from tests import ROOT

PROGRAMS = Path(__file__).parent / "programs" / "changed_lines"
VERSIONS = {
    "one process": "one_process.py",
    "DDP over gloo": "ddp_gloo.py",
    "DDP over mpistrat": "ddp_mpi.py",
    "Horovod": "with_horovod.py",
}
PAGE = ROOT / "docs" / "coming-from" / "pytorch.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def lines_of(version):
    """Return the lines of a version without its docstring and empty ones."""
    code = (PROGRAMS / VERSIONS[version]).read_text().splitlines()[1:]
    return [line for line in code if line.strip()]


def changes(before, after):
    """Return how many lines are added and removed."""
    marks = [line[0] for line in difflib.ndiff(lines_of(before), lines_of(after))]
    return marks.count("+"), marks.count("-")


def test_the_table_counts_what_changes():
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) == 5
    for before, after, added, removed in rows:
        assert (int(added), int(removed)) == changes(before, after), (before, after)


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_versions_train_alike(tmp_path):
    over_mpi = launch.run([PROGRAMS / "ddp_mpi.py"], 2, 120, cwd=tmp_path)
    assert over_mpi.returncode == 0, over_mpi.stderr
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    for _ in range(3):
        over_gloo = subprocess.run(
            [sys.executable, *torchrun, PROGRAMS / "ddp_gloo.py"],
            cwd=tmp_path,
            env=launch.environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=150,
        )
        # gloo's threads abort the process now and then while it ends, all work done.
        if "terminate called without an active exception" not in over_gloo.stderr:
            break
    assert over_gloo.returncode == 0, over_gloo.stderr
    assert over_mpi.stdout == over_gloo.stdout
    assert over_mpi.stdout.count("epoch") == 3
    assert (tmp_path / "model.pt").exists()
