"""Medians over rounds in which the candidates took turns."""

import pytest

from mpistrat.bench.measure import Timings


def test_ratios_are_taken_within_rounds():
    # In the second round the whole machine is ten times slower.
    timings = Timings({"a": [2.0, 20.0, 2.0], "b": [1.0, 10.0, 1.0], "c": [3.0, 30.0, 3.0]})
    assert timings.median_ratio("a", "b") == 2
    assert timings.median_ratio("a", "b", "c") == 0.5
    assert timings.median_difference_s("a", "b") == 1
    medians = {"a_s": 2.0, "b_s": 1.0, "c_s": 3.0}
    assert {key: value for key, value in timings.medians().items() if key in medians} == medians


def test_a_single_slow_sample_does_not_count():
    timings = Timings({"a": [2.0, 2.0, 200.0], "b": [1.0, 100.0, 1.0]})
    assert timings.median_ratio("a", "b") == pytest.approx(2)
    assert timings.median_difference_s("b", "a") == -1


def test_rows_have_quartiles():
    timings = Timings({"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [1.0] * 5})
    assert timings.time("step_s", "a") == {"step_s": 3.0, "step_s_quartiles": [2.0, 4.0]}
    assert timings.ratio("ratio", "a", "b", factor=10) == {
        "ratio": 30.0,
        "ratio_quartiles": [20.0, 40.0],
    }
    assert timings.medians()["b_s_quartiles"] == [1.0, 1.0]
    assert Timings({"a": [2.0]}).time("a_s", "a")["a_s_quartiles"] == [2.0, 2.0]
