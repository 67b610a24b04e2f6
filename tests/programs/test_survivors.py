"""Jobs that lose ranks and go on with the others (Open MPI with ULFM)."""

import os

import pytest

from tests import ROOT
from tests.programs.jobs.conftest import digits  # noqa: F401  the file that the page reads
from tests.programs.kills import digests, needs_ulfm, patient, rounds, start
from tests.programs.running import ours
from tests.test_docs import BLOCK

pytestmark = pytest.mark.launches

HEAD = "import numpy as np\nimport mpistrat as ms\nNUM_EPOCHS = 3\n"
PAGE = (ROOT / "docs" / "howto" / "resuming.md").read_text()
LOOP = HEAD + next(each for each in BLOCK.findall(PAGE) if "Shrink" in each)

STARTED = """
from mpi4py import MPI
print("started", flush=True)
"""

FAILS = """
import os, sys, threading, time
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy()
rank, size = strategy.rank, strategy.size
large = np.ones(1_000_000 if len(sys.argv) < 2 else int(sys.argv[1]), np.float32)
began = time.monotonic()
if rank == 2:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), 9)).start()
try:
    while True:
        strategy.run(lambda: ms.get_replica_context().all_reduce("sum", large))
except ms.errors.CollectiveError as error:
    assert time.monotonic() - began < 10
    print(f"rank {rank}: {error}".replace("\\n", " "), flush=True)
    time.sleep(2)  # until the others have noticed, also where cores are busy
    os._exit(0)
"""

UNWATCHED = """
import os, time
import mpistrat as ms
from mpistrat.failures.monitor import Address
watch = Address.watch
def after_the_death(address, *arguments):
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        os.kill(os.getpid(), 9)
    time.sleep(0.5)
    return watch(address, *arguments)
Address.watch = after_the_death
try:
    ms.MPIStrategy()
except ms.errors.CollectiveError as error:
    print("lost", str(error).splitlines()[0], flush=True)
    time.sleep(0.5)
    os._exit(0)
"""

GIVES_UP = """
import os, sys
from mpi4py import MPI
import mpistrat as ms
if MPI.COMM_WORLD.rank == 2:
    os.kill(os.getpid(), 9)
try:
    ms.MPIStrategy()
except ms.errors.CollectiveError:
    print("lost", flush=True)
    sys.exit(5)
"""

LEAVES = """
import sys, time
from mpi4py import MPI
import mpistrat as ms
first = ms.MPIStrategy()
first.barrier()
if first.rank == 0:
    sys.exit(0)
try:
    first.barrier()
except ms.errors.CollectiveError:
    MPI.COMM_WORLD.Revoke()
if sys.argv[1] == "waits":
    MPI.COMM_WORLD.Shrink()
elif sys.argv[1] == "ends late":
    time.sleep(1)
"""

ENDS = """
import os, sys
import numpy as np
from mpi4py import MPI
import mpistrat as ms
whole = MPI.COMM_WORLD
first = ms.MPIStrategy(ranks_per_replica=2)
if whole.rank == 3:
    os.kill(os.getpid(), 9)
try:
    while True:
        first.run(lambda: ms.get_replica_context().shards.all_reduce("sum", np.ones(1000)))
        first.barrier()
except ms.errors.CollectiveError:
    whole.Revoke()
rest = whole.Shrink()
second = ms.MPIStrategy(rest)
assert second.reduce("sum", 1) == 3
print("together", flush=True)
if sys.argv[1] == "die" and rest.rank == 1:
    os.kill(os.getpid(), 9)
if sys.argv[1] == "raise" and rest.rank == 2:
    raise ArithmeticError("later")
if sys.argv[1] == "exit":
    first.close()
    second.close()
    sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path, request):
    """A folder with the data of the page."""
    (tmp_path / "data").mkdir()
    os.symlink(request.getfixturevalue("digits"), tmp_path / "data" / "digits.h5")
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, digits):  # noqa: F811
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "data").mkdir()
    os.symlink(digits, folder / "data" / "digits.h5")
    done = start(folder, LOOP, ranks=2, is_tolerant=False).finish(60)
    first, second = digests(done)
    assert first == second
    return first


LOSSES = {
    "one": ("kill@rank=2,collective=22", 3),
    "all but one": (";".join(f"kill@rank={each},collective=12" for each in (0, 1, 3)), 1),
}


@needs_ulfm
@pytest.mark.quick("one")
@pytest.mark.parametrize("losses", LOSSES)
def test_the_loop_of_the_page_ends_with_the_same_bits(folder, undisturbed, losses):
    fault, num_left = LOSSES[losses]
    done = start(folder, LOOP, fault=fault).finish(60)
    assert digests(done) == [undisturbed] * num_left, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "MPI_ABORT" not in done.stdout + done.stderr


def test_elsewhere_the_job_ends_with_the_name_of_the_rank(folder):
    done = start(folder, LOOP, fault="kill@rank=2,collective=22", is_tolerant=False).finish(60)
    assert done.returncode != 0
    assert not digests(done)
    text = done.stdout + done.stderr
    assert "rank 2" in text.lower(), text


@needs_ulfm
@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_loss_within_the_data_names_the_rank_on_every_survivor(tmp_path, way):
    variables = {"MPISTRAT_SHARED_MIN_BYTES": str(2**40)} if way == "messages" else {}
    done = start(tmp_path, FAILS, **variables).finish(40)
    lines = [each for each in done.stdout.splitlines() if each.startswith("rank ")]
    assert len(lines) == 3, done.stdout + done.stderr
    assert all("rank 2 ended" in each and "process" in each for each in lines), lines
    assert "MPI_ABORT" not in done.stderr


@needs_ulfm
@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("exit", 3, ""),
        pytest.param("raise", 1, "ArithmeticError: later", marks=pytest.mark.slow),
        pytest.param("die", 1, "rank 1 ended, so the end of the program", marks=pytest.mark.slow),
    ],
)
def test_how_a_job_ends_that_has_lost_a_rank(tmp_path, end, code, text):
    done = start(tmp_path, ENDS, arguments=[end]).finish(40)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stderr, done.stderr
    assert ours(done.stderr).count("Traceback") == (end == "raise"), done.stderr
    assert done.stdout.count("together") == 3


@needs_ulfm
def test_a_rank_that_dies_before_it_is_watched(tmp_path):
    done = start(tmp_path, UNWATCHED, ranks=3).finish(30)
    lines = [each for each in done.stdout.splitlines() if each.startswith("lost")]
    assert len(lines) == 2, done.stdout + done.stderr
    assert all("rank 0" in each for each in lines), lines


@needs_ulfm
def test_a_program_ends_that_gives_up_without_any_strategy(tmp_path):
    done = start(tmp_path, GIVES_UP, ranks=4).finish(30)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "lost" in done.stdout  # mpiexec may end the others at the first code
    assert "Signal" not in done.stderr
    assert "while leaving" not in done.stderr


@needs_ulfm
@pytest.mark.parametrize(
    ("others", "code", "text"),
    [("waits", 1, "wait for it in Shrink()"), ("ends late", 0, "")],
)
def test_a_rank_that_leaves_while_others_shrink(tmp_path, others, code, text):
    grace = {"MPISTRAT_EXIT_GRACE_S": "3"}
    done = start(tmp_path, LEAVES, ranks=3, arguments=[others], **grace).finish(30)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stderr, done.stderr


@needs_ulfm
@patient
@pytest.mark.slow
def test_kills_at_random_moments(folder, undisturbed):
    """Run more by ``MPISTRAT_KILLS=100`` (rounds) and ``KILLS_SEED=8``, by hand."""
    for about, killed, done in rounds(lambda: start(folder, STARTED + LOOP), within_s=3):
        assert done.returncode == 0, about
        assert set(digests(done)) == {undisturbed}, about
        assert len(digests(done)) >= 4 - killed, about
