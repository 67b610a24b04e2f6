"""Ranks that raise, leave or are killed: the job ends at once, and says who and where."""

import time

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours, squeezed

pytestmark = pytest.mark.launches


def fail(tmp_path, program, ranks=3, limit_s=20, **variables):
    """Run `program` and return its standard error, once it has failed as every failure should."""
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + program)
    began = time.monotonic()
    result = launch.run([script], ranks, limit_s, env=variables)
    assert result.returncode != 0, result.stdout
    assert time.monotonic() - began < limit_s
    text = ours(result.stderr)
    assert text.count("\n") < 40, result.stderr
    assert text.count("Traceback") == 1, result.stderr
    return squeezed(text)


@pytest.mark.quick
def test_the_same_exception_on_all_ranks_is_one_message(tmp_path):
    text = fail(tmp_path, 'raise ValueError(f"bad file, says rank {rank} of {size}")')
    assert "ranks 0-2 of 3 failed at program.py:" in text
    assert text.endswith("ValueError: bad file, says rank 0 of 3")


def test_different_exceptions_are_summed_up(tmp_path):
    text = fail(tmp_path, 'open("nowhere") if rank else int("x")')
    assert "rank 0 of 3 failed" in text
    assert "ranks 1-2 failed at program.py:10: FileNotFoundError" in text


def test_the_others_are_busy_elsewhere(tmp_path):
    text = fail(
        tmp_path,
        'if rank == 1:\n    raise KeyError("early")\ntime.sleep(60)',
        MPISTRAT_EXIT_GRACE_S="1",
    )
    assert "rank 1 of 3 failed at program.py:11:" in text


def test_a_healthy_program_ends_quietly_also_when_ranks_end_at_different_times(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + 'strategy.reduce("sum", 1)\ntime.sleep(rank)\nprint("done")')
    result = launch.run([script], 3, 30)
    assert result.returncode == 0
    assert result.stdout.split() == ["done"] * 3
    assert result.stderr == ""


def test_a_strategy_survives_what_all_ranks_catch(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        PRELUDE
        + """
def step():
    raise ZeroDivisionError
for _ in range(3):
    try:
        strategy.run(step)
    except ZeroDivisionError:
        pass
assert strategy.reduce("sum", 1) == size
"""
    )
    result = launch.run([script], 3, 30)
    assert (result.returncode, result.stderr) == (0, "")


LEAVE = """
import os, sys, time
{imports}
import mpistrat as ms
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
if rank == 1:
    time.sleep({leaves_at})
    sys.exit()
time.sleep({comes_at})
ms.MPIStrategy()
"""


@pytest.mark.quick("leaves_at=0")
@pytest.mark.parametrize("imports", ["", "from mpi4py import MPI"])
@pytest.mark.parametrize(("leaves_at", "comes_at"), [(0, 2), (2, 0)], ids=["leaves_at=0", "later"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_leaves_before_its_first_strategy(
    tmp_path, ranks, leaves_at, comes_at, imports
):
    script = tmp_path / "program.py"
    script.write_text(LEAVE.format(imports=imports, leaves_at=leaves_at, comes_at=comes_at))
    result = launch.run([script], ranks, 30)
    text = squeezed(ours(result.stderr))
    assert result.returncode != 0
    assert text.count("Traceback") == 1, text
    assert "CollectiveError: rank 1 ended" in text
    assert "rank 1: ended (left the program) at program.py" in text
    assert "MPIStrategy(begins) program.py:10" in text


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "program",
    [
        "import mpistrat",
        "from mpi4py import MPI\nimport mpistrat\nMPI.Finalize()",
        # Only some ranks make strategies, and they end at other times than the rest.
        """
import sys, time
from mpi4py import MPI
import mpistrat as ms
comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < 2, 0)
if MPI.COMM_WORLD.rank < 2:
    strategy = ms.MPIStrategy(comm)
    time.sleep(1)
    strategy.reduce("sum", 1)
""",
    ],
    ids=["no MPI", "finalized", "some ranks"],
)
def test_ranks_without_a_strategy_end_quietly(tmp_path, program, ranks):
    began = time.monotonic()
    result = launch.run(["-c", program], ranks, 30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert time.monotonic() - began < 15


BEFORE = """
import os, sys, time
import mpistrat as ms
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
"""


@pytest.mark.quick('raise KeyError("early")')
@pytest.mark.parametrize(
    "failure",
    [
        'raise KeyError("early")',
        "from mpi4py import MPI; MPI.COMM_WORLD.rank / 0",
        'os.environ["MPISTRAT_TIMEOUT_S"] = "soon"; ms.MPIStrategy()',
        "ms.MPIStrategy(comm=3)",
        'ms.MPIStrategy(device="tpu")',
    ],
)
def test_a_rank_that_fails_before_or_while_it_makes_the_first_strategy(tmp_path, failure):
    script = tmp_path / "program.py"
    script.write_text(BEFORE + f"if rank == 1:\n    {failure}\nms.MPIStrategy()\ntime.sleep(0.1)\n")
    result = launch.run([script], 2, 20)
    assert result.returncode != 0
    assert result.stderr.count("Traceback") == 1, result.stderr
    if "PMI" in result.stderr or (launch.is_open_mpi() and "early" in failure):
        return  # without MPI, a rank of Open MPI is ended by its launcher
    assert "rank 1 of 2 failed at program.py:6:" in result.stderr


def test_ranks_are_those_of_the_largest_group(tmp_path):
    text = fail(
        tmp_path,
        """
from mpi4py import MPI
ms.MPIStrategy(MPI.COMM_SELF)
if rank == 1:
    raise KeyError("here")
strategy.reduce("sum", 1)
""",
    )
    assert "rank 1 of 3 failed at program.py:14:" in text


def test_an_interrupted_wait_that_is_caught_ends_the_job_all_the_same(tmp_path):
    text = fail(
        tmp_path,
        """
import signal
def ring(*_):
    raise InterruptedError("alarm")
if rank == 0:
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        strategy.reduce("sum", 1)
    except InterruptedError:
        pass
    strategy.reduce("sum", 1)
else:
    time.sleep(1)
    strategy.reduce("sum", 1)
""",
        MPISTRAT_EXIT_GRACE_S="1",
    )
    assert "CollectiveError: The wait for reduce at program.py:18 was interrupted" in text


def test_leaving_inside_run_names_the_line(tmp_path):
    text = fail(
        tmp_path,
        """
def step():
    if rank == 1:
        sys.exit()
    return all_reduce(1)
strategy.run(step)
""",
    )
    assert (
        "rank 1: ended (left the program) at program.py, after SystemExit at program.py:13" in text
    )


def test_dropped_handles_touch_no_memory_that_is_used_again(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        PRELUDE
        + """
def drop():
    for _ in range(3):
        ms.get_replica_context().start_all_reduce("sum", np.ones(2_000_000))
try:
    strategy.run(drop)
except ms.errors.CollectiveError as error:
    assert "dropped without wait()" in str(error)
junk = [np.full(2_000_000, 7.0) for _ in range(5)]
time.sleep(0.5)
assert all((each == 7).all() for each in junk)
print("done")
raise KeyError("after")
"""
    )
    result = launch.run([script], 3, 60)
    assert result.stdout.split() == ["done"] * 3, result.stderr
    assert result.stderr.count("dropped without wait()") >= 1
    assert result.returncode != 0
    assert "KeyError: 'after'" in result.stderr


def test_the_limit_holds_for_the_first_strategy_too(tmp_path):
    script = tmp_path / "program.py"
    # MPI itself starts on all ranks together, and no limit can end that.
    script.write_text(
        BEFORE + "from mpi4py import MPI\nif rank == 1:\n    time.sleep(30)\nms.MPIStrategy()\n"
    )
    changes = {"MPISTRAT_TIMEOUT_S": "1", "MPISTRAT_EXIT_GRACE_S": "1"}
    result = launch.run([script], 3, 20, env=changes)
    assert result.returncode != 0
    assert (
        "CollectiveTimeoutError: Some ranks did not come to MPIStrategy() within 1 s"
        in result.stderr
    )


def end(tmp_path, program, **variables):
    """Run `program`, whose errors it catches itself, on 3 ranks, and return its standard error."""
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + program)
    variables = {"MPISTRAT_EXIT_GRACE_S": "1", "MPISTRAT_TIMEOUT_S": "2"} | variables
    result = launch.run([script], 3, 30, env=variables)
    assert result.returncode != 0, result.stdout
    return ours(result.stderr)


@pytest.mark.quick("on")
@pytest.mark.parametrize("watch", ["on", "off"])
def test_who_catches_the_timeout_and_leaves_ends_the_job(tmp_path, watch):
    text = end(
        tmp_path,
        """
if rank == 1:
    time.sleep(60)
try:
    strategy.reduce("sum", 1)
except ms.errors.CollectiveTimeoutError:
    sys.exit(3)
""",
        MPISTRAT_WATCH=watch,
    )
    missing = "Rank 1" if watch == "on" else "Some ranks"
    assert text == (
        "mpistrat: rank 0 left the program and ends the job, because of an earlier error. "
        f"{missing} did not come to reduce at program.py:14 within the timeout of 2 s, as rank 0 "
        "of 3 did"
    )


@pytest.mark.parametrize("come", [True, False])
def test_a_rank_fails_while_a_thread_of_it_is_in_a_collective(tmp_path, come):
    text = fail(
        tmp_path,
        f"""
import threading
if rank == 1:
    threading.Thread(target=strategy.reduce, args=("sum", 1), daemon=True).start()
    time.sleep(0.5)
    raise RuntimeError("main thread")
time.sleep(2 if {come} else 60)
strategy.reduce("sum", 1)
""",
        MPISTRAT_EXIT_GRACE_S="6" if come else "1",
    )
    assert text.startswith("mpistrat: rank 1 of 3 failed at program.py:15:")
    assert text.endswith("RuntimeError: main thread")


def test_an_error_without_text_is_reported_too(tmp_path):
    text = fail(
        tmp_path,
        """
class Wordless(Exception):
    def __str__(self):
        raise ValueError("none")
if rank == 1:
    raise Wordless
strategy.reduce("sum", 1)
""",
    )
    assert text.startswith("mpistrat: rank 1 of 3 failed at program.py:15:")
    assert text.endswith("Wordless: <exception str() failed>")


@pytest.mark.quick("MPI.COMM_SELF")
@pytest.mark.parametrize("group", ["MPI.COMM_WORLD.Split(rank % 2)", "MPI.COMM_SELF"])
def test_a_failure_in_a_part_of_the_job_ends_all_of_it(tmp_path, group):
    script = tmp_path / "program.py"
    script.write_text(
        f"""
import time
import mpistrat as ms
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
part = ms.MPIStrategy({group})
part.reduce("sum", 1)
if rank == 2:
    raise KeyError("here")
while rank != 2:
    part.reduce("sum", 1)
    time.sleep(0.05)
"""
    )
    result = launch.run([script], 3, 20)
    assert result.returncode != 0, result.stdout
    text = ours(result.stderr)
    size, among = (1, "rank 2") if "SELF" in group else (2, "ranks 0, 2")
    assert text.startswith(
        f"mpistrat: rank {size - 1} of {size} (among {among} of the job) failed at program.py:9:"
    )
    assert text.count("Traceback") == 1


def test_a_long_message_hides_neither_its_class_nor_its_place(tmp_path):
    text = fail(tmp_path, 'raise ValueError("first " + "x" * 5000 + "\\n" * 200 + "last")')
    assert "failed at program.py:10:" in text
    assert "\nValueError: first xxx" in text
    assert text.endswith("\nlast")
    assert len(text) < 4000


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_strategy_after_mpi_is_finalized(tmp_path, ranks):
    program = """
from mpi4py import MPI
import mpistrat as ms
MPI.Finalize()
try:
    ms.MPIStrategy()
except ms.errors.LaunchError as error:
    assert "MPI.Finalize()" in str(error)
else:
    raise SystemExit(3)
"""
    result = launch.run(["-c", program], ranks, 30)
    assert (result.returncode, result.stderr) == (0, "")
