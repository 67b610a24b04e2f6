"""Timelines of real jobs."""

import json
import os

import pytest

from mpistrat.cli import main
from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PRELUDE = """
import os, sys, time
variables = os.environ
rank = int(variables.get("PMI_RANK", variables.get("OMPI_COMM_WORLD_RANK", 0)))
"""

PROGRAM = """
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy()
with strategy.scope():
    weight = ms.Variable(np.zeros(1000, np.float32), name="w")
    optimizer = ms.optimizers.SGD(learning_rate=0.1)
dataset = ms.data.Dataset.from_arrays(np.arange(80.0)).batch(10)
def step(x):
    time.sleep(DELAY_S)
    optimizer.apply_gradients([(np.ones(1000, np.float32), weight)])
    ms.get_replica_context().merge_call(lambda strategy: None)
for x in strategy.experimental_distribute_dataset(dataset):
    strategy.run(step, args=(x,))
"""

CHECKPOINT = """
ms.Checkpoint(weight=weight, optimizer=optimizer).write("run.h5")
"""


@pytest.fixture
def run(tmp_path):
    def go(program, ranks=3, timeline="trace.json"):
        script = tmp_path / "program.py"
        script.write_text(PRELUDE + program)
        variables = {"MPISTRAT_TIMELINE": timeline} if timeline else {}
        result = launch.run([script], ranks, 40, cwd=tmp_path, env=variables)
        return result, tmp_path / "trace.json"

    return go


def spans_of(trace, category):
    """Return the spans of `category` of each rank, in order."""
    found = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == category:
            found.setdefault(event["pid"], []).append(event)
    return found


@pytest.mark.quick("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_named(run, capsys, ranks):
    slow = ranks - 1
    result, file = run(f"DELAY_S = 0.05 if rank == {slow} else 0\n" + PROGRAM + CHECKPOINT, ranks)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(os.listdir(file.parent)) == ["program.py", "run.h5", "trace.json"]
    trace = json.loads(file.read_text())
    for category in ("run", "merge_call", "optimizer"):
        assert {r: len(each) for r, each in spans_of(trace, category).items()} == dict.fromkeys(
            range(ranks), 8
        )
    for category in ("data", "checkpoint", "collective"):
        assert sorted(spans_of(trace, category)) == list(range(ranks))
    (sums,) = {
        tuple(e["args"].get("bytes") for e in each if e["name"] == "SGD.apply_gradients")
        for each in spans_of(trace, "collective").values()
    }
    assert sums.count(4000) == 8
    assert main(["timeline", "--json", str(file)]) == 0
    straggler = json.loads(capsys.readouterr().out)["straggler"]
    assert straggler["rank"] == slow
    assert straggler["cause"] == "computing"
    # Eight times the others were ready while it slept, and they hardly more than that.
    assert straggler["longer_s"] == pytest.approx(8 * 0.05, rel=0.5)
    assert straggler["others_waited_s"] > (ranks - 1) * 8 * 0.05 * 0.7


FOREIGN_CLOCK = """
real = time.monotonic_ns
if rank == 1:
    time.monotonic_ns = lambda: round(real() * 1.00001) + 5_000_000_000
import mpistrat.tracing.trace
mpistrat.tracing.trace._clock = lambda: f"node {rank}"
DELAY_S = 0.01 * rank
"""


def test_ranks_are_on_one_clock(run):
    result, file = run(FOREIGN_CLOCK + PROGRAM, 3)
    assert (result.returncode, result.stderr) == (0, "")
    trace = json.loads(file.read_text())
    clocks = {each["rank"]: each for each in trace["otherData"]["clocks"]}
    assert clocks[1]["offset_us"] > 4e6
    assert abs(clocks[2]["offset_us"]) < 1e6
    slack_us = 5000  # of a machine with fewer cores than ranks
    of_numbers = {}
    for spans in spans_of(trace, "wait").values():
        for span in spans:
            of_numbers.setdefault(span["args"]["number"], []).append(span)
    complete = [each for each in of_numbers.values() if len(each) == 3]
    assert len(complete) > 8
    for spans in complete:
        last_came = max(span["ts"] for span in spans)
        first_knew = min(span["ts"] + span["dur"] for span in spans)
        assert last_came <= first_knew + slack_us


def test_a_job_that_fails_writes_its_timeline(run, capsys):
    result, file = run("DELAY_S = 0\n" + PROGRAM + "if rank == 1: raise KeyError\n" + CHECKPOINT)
    assert result.returncode != 0
    assert "KeyError" in result.stderr
    assert sorted(os.listdir(file.parent)) == ["program.py", "trace.json"]
    assert json.loads(file.read_text())["otherData"]["missing_ranks"] == []


def test_a_job_that_is_killed_leaves_its_parts(run, capsys):
    kill = "time.sleep(2)\nif rank == 1: os.kill(os.getpid(), 9)\n"
    result, file = run("DELAY_S = 0\n" + PROGRAM + kill + CHECKPOINT, 2)
    assert result.returncode != 0
    assert sorted(file.parent.glob("*.part")) == [
        file.parent / f"trace.json.rank{rank}.part" for rank in range(2)
    ]
    assert main(["timeline", "--json", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert all(each["total_s"] > 0 for each in found["ranks"])


def test_an_older_timeline_is_not_taken_for_this_one(run, tmp_path):
    (tmp_path / "trace.json").write_text("old")
    result, file = run("DELAY_S = 0\n" + PROGRAM)
    assert result.returncode == 0
    assert json.loads(file.read_text())["otherData"]["size"] == 3


def test_there_is_none_by_default(run):
    result, file = run("DELAY_S = 0\n" + PROGRAM, timeline=None)
    assert (result.returncode, result.stderr) == (0, "")
    assert os.listdir(file.parent) == ["program.py"]


def test_a_folder_that_cannot_be_written_fails_at_the_start(run):
    result, _ = run("DELAY_S = 0\n" + PROGRAM, timeline="/dev/null/trace.json")
    assert result.returncode != 0
    assert "MPISTRAT_TIMELINE='/dev/null/trace.json' cannot be written" in result.stderr
