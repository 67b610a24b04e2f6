"""Programs that hang: the report names the right ranks, lines and cause, and ends the job.

Each program says in its first line what is expected, and marks the lines at which ranks hang. The
expectations are functions of the number of ranks.
"""

import json
import os
import re
import time
from pathlib import Path

import pytest

from mpistrat.system.processes import descendants
from mpistrat.testing.launch import is_open_mpi, run

PROGRAMS = sorted(Path(__file__).parent.glob("programs/*.py"))
QUICK = ("other_order",)
IN_CI = ("endless_loop", "pickled_allreduce", "receive_without_send", "stopped")

MARGIN_S = 8.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.0
"""For the start of Python in this test, and for the tests beside it."""

pytestmark = pytest.mark.launches


def expected(program):
    """Return the first line of a program as a dictionary."""
    first = program.read_text().partition("\n")[0].removeprefix("# ")
    return dict(each.split(": ", 1) for each in first.split("; "))


def cases():
    for program in PROGRAMS:
        sizes = [int(each) for each in expected(program).get("sizes", "2, 3").split(",")]
        for size in sizes:
            is_short = size == sizes[-1] and program.stem in (*QUICK, *IN_CI)
            marks = [] if is_short else [pytest.mark.campaign]
            if program.stem in QUICK and is_short:
                marks.append(pytest.mark.quick)
            yield pytest.param(program, size, id=f"{program.stem}-{size}", marks=marks)


def lines_of(program, size):
    """Return the lines at which each rank may be in the report."""
    found = {}
    for number, line in enumerate(program.read_text().splitlines(), 1):
        if mark := re.search(r"# at: (.*)", line):
            for rank in eval(mark[1], {"size": size}):
                found.setdefault(rank, set()).add(number)
    return {rank: lines for rank, lines in found.items() if rank < size}


def watch(*arguments, limit_s=170, env=None):
    done = run(["-m", "mpistrat", "watch", "--oversubscribe", *arguments], limit_s=limit_s, env=env)
    assert descendants(os.getpid()) == [os.getpid()]
    return done


@pytest.mark.parametrize(("program", "size"), list(cases()))
def test_the_report_names_ranks_and_lines(program, size, tmp_path):
    wanted = expected(program)
    if program.stem in wanted.get("not on", "") and is_open_mpi():
        pytest.skip("the library behaves differently")
    file = tmp_path / "report.json"
    kinds = wanted["kind"].split(", ")
    # On a loaded machine a rank may need many seconds to import what it needs.
    limit_s = 10 if {"busy", "polling"} & set(kinds) else 100
    limits = ["--after", "2", "--busy-after", str(limit_s), "--json", str(file)]
    done = watch("-n", str(size), *limits, str(program))
    late_s = time.time() - file.stat().st_mtime
    report = json.loads(file.read_text())
    if report["ended"]:
        limit_s = limit_s if report["kind"] in ("busy", "polling") else 2
        assert report["waited_s"] - limit_s + late_s < 5 + MARGIN_S
    assert report["kind"] in kinds
    assert report["odd"] == list(eval(wanted["odd"], {"size": size}))
    where = {rank: group["line"] for group in report["groups"] for rank in group["ranks"]}
    assert sorted(where) == list(range(size))
    for rank, lines in lines_of(program, size).items():
        assert where[rank] in lines, rank
    assert len(done.stderr[done.stderr.index("mpistrat watch:") :].splitlines()) <= 40
    if report["kind"] == "died":
        assert done.returncode not in (0, 86)
    else:
        assert done.returncode == 86
        assert "the job is ended with exit code 86." in done.stderr


def test_report_only_leaves_the_job_alone(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        "import time\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 0:\n    time.sleep(8)\n"
        "MPI.COMM_WORLD.Barrier()\nprint('done')\n"
    )
    options = ["--after", "1", "--busy-after", "2", "--report-only"]
    done = watch("-n", "2", *options, str(program))
    assert done.returncode == 0
    assert done.stdout.count("done") == 2
    assert done.stderr.count("no progress") == 1
    assert "ended" not in done.stderr
