"""Elastic jobs that lose ranks and end with the bits of the undisturbed run (ULFM)."""

import os
import shutil

import pytest

from mpistrat.testing import launch
from tests import ROOT
from tests.programs.jobs.conftest import digits  # noqa: F401  the file that the program reads
from tests.programs.kills import digests, needs_ulfm, patient, rounds, start

pytestmark = [pytest.mark.launches, needs_ulfm]

PROGRAM = (ROOT / "tests" / "programs" / "elastic_training.py").read_text()

LOST = """
import os
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy(num_replicas=12, elastic=True)
rank = strategy.rank
values = strategy.run(lambda: np.zeros(2**18))
if rank == 2:
    os.kill(os.getpid(), 9)
strategy.barrier()
try:
    strategy.run(lambda value: None, args=(values,))
except ms.errors.ReplicaLostError as error:
    print("lost", str(error).replace("\\n", " "), flush=True)
"""

RAISES = """
import os, signal, sys, time
import mpistrat as ms
from mpistrat.elastic.job import ElasticJob
strategy = ms.MPIStrategy(num_replicas=4, elastic=True)
rank, where = strategy.rank, sys.argv[1]
agree, count = ElasticJob._agree, 0
def agree_late(*arguments):
    global count
    count += 1
    if count == 3 and rank == 2:
        if where == "raises before the agreement":
            raise KeyboardInterrupt("alone")
        if where == "stops before the agreement":
            os.kill(os.getpid(), signal.SIGSTOP)
    return agree(*arguments)
ElasticJob._agree = agree_late
def step(number):
    if number == 3 and rank == 2:
        if where == "raises in run":
            raise ArithmeticError("alone")
        if where == "stops in run":
            os.kill(os.getpid(), signal.SIGSTOP)
    return number
began = time.monotonic()
try:
    for number in range(9):
        strategy.reduce("sum", strategy.run(step, args=(number,)))
except BaseException as error:
    print(f"after {time.monotonic() - began:.1f} s", type(error).__name__, flush=True)
    raise
"""

ENDS = """
import atexit, os, time
from mpi4py import MPI
other = MPI.COMM_WORLD.bcast(os.getpid(), root=1)
def look():
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{other}") and time.monotonic() < until:
        time.sleep(0.1)
    print("rank 1 waits" if os.path.exists(f"/proc/{other}") else "rank 1 has gone", flush=True)
if MPI.COMM_WORLD.rank == 0:
    atexit.register(look)  # called after what the package does at the end
import mpistrat as ms
strategy = ms.MPIStrategy(num_replicas=4, elastic=True)
strategy.run(lambda: 1)
"""

ALONE = """
import mpistrat as ms
try:
    ms.MPIStrategy(num_replicas=12, elastic=True)
except ms.errors.LaunchError as error:
    print("refused", error)
"""


@pytest.fixture
def folder(tmp_path, digits):  # noqa: F811
    (tmp_path / "data").mkdir()
    os.symlink(digits, tmp_path / "data" / "digits.h5")
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, digits):  # noqa: F811
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "data").mkdir()
    os.symlink(digits, folder / "data" / "digits.h5")
    done = start(folder, PROGRAM, ranks=2, is_tolerant=False).finish(60)
    found = digests(done)
    assert len(found) == 2, done.stdout + done.stderr
    assert found[0] == found[1]
    return found[0]


PLACES = {
    "before an agreement": ("2,agree,30", []),
    "after an agreement": ("0,after agree,30", []),
    "with data of a function": ("1,agree,35", ["function"]),
    "in the constructor": ("1,agree,1", []),
    "in the first step": ("3,agree,13", []),
    "at the end": ("0,end,0", []),
    "in close": ("1,,0", ["closes"]),
}


@pytest.mark.quick("before an agreement")
@pytest.mark.parametrize("place", PLACES)
def test_where_a_rank_dies(folder, undisturbed, place):
    victim, arguments = PLACES[place]
    done = start(folder, PROGRAM, arguments=["elastic", *arguments], VICTIM=victim).finish(60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(digests(done)) == {undisturbed}, done.stdout + done.stderr
    assert done.stdout.count("done") == 3, done.stdout
    is_late = place in ("at the end", "in close")
    assert done.stderr.count("continue as 3") == (not is_late), done.stderr


def test_a_death_within_the_recovery(folder, undisturbed):
    fault = "kill@rank=2,collective=60"
    victim = {"VICTIM": "1,shrink,1"}
    done = start(folder, PROGRAM, arguments=["elastic"], fault=fault, **victim).finish(60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(done) == [undisturbed] * 2, done.stdout + done.stderr
    assert "continue as 2" in done.stderr


IN_A_SAVE = {
    "before the file": ("0,write,1", "waits", "first"),
    "before its name": ("0,rename,1", "leaves", "first"),
    "after its name": ("0,after rename,1", "waits", ""),
    "in the last file": ("0,write,2", "waits", "second"),
    "in the end": ("0,rename,2", "leaves", "second"),
    "another rank": ("1,agree,25", "waits", ""),
}


@pytest.mark.quick("before its name")
@pytest.mark.parametrize("place", IN_A_SAVE)
def test_a_death_while_a_file_is_written(folder, undisturbed, place):
    victim, ends, dropped = IN_A_SAVE[place]
    arguments = ["elastic", "asynchronous", "slow", ends]
    done = start(folder, PROGRAM, arguments=arguments, VICTIM=victim).finish(60)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert set(digests(done)) == {undisturbed}, text
    assert set(done.stdout.split("\n")) >= {"done"}, text
    first, second = _saved(done)
    files = {"first": [second], "second": [first], "": [first, second]}[dropped]
    assert sorted(os.listdir(folder / "runs" / "elastic")) == sorted(files), text
    assert done.stderr.count("is dropped: rank 0 of 4") == bool(dropped), text
    if ends == "waits":
        assert "kept " + " ".join(files) in done.stdout, text
    _check_sound(folder)


def _saved(done):
    """Return the names of the files, in order."""
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("saved")]
    return sorted(set(lines), key=lambda name: int(name.split("-")[1].split(".")[0]))


def _check_sound(folder):
    for path in (folder / "runs" / "elastic").glob("*.h5"):
        checked = launch.run(["-m", "mpistrat", "verify", path], cwd=folder)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert f"{path.name}: ok" in checked.stdout


FAILURES = {
    "raises in run": (4, "ArithmeticError: alone", "rank 2 of 4 failed"),
    "raises before the agreement": (4, "KeyboardInterrupt: alone", "rank 2 of 4 failed"),
    "stops in run": (3, "rank 2: stopped", "suspended (SIGSTOP)"),
    "stops before the agreement": (3, "rank 2: stopped", "suspended (SIGSTOP)"),
}


@pytest.mark.parametrize(
    "where",
    [
        "raises in run",
        "stops before the agreement",
        pytest.param("raises before the agreement", marks=pytest.mark.slow),
        pytest.param("stops in run", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_alone_ends_the_job(tmp_path, where):
    """Elastic is for lost processes: here none is lost."""
    num_ended, *texts = FAILURES[where]
    limits = {"MPISTRAT_TIMEOUT_S": "4", "MPISTRAT_EXIT_GRACE_S": "3"}
    done = start(tmp_path, RAISES, arguments=[where], **limits).finish(40)
    assert done.returncode != 0, done.stdout + done.stderr
    times = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("after")]
    assert len(times) == num_ended, done.stdout + done.stderr
    assert all(float(each) < 12 for each in times), times
    for text in texts:
        assert text in done.stderr, done.stderr


def test_what_was_lost_is_said(tmp_path):
    done = start(tmp_path, LOST).finish(40)
    lines = [each for each in done.stdout.splitlines() if each.startswith("lost")]
    assert lines, done.stdout + done.stderr
    assert all("1 MiB per replica" in each for each in lines)


def test_the_end_of_mpi_waits_for_no_other_rank(tmp_path):
    # One that is killed in MPI_Finalize may keep the others there.
    done = start(tmp_path, ENDS, ranks=2).finish(40)
    assert "rank 1 has gone" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_elsewhere_it_says_how_to_start(tmp_path):
    done = start(tmp_path, ALONE, is_tolerant=False).finish(40)
    assert done.stdout.count("refused") == 4, done.stdout + done.stderr
    assert "mpiexec --with-ft ulfm" in done.stdout


@patient
@pytest.mark.slow
@pytest.mark.parametrize("way", [["function"], ["asynchronous"], ["asynchronous", "slow"]])
def test_kills_at_random_moments(folder, undisturbed, way):
    """Run more by ``MPISTRAT_KILLS=100`` (rounds) and ``KILLS_SEED=8``, by hand."""

    def launch():
        shutil.rmtree(folder / "runs", ignore_errors=True)
        return start(folder, PROGRAM, arguments=["elastic", *way])

    for about, killed, done in rounds(launch, within_s=2):
        assert done.returncode == 0 or "ReplicaLostError" in done.stderr, about
        assert set(digests(done)) <= {undisturbed}, about
        assert len(digests(done)) >= 4 - killed or done.returncode, about
        assert done.stderr.count("is dropped") <= killed, about
        _check_sound(folder)
