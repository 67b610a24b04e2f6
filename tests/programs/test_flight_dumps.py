"""Flight records of real jobs: dumped when they are wanted, and explained."""

import json
import os
import re
import signal
import time

import pytest

from mpistrat.cli import main
from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PRELUDE = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy()
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
for _ in range(3):
    strategy.reduce("sum", np.ones(2))
print("rank", rank, "is process", os.getpid(), flush=True)
"""


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "program.py"

    def run(program, ranks=3, **variables):
        script.write_text(PRELUDE + program)
        records = tmp_path / "records"
        variables = {"MPISTRAT_FLIGHT_DIR": str(records), **variables}
        return launch.run([script], ranks, 30, cwd=tmp_path, env=variables), records

    return run


def explained(records, capsys):
    code = main(["explain", "--json", str(records)])
    return code, json.loads(capsys.readouterr().out)


def line_of(program, text):
    """Return the number of the program's line that has `text` in it."""
    lines = (PRELUDE + program).split("\n")
    return next(i + 1 for i, line in enumerate(lines) if text in line)


FAULTS = {
    "another shape": "if rank == 1: strategy.reduce('sum', np.ones(5))",
    "an early end": "if rank == 1: sys.exit(0)",
    "an exception": "if rank == 1: raise ZeroDivisionError('gone')",
}


@pytest.mark.quick("another shape")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_record_of_a_failed_job_names_the_rank(job, capsys, fault):
    program = FAULTS[fault] + "\nstrategy.reduce('max', np.ones(2))\n"
    ranks = 3
    result, records = job(program, ranks)
    assert result.returncode != 0, result.stderr
    assert records.exists(), result.stderr
    assert sorted(os.listdir(records)) == [f"flight.rank{r}.json" for r in range(ranks)]
    code, found = explained(records, capsys)
    assert code == 1
    (divergence,) = found["divergences"]
    assert divergence["suspects"] == [1]
    others = divergence["groups"][0]
    assert others["ranks"] == [rank for rank in range(ranks) if rank != 1]
    assert others["site"] == f"program.py:{line_of(program, 'max')}"
    if fault == "another shape":
        assert divergence["groups"][1]["site"] == f"program.py:{line_of(program, '5')}"


def test_a_rank_that_is_elsewhere_when_the_job_ends_leaves_its_record(job, capsys):
    program = "if rank == 1:\n    time.sleep(60)\nstrategy.reduce('max', np.ones(2))\n"
    result, records = job(program, MPISTRAT_TIMEOUT_S="1")
    assert result.returncode != 0, result.stderr
    code, found = explained(records, capsys)
    assert (code, found["missing_dumps"]) == (1, [])
    (divergence,) = found["divergences"]
    assert divergence["suspects"] == [1]
    absent = divergence["groups"][1]
    assert absent["what"] == "did not come (rank 0 ends the job)"
    assert absent["site"] == f"program.py:{line_of(program, 'sleep')}"


IN_A_REPLICA = """
replicas = ms.MPIStrategy(num_replicas=5)
def fn():
    replica = ms.get_replica_context()
    replica.barrier()
    if replica.replica_id_in_sync_group == 4:
        {act}
    replica.all_reduce("max", 1.0)  # the others
replicas.run(fn)
"""
ACTS = {
    "raises": "raise ZeroDivisionError('gone')",
    "exits": "sys.exit(3)",
    "hangs": "time.sleep(60)",
}


@pytest.mark.quick("exits")
@pytest.mark.parametrize("act", ACTS)
def test_a_replica_that_fails_is_named(job, act):
    program = IN_A_REPLICA.format(act=ACTS[act])
    limit = {"MPISTRAT_TIMEOUT_S": "1"} if act == "hangs" else {}
    result, records = job(program, 2, **limit)
    assert result.returncode != 0
    where = f"program.py:{line_of(program, ACTS[act])}"
    others, own = (json.loads((records / f"flight.rank{r}.json").read_text()) for r in range(2))
    of_ranks = own["channels"][0]
    entry = others["channels"][0]["entries"][-1]
    assert (entry["kind"], entry["state"]) == ("all_reduce", "failed")
    assert entry["site"] == f"program.py:{line_of(program, 'the others')}"
    if act == "hangs":
        assert of_ranks["replica"] == "replica 4"
        assert own["stack"][-1].partition(" in ")[0].endswith(where)
        assert "replica 4 computing" in result.stderr
        return
    error = ACTS[act].removeprefix("raise ").partition("(")[0]
    error = "SystemExit" if act == "exits" else error
    assert of_ranks["last_failure"] == f"{error} at {where} in replica 4"
    named = f"after {error} at {where} in replica 4" if act == "exits" else "in replica 4 of 5"
    assert named in result.stderr


def test_a_healthy_job_leaves_nothing(job, tmp_path):
    result, records = job("strategy.reduce('max', np.ones(2))\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert os.listdir(records) == []
    assert sorted(os.listdir(tmp_path)) == ["program.py", "records"]


def test_a_failed_job_leaves_nothing_without_the_setting(job, tmp_path):
    result, _ = job("raise ValueError(rank)\n", MPISTRAT_FLIGHT_DIR="")
    assert result.returncode != 0, result.stderr
    assert os.listdir(tmp_path) == ["program.py"]


def test_a_folder_that_cannot_be_written_hides_no_error(job, tmp_path):
    (tmp_path / "file").write_text("")
    result, _ = job("raise KeyError(rank)\n", MPISTRAT_FLIGHT_DIR=str(tmp_path / "file"))
    assert "flight record cannot be written" in result.stderr
    assert "KeyError" in result.stderr


WAYS_TO_WAIT = {
    "in a round": "if rank == 1: time.sleep(60)\nstrategy.reduce('max', np.ones(2))\n",
    "inside MPI": (
        "from mpi4py import MPI\nif rank == 1: time.sleep(60)\nMPI.COMM_WORLD.Barrier()\n"
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_WAIT)
def test_a_signal_dumps_the_record_of_a_rank_that_waits(tmp_path, way):
    (tmp_path / "program.py").write_text(PRELUDE + WAYS_TO_WAIT[way])
    launched = launch.Launched([tmp_path / "program.py"], 2, cwd=tmp_path)
    try:
        launched.wait_for_output("rank 0 is process")
        launched.wait_for_output("rank 1 is process")
        time.sleep(0.5)
        file = tmp_path / "mpistrat-flight" / "flight.rank0.json"
        pid = int(re.search(r"rank 0 is process (\d+)", launched.stdout())[1])
        os.kill(pid, signal.SIGUSR2)
        end = time.monotonic() + 10
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.02)
        dump = json.loads(file.read_text())
    finally:
        launched.kill()
    last = dump["channels"][0]["entries"][-1]
    assert dump["reason"] == "signal SIGUSR2"
    assert (dump["rank"], dump["size"], dump["pid"]) == (0, 2, pid)
    assert "MPI" in dump["mpi_library"]
    if way == "in a round":
        assert last["kind"] == "reduce"
        assert last["details"][:2] == ["MAX", "float64 (2,)"]
        assert last["site"] == f"program.py:{line_of(WAYS_TO_WAIT[way], 'max')}"
        assert last["state"] == "waiting"
    else:
        assert last["state"] == "done"
        assert any("program.py" in each for each in dump["stack"])


def test_the_handler_of_the_program_is_called_too(job, tmp_path):
    program = "time.sleep(0.1)\nos.kill(os.getpid(), signal.SIGUSR2)\nprint('heard', heard)\n"
    handler = "import signal\nheard = []\nsignal.signal(signal.SIGUSR2, lambda *_: heard.append(1))"
    script = tmp_path / "program.py"
    script.write_text(handler + PRELUDE + program)
    result = launch.run([script], 2, 30, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("heard [1]") == 2


def test_ranks_are_those_of_the_world(job, capsys):
    program = """
from mpi4py import MPI
half = MPI.COMM_WORLD.Split(rank % 2)
pair = ms.MPIStrategy(half)
if rank == 2:
    pair.reduce("sum", np.ones(7))
pair.reduce("sum", np.ones(3))
"""
    result, records = job(program, 4)
    assert result.returncode != 0, result.stderr
    code, found = explained(records, capsys)
    assert code == 1
    divergence = found["divergences"][0]
    assert divergence["members"] == [[0, 0], [2, 2]]
    assert divergence["suspects"] == [0, 2]
