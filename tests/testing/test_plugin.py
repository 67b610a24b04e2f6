"""A test that hangs ends the run, and says where each rank is."""

import time

import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

CONFTEST = 'pytest_plugins = ["mpistrat.testing.plugin"]\n'
HANG = """
import time
import mpistrat as ms
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def sleep_for_ever():
    while True:
        time.sleep(1)
def wait_in_mpi():
    MPI.COMM_WORLD.Barrier()
def test_before():
    pass
def test_that_hangs_on_the_last_rank():
    if rank == size - 1:
        sleep_for_ever()
def test_that_waits():
    wait_in_mpi()
"""


def run_tests(tmp_path, *arguments, ranks, **changes):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, tmp_path]
    return launch.run(command, ranks, 60, cwd=tmp_path, env=changes)


@pytest.mark.quick("2-no")
@pytest.mark.parametrize(("ranks", "capture"), [(4, "fd"), (2, "no")])
def test_a_hanging_test_ends_with_the_stacks_of_all_ranks(tmp_path, ranks, capture):
    (tmp_path / "test_hang.py").write_text(HANG)
    options = ["--timeout=3", f"--capture={capture}"]
    began = time.monotonic()
    done = run_tests(tmp_path, *options, ranks=ranks, TMPDIR=str(tmp_path))
    assert time.monotonic() - began < 30
    assert done.returncode != 0
    assert done.stderr.count("ran over 3 s") == 1, done.stderr
    _, *parts = done.stderr.split("--- rank ")
    assert [part.split("\n")[0] for part in parts] == [f"{r} of {ranks}" for r in range(ranks)]
    for rank, part in enumerate(parts):
        place = "sleep_for_ever" if rank == ranks - 1 else "wait_in_mpi"
        assert f" in {place}\n" in part, done.stderr
    assert not list(tmp_path.glob("mpistrat-stacks-*"))


def test_a_run_without_a_hang_leaves_nothing_behind(tmp_path):
    (tmp_path / "test_quick.py").write_text("def test_quick():\n    pass\n")
    done = run_tests(tmp_path, "--timeout=30", ranks=3, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.glob("mpistrat-stacks-*"))


def test_the_limit_of_one_test_is_not_that_of_the_next(tmp_path):
    program = "import time, pytest\n@pytest.mark.parametrize('n', range(4))\n"
    program += "def test_one(n):\n    time.sleep(0.5)\n"
    (tmp_path / "test_several.py").write_text(program)
    done = run_tests(tmp_path, "--timeout=1.5", ranks=2)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_over_its_limit_shows_the_stacks_of_all_ranks(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HANG + "test_that_hangs_on_the_last_rank()\ntest_that_waits()\n")
    with pytest.raises(AssertionError, match="ran over 5 s") as caught:
        launch.run([script], 3, 5)
    text = str(caught.value)
    assert text.count(" in sleep_for_ever\n") == 1, text
    assert text.count(" in wait_in_mpi\n") == 2, text
