"""What goes wrong on one rank of a DDP program is said on all, with the lines, within seconds."""

import re
from pathlib import Path

import pytest

from mpistrat.testing import launch

pytest.importorskip("torch")

pytestmark = pytest.mark.launches

PROGRAM = Path(__file__).parent / "programs" / "ddp_fault.py"
SOURCE = PROGRAM.read_text().splitlines()


def line_of(fault, comment):
    """Return the number of the line with a comment in the branch of a fault."""
    begin = next(number for number, line in enumerate(SOURCE, 1) if f'FAULT == "{fault}"' in line)
    marked = (n for n, line in enumerate(SOURCE, 1) if n > begin and line.endswith(f"# {comment}"))
    return next(marked)


BACKWARD = next(number for number, line in enumerate(SOURCE, 1) if ".backward()" in line)


def run(fault, ranks, timeout_s=60, limit_s=60, **variables):
    variables = {"MPISTRAT_EXIT_GRACE_S": "2"} | variables
    result = launch.run(
        ["-W", "ignore", PROGRAM, fault, str(timeout_s)], ranks, limit_s, env=variables
    )
    result.said = result.stdout + result.stderr
    assert "Segmentation" not in result.said, result.said
    return result


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_call_other_collectives(ranks):
    fault = "other collective"
    result = run(fault, ranks)
    assert result.returncode
    odd, rest = line_of(fault, "ODD"), line_of(fault, "REST")
    said = " ".join(result.said.split())
    assert f"torch.broadcast(from rank 0, float32 (3,)) ddp_fault.py:{odd}" in said
    assert f'torch.all_reduce("sum", float32 (3,), in place) ddp_fault.py:{rest}' in said
    assert result.said.count("CollectiveMismatchError") == 1


@pytest.mark.parametrize("fault", ["other shape", "other shape async"])
def test_tensors_of_other_shapes(fault):
    result = run(fault, 2)
    assert result.returncode
    place = f"ddp_fault.py:{line_of(fault, 'BOTH')}"
    assert f'rank 0: torch.all_reduce("sum", float32 (3,), in place)  {place}' in result.said
    assert f'rank 1: torch.all_reduce("sum", float32 (4,), in place)  {place}' in result.said


def test_a_rank_that_skips_a_batch():
    result = run("skipped batch", 3)
    assert result.returncode
    said = " ".join(result.said.split())
    assert f'torch.all_reduce("sum", float32 (216,), in place) ddp_fault.py:{BACKWARD}' in said
    assert f"torch.barrier ddp_fault.py:{line_of('skipped batch', 'ODD')}" in said
    assert result.said.count("The ranks made different collective calls") == 1
    assert re.search(r"mpistrat: ranks 0-2 of 3 failed at ", result.said)


@pytest.mark.parametrize(
    ("fault", "error", "line"),
    [
        ("raises", "KeyError: 'no such sample'", 'raise KeyError("no such sample")'),
        ("raises in backward", "ZeroDivisionError", "lambda gradient: 1 / 0"),
    ],
)
def test_a_rank_that_raises_shows_its_traceback_for_all(fault, error, line):
    result = run(fault, 2)
    assert result.returncode
    assert re.search(r"mpistrat: rank 1 of 2 failed at ddp_fault.py:\d+:\nTraceback", result.said)
    assert error in result.said
    assert line in result.said
    # The others only wait for it, in C++ code that makes an error of its own.
    assert result.said.count("Traceback") == 1
    assert "can never complete" not in result.said


def test_a_rank_that_has_a_batch_less_and_destroys_the_group():
    fault = "destroyed too early"
    result = run(fault, 2)
    assert result.returncode
    line = line_of(fault, "ODD")
    assert f"torch.destroy_process_group ddp_fault.py:{line}" in " ".join(result.said.split())
    assert re.search(r"rank 0: torch\.\w+.* ddp_fault.py:\d+", result.said)


def test_a_rank_that_returns():
    result = run("returns", 2)
    assert result.returncode
    assert "rank 1 ended, so this collective can never complete" in result.said
    assert "rank 1: ended (left the program) at ddp_fault.py" in result.said
    assert f"  ddp_fault.py:{BACKWARD}, as collective " in result.said
    assert "merge_calls" not in result.said
    assert "works.py" not in result.said  # the frames that C++ code lists


@pytest.mark.parametrize("fault", ["killed", "recv from the dead"])
def test_a_rank_that_is_killed_ends_the_job(fault):
    result = run(fault, 3, limit_s=50)
    assert result.returncode


def test_a_time_limit_is_that_of_the_group():
    result = run("late", 2, timeout_s=2, limit_s=40)
    assert result.returncode
    said = f"Rank 1 did not come to torch.all_reduce at ddp_fault.py:{BACKWARD} within the timeout"
    assert said in result.said
    assert re.search(r"rank 1: late: computing for \d+ s, now at ddp_fault.py:\d+", result.said)


@pytest.mark.parametrize("fault", ["no destroy", "one destroys", "destroyed"])
def test_programs_that_end_well(fault):
    result = run(fault, 3)
    assert result.returncode == 0, result.said
    assert "Error" not in result.said
    assert "Abort" not in result.said


@pytest.mark.parametrize("when", ["at", "after"])
def test_an_operation_that_nobody_waits_for_is_named_at_the_end(when):
    result = run(f"async {when} the end", 2)
    line = line_of(f"async {when} the end", "REST")
    assert f"torch.all_reduce at ddp_fault.py:{line}" in result.said
    assert "for which nobody has waited" in result.said or "is dropped" in result.said
