"""Programs that a rank starts: they are no ranks, and an error says what to do."""

import sys

import pytest

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.system.processes import Program
from mpistrat.testing import launch
from tests.programs.running import ours

pytestmark = pytest.mark.launches

PROGRAM = """
import multiprocessing, os, re, subprocess, sys
import {module}
CHILD = "import mpistrat as ms; s = ms.MPIStrategy(device='cpu'); print('child', s.rank, s.size)"
def make_strategy(queue):
    import mpistrat as ms
    try:
        queue.put(str(ms.MPIStrategy(device="cpu").size))
    except Exception as error:
        queue.put(f"{{type(error).__name__}}: {{error}}")
if __name__ == "__main__":
    {start}
    command = [sys.executable, "-c", CHILD]
    if "{way}" == "shell":
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    if "{way}" == "spawn":
        spawned = multiprocessing.get_context("spawn")
        queue = spawned.SimpleQueue()
        process = spawned.Process(target=make_strategy, args=(queue,))
        process.start()
        text = queue.get()
        process.join()
    else:
        text = subprocess.run(command, capture_output=True, text=True).stderr
    assert "LaunchError" in text and "inherited the environment of an MPI rank" in text, text
    names = re.findall(r"-u (\\w+)", text)
    assert names, text
    variables = {{name: text for name, text in os.environ.items() if name not in names}}
    done = subprocess.run([sys.executable, "-c", CHILD], env=variables, capture_output=True)
    assert b"child 0 1" in done.stdout, (done.stdout, done.stderr)
    print("held")
"""

STRATEGY = "strategy = mpistrat.MPIStrategy(device='cpu')"


@pytest.mark.quick("subprocess")
@pytest.mark.parametrize("way", ["subprocess", "shell", "spawn"])
def test_each_rank_starts_one(tmp_path, way):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(module="mpistrat", start=STRATEGY, way=way))
    done = launch.run([script], 2, 50)
    assert (done.returncode, ours(done.stderr)) == (0, "")
    assert done.stdout.count("held") == 2


def test_a_rank_that_uses_mpi4py_only(tmp_path):
    script = tmp_path / "program.py"
    text = PROGRAM.format(module="mpi4py.MPI", start="", way="subprocess")
    script.write_text(text)
    done = launch.run([script], 2, 50)
    assert (done.returncode, ours(done.stderr)) == (0, "")
    assert done.stdout.count("held") == 2


def test_a_script_around_a_rank_is_no_rank(tmp_path):
    program = "import mpistrat as ms; print('size', ms.MPIStrategy(device='cpu').size)"
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    command = [*mpiexec(2), *shell, sys.executable, "-c", program]
    running = Program(command, launch.environment({}))
    try:
        assert running.wait(40) == 0
    finally:
        running.kill()
    assert running.stdout().count("size 2") == 2
