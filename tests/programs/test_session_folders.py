"""Folders that a killed mpiexec of Open MPI would leave behind: a later one would fail on them."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from mpistrat.system.processes import descendants
from mpistrat.testing import launch

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not launch.is_open_mpi(), reason="MPICH's mpiexec has no folder"),
]

PROGRAM = """
import time
from mpi4py import MPI
print("ready", flush=True)
time.sleep(60)
"""


def folder_of(pid):
    return os.path.join(tempfile.gettempdir(), f"ompi.{pid}")


def test_a_killed_program_leaves_none():
    launched = launch.Launched(["-c", PROGRAM], 2)
    launched.wait_for_output("ready")
    folder = folder_of(launched.process.pid)
    assert os.path.isdir(folder)
    launched.kill()
    assert not os.path.exists(folder)


@pytest.mark.parametrize("command", ["run", "watch"])
def test_a_killed_mpiexec_leaves_none(tmp_path, command):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "-m", "mpistrat", command, "-n", "2", "--oversubscribe", str(script)],
        stdout=subprocess.PIPE,
        env=launch.environment(),
        text=True,
    )
    try:
        while not process.stdout.readline().startswith("ready"):
            assert process.poll() is None
        mpiexec = descendants(process.pid)[1]
        folder = folder_of(mpiexec)
        assert os.path.isdir(folder)
        os.kill(mpiexec, signal.SIGKILL)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0
    assert not os.path.exists(folder)
