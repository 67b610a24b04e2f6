"""Spans: recorded where a timeline is wanted, and nothing where not."""

import json

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.tracing import spans


@pytest.fixture
def recorder(tmp_path):
    recorder = spans.Recorder(str(tmp_path / "part"), {"rank": 0})
    spans.record_on(recorder)
    yield recorder
    spans.record_on(None)
    recorder.close()


def recorded(tmp_path):
    lines = (tmp_path / "part").read_text().splitlines()
    assert json.loads(lines[0]) == {"rank": 0}
    return [json.loads(line) for line in lines[1:]]


def test_nothing_is_made_without_a_recorder():
    assert spans.active() is None
    assert spans.span("run", "a") is spans.span("data", "b", number=1)
    assert spans.mark("a") is None


def test_spans_are_written_in_the_order_of_their_ends(recorder, tmp_path):
    @spans.spanned("checkpoint", "decorated")
    def double(x):
        return 2 * x

    with spans.span("run", "outer", number=3), pytest.raises(KeyError), spans.span("data", "inner"):
        raise KeyError
    assert double(4) == 8
    recorder.flush()
    found = recorded(tmp_path)
    assert [each[:2] for each in found] == [
        ["data", "inner"], ["run", "outer"], ["checkpoint", "decorated"]
    ]  # fmt: skip
    (_, _, inner_began, inner_ended, *_), (_, _, began, ended, _, facts), _ = found
    assert began <= inner_began <= inner_ended <= ended
    assert facts == {"number": 3}


def test_profilers_see_the_same_ranges(recorder, tmp_path):
    seen = []
    recorder.push, recorder.pop = seen.append, lambda: seen.append("end")
    strategy = ms.OneDeviceStrategy()

    def step():
        ms.get_replica_context().all_reduce("sum", np.ones(3))
        ms.get_replica_context().merge_call(lambda _: None)

    strategy.run(step)
    with pytest.raises(ValueError):
        strategy.reduce("sum", 1.0, axis=3)
    assert seen == [
        "run", "all_reduce", "end", "merge_call", "end", "end", "reduce", "end"
    ]  # fmt: skip
    recorder.flush()
    facts = {each[1]: each[5] for each in recorded(tmp_path) if each[0] == "collective"}
    assert facts["all_reduce"]["bytes"] == 24
    assert facts["all_reduce"]["implementation"]
    assert facts["reduce"]["agreed_ns"] == 0
