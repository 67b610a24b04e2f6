"""The benchmarks of reading: what it reads and reports, on a few examples."""

import json

import numpy as np
import pytest

from benchmarks import data as races
from mpistrat.bench import data, measure
from mpistrat.bench.benchmark import Choices

NUM_EXAMPLES = 600


@pytest.mark.thorough
def test_all_ranks_get_equal_figures_that_have_places_in_tables(strategy, monkeypatch):
    monkeypatch.setattr(data, "_NUM_STEPS", 2)
    monkeypatch.setattr(measure, "_TARGET_S", 0)
    # Its workers are processes of their own, which is no matter of the figures.
    monkeypatch.setattr(races, "loader_reads", lambda path: None)
    findings = races.BENCHMARK.measure(Choices(num_samples=1, sizes=(), num_examples=NUM_EXAMPLES))
    everyone = strategy.extended._collectives.gather_json(findings.tables)
    assert all(each == everyone[0] for each in everyone)
    rows = {row["what"]: row for row in findings.tables["results"]}
    scans = {name: f"h5py, scan, {name}" for name in data.FILES}
    assert rows["NumPy, mapped .npy, sorted indices, contiguous"]["rate_over_scan"] > 0
    assert [row["what"] for row in findings.tables["first batches"]] == list(scans)
    for name, scan in scans.items():
        assert rows[scan]["rate_over_scan"] == 1
        for order in ("shuffled", "in order"):
            assert rows[f"mpistrat, {order}, {name}"]["rate_over_scan"] > 0
    for row in rows.values():
        figures = np.hstack([value for key, value in row.items() if key != "what"])
        assert np.isfinite(figures).all()
        assert (figures > 0).all()
        assert row["pass_s"] == pytest.approx(NUM_EXAMPLES / row["examples_per_s"])
    (steps,) = findings.tables["steps"]
    assert steps["num_steps"] == 2
    assert 0 < steps["waiting"] < 1
    assert any("PyTorch" in note for note in findings.notes)
    maps = {row["what"]: row for row in findings.tables["maps"]}
    (kept,) = [row for row in maps.values() if "memory_over_elements" in row]
    # Once, however many ranks there are, with the index and what is around each element.
    assert 1 <= kept.pop("memory_over_elements") < 1.1
    assert maps["mpistrat, map"]["rate_over_map"] == 1
    assert min(row["rate_over_map"] for row in maps.values()) > 0
    for row in maps.values():
        row["memory_over_elements"] = 1
    for table in races.BENCHMARK.tables:
        for row in json.loads(json.dumps(findings.tables[table.key])):
            assert all(column.format(row) not in ("", "-") for column in table.columns)
