"""The trace as Perfetto reads it: arrows have both ends, within slices, and counters add up."""

import json
from collections import Counter, defaultdict

import pytest

from mpistrat.testing import launch
from mpistrat.tracing.trace import Part, Trace
from tests import ROOT

MS = 1_000_000

PROGRAM = """
import time
import numpy as np
import mpistrat as ms

strategy = ms.MPIStrategy(device="cpu")
rank = strategy.cluster_resolver.task_id
data = ms.data.Dataset.from_arrays(np.zeros((60, 1000), np.float32)).batch(12)
for batch in strategy.experimental_distribute_dataset(data):
    if rank == 1:
        time.sleep(0.02)
    strategy.run(
        lambda x: ms.get_replica_context().all_reduce("sum", x.sum(axis=0)), args=(batch,)
    )
"""


def check_format(trace):
    """Check what the Trace Event Format asks of slices, flows and counters."""
    slices = defaultdict(list)
    flows = defaultdict(dict)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXsfC"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]], "a flow starts and finishes once"
            flows[event["id"]][event["ph"]] = event
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    for flow in flows.values():
        start, finish = flow["s"], flow["f"]
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
        assert finish["bp"] == "e"
        assert start["pid"] != finish["pid"]
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            around = slices[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] <= stop for begin, stop in around)
    return [(flow["s"], flow["f"]) for flow in flows.values()]


def write_part(target, rank, size, came_ms, shift_ns=0):
    header = {
        "format": "mpistrat-timeline-part",
        "format_version": 1,
        "rank": rank,
        "size": size,
        "host": "here",
        "pid": 1,
        "clock": f"of {rank}",
        "wall_clock_ns": 0,
        "monotonic_ns": shift_ns,
    }
    lines = [json.dumps(header)]
    for number, came in enumerate(came_ms):
        agreed = shift_ns + number * 10 * MS + 9 * MS
        facts = {"channel": "all", "number": number, "agreed_ns": agreed, "bytes": 2**20}
        came_ns = shift_ns + number * 10 * MS + came * MS
        lines.append(json.dumps(["collective", "all_reduce", came_ns, agreed + MS, 7, facts]))
        read = {"bytes": 2**21, "examples": 5}
        begin = shift_ns + number * 10 * MS
        lines.append(json.dumps(["data", "next batch", begin, begin + MS, 7, read]))
    Part.path_of(target, rank).write_text("\n".join(lines) + "\n")


@pytest.fixture
def trace(tmp_path):
    """Return the trace of three ranks on three clocks; rank 2 comes last, then rank 0."""
    target = tmp_path / "trace.json"
    for rank, came_ms in enumerate([(1, 8), (2, 3), (7, 2)]):
        write_part(target, rank, 3, came_ms, shift_ns=rank * 10**15)
    Trace([Part.open(path) for path in Part.paths_of(target)]).write(target)
    return json.loads(target.read_text())


def test_arrows_lead_from_the_last_rank_to_those_that_waited(trace):
    arrows = check_format(trace)
    ends = [(start["pid"], finish["pid"]) for start, finish in arrows]
    assert sorted(ends) == [(0, 1), (0, 2), (2, 0), (2, 1)]
    calls = [each for each in trace["traceEvents"] if each.get("cat") == "collective"]
    last = {call["args"]["number"]: call["args"]["last_rank"] for call in calls}
    assert last == {0: 2, 1: 0}
    waits = [each for each in trace["traceEvents"] if each.get("cat") == "wait"]
    marked = [
        (each["pid"], each["args"]["number"]) for each in waits if "came_last" in each["args"]
    ]
    assert sorted(marked) == [(0, 1), (2, 0)]


def test_counters_add_up(trace):
    totals = Counter()
    points = [each for each in trace["traceEvents"] if each["ph"] == "C"]
    for name in {each["name"] for each in points}:
        of_rank = [each for each in points if each["name"] == name and each["pid"] == 1]
        assert [each["ts"] for each in of_rank] == sorted(each["ts"] for each in of_rank)
        for one, following in zip(of_rank, [*of_rank[1:], None], strict=True):
            (rate,) = one["args"].values()
            width_us = following["ts"] - one["ts"] if following else 0.0
            assert following or rate == 0, "a counter ends at zero"
            totals[name] += rate * width_us / 1e6
    assert totals == pytest.approx({"examples/s": 10, "moved MiB/s": 2, "read MiB/s": 4}, rel=1e-3)


def test_a_collective_that_a_killed_rank_never_left_has_no_arrow(tmp_path):
    target = tmp_path / "trace.json"
    for rank in range(2):
        write_part(target, rank, 2, [1])
        file = Part.path_of(target, rank)
        lost = {"channel": "all", "number": 9, "agreed_ns": 0}
        span = ["collective", "all_reduce", 20 * MS, 30 * MS, 7, lost]
        file.write_text(file.read_text() + json.dumps(span) + "\n")
    Trace([Part.open(path) for path in Part.paths_of(target)]).write(target)
    assert len(check_format(json.loads(target.read_text()))) == 1


@pytest.mark.launches
def test_a_job_of_three_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    target = tmp_path / "trace.json"
    done = launch.run([program], 3, 60, cwd=ROOT, env={"MPISTRAT_TIMELINE": str(target)})
    assert done.returncode == 0, done.stderr
    trace = json.loads(target.read_text())
    assert check_format(trace)
    reduced = [e["args"] for e in trace["traceEvents"] if e["name"] == "all_reduce"]
    assert [each["last_rank"] for each in reduced] == [1] * 15
    read = [e["args"] for e in trace["traceEvents"] if e.get("cat") == "data" and e["args"]]
    assert sum(each["examples"] for each in read) == 60
    assert sum(each["bytes"] for each in read) == 60 * 4000
