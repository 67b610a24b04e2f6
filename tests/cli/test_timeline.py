"""`mpistrat timeline` on made-up parts and traces."""

import json
import sys

import pytest

from mpistrat.cli import main
from mpistrat.tracing.trace import Part, Trace

MS = 1_000_000


def write_part(path, rank, size=3, slow=1, clock="node", shift=0, **header):
    """Write three steps of 10 ms, in which rank `slow` comes 8 ms after the others."""
    facts = {
        "format": "mpistrat-timeline-part",
        "format_version": 1,
        "rank": rank,
        "size": size,
        "host": "here",
        "pid": 1,
        "clock": clock,
        "wall_clock_ns": 0,
        "monotonic_ns": shift,
    }
    lines = [json.dumps(facts | header)]
    for step in range(3):
        begin = shift + step * 10 * MS
        came = begin + (9 * MS if rank == slow else 1 * MS)
        agreed = begin + 9 * MS + 10_000
        end = begin + 10 * MS
        moved = {"bytes": 4000, "implementation": "MpiReducer"}
        call = {"channel": "ranks 0-2", "number": step, "agreed_ns": agreed, **moved}
        lines.append(json.dumps(["collective", "all_reduce", came, end, 7, call]))
        lines.append(json.dumps(["run", "run", begin, end, 7, {}]))
    file = Part.path_of(path, rank)
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def target(tmp_path):
    return tmp_path / "trace.json"


def summary(capsys, *arguments):
    assert main(["timeline", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def trace_of(target):
    parts = [Part.open(path) for path in Part.paths_of(target)]
    Trace(parts).write(target)
    return json.loads(target.read_text())


def test_parts_become_one_trace(target):
    for rank in range(3):
        write_part(target, rank)
    trace = trace_of(target)
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
             and e["name"] == "process_name"}  # fmt: skip
    assert names == {rank: f"rank {rank} on here" for rank in range(3)}
    calls = [each for each in spans if each["cat"] == "collective"]
    assert len(calls) == 9
    for call in calls:
        assert call["args"]["bytes"] == 4000
        assert call["args"]["implementation"] == "MpiReducer"
        inside = [e for e in spans if e["cat"] in ("wait", "move") and e["pid"] == call["pid"]
                  and e["args"]["number"] == call["args"]["number"]]  # fmt: skip
        assert sum(e["dur"] for e in inside) == pytest.approx(call["dur"])
        assert min(e["ts"] for e in inside) == pytest.approx(call["ts"])
    waits = {e["pid"]: e["dur"] for e in spans if e["cat"] == "wait" and e["args"]["number"] == 1}
    assert waits == pytest.approx({0: 8010, 1: 10, 2: 8010})


@pytest.mark.parametrize("shift_s", [-5000, 5000])
def test_clocks_of_other_nodes_are_corrected(target, shift_s):
    for rank in range(3):
        shift = shift_s * 10**9 if rank == 2 else 0
        write_part(target, rank, clock="far" if rank == 2 else "near", shift=shift)
    trace = trace_of(target)
    runs = {}
    for each in trace["traceEvents"]:
        if each.get("cat") == "run":
            runs.setdefault(each["pid"], []).append(each["ts"])
    assert runs[2] == pytest.approx(runs[0], abs=11)
    clocks = {each["rank"]: each for each in trace["otherData"]["clocks"]}
    assert clocks[2]["offset_us"] == pytest.approx(shift_s * 1e6, abs=11)
    assert 0 < clocks[2]["error_us"] < 10_000
    assert clocks[1]["error_us"] == 0


@pytest.mark.parametrize("slow", range(3))
def test_trace_and_parts_are_summed_up_alike(target, capsys, slow):
    files = [write_part(target, rank, slow=slow) for rank in range(3)]
    by_name = summary(capsys, target)
    by_parts = summary(capsys, *files)
    trace_of(target)
    for file in files:
        file.unlink()
    found = summary(capsys, target)
    for each in (by_name, by_parts):
        assert each["straggler"] == pytest.approx(found["straggler"])
    assert found["straggler"]["rank"] == slow
    assert found["straggler"]["others_waited_s"] == pytest.approx(3 * 2 * 8e-3)
    assert main(["timeline", str(target)]) == 0
    assert f"Slowest: rank {slow} (" in capsys.readouterr().out


def test_a_part_that_is_broken_off(target, capsys):
    for rank in (0, 2):
        write_part(target, rank)
    file = Part.path_of(target, 0)
    file.write_text(file.read_text()[:-20])
    found = summary(capsys, target)
    assert found["missing_ranks"] == [1]
    assert [each["rank"] for each in found["ranks"]] == [0, 2]
    assert main(["timeline", str(target)]) == 0
    assert "no part from rank 1" in capsys.readouterr().out


def test_many_ranks_are_not_all_shown(target, capsys):
    for rank in range(40):
        write_part(target, rank, size=40, slow=37)
    assert main(["timeline", str(target)]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if line[:2].strip()]
    assert "37" in rows
    assert "median" in rows
    assert len(out.splitlines()) < 30
    assert len(summary(capsys, target)["ranks"]) == 40


def test_it_draws(target, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for rank in range(3):
        write_part(target, rank)
    picture = tmp_path / "out.png"
    assert main(["timeline", str(target), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", str(target), "--plot", str(tmp_path / "no" / "out.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib(target, monkeypatch, capsys):
    write_part(target, 0, size=1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["timeline", str(target), "--plot", "out.png"]) == 2
    assert "matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"traceEvents": []}', '{"otherData": 3}']
)
def test_unusable_traces(target, capsys, text):
    target.write_text(text)
    assert main(["timeline", str(target)]) == 2
    assert "not a timeline" in capsys.readouterr().err


def test_unusable_parts(target, capsys):
    assert main(["timeline", str(target)]) == 2
    assert "no part of it" in capsys.readouterr().err
    file = write_part(target, 0)
    assert main(["timeline", str(file), str(file)]) == 2
    assert "both from rank 0" in capsys.readouterr().err
    write_part(target, 0, format_version=2)
    assert main(["timeline", str(file)]) == 2
    assert "version 2" in capsys.readouterr().err
    file.write_text("no JSON\n")
    assert main(["timeline", str(file)]) == 2
    assert "not a part of a timeline" in capsys.readouterr().err
