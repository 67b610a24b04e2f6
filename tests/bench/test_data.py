"""`mpistrat bench data`: what it reads and reports, on a few examples."""

import json
import math

import h5py
import numpy as np
import pytest

from mpistrat.bench import data
from mpistrat.bench.benchmark import Choices
from mpistrat.bench.data import FILES, write_files

NUM_EXAMPLES = 1100


def test_all_ranks_get_equal_figures_that_have_places_in_tables(strategy, monkeypatch):
    monkeypatch.setattr(data, "_NUM_STEPS", 2)
    # Its workers are processes of their own, which is no matter of the figures.
    monkeypatch.setattr(data, "loader_reads", lambda path: None)
    findings = data.BENCHMARK.measure(Choices(num_samples=1, sizes=(), num_examples=NUM_EXAMPLES))
    everyone = strategy.extended.collectives.gather_json(findings.tables)
    assert all(each == everyone[0] for each in everyone)
    rows = {row["what"]: row for row in findings.tables["results"]}
    scans = {"gzip": "h5py, scan, gzip", "contiguous": "h5py, scan, contiguous"}
    for name, scan in scans.items():
        assert rows[scan]["rate_over_scan"] == 1
        for order in ("shuffled", "in order"):
            assert rows[f"mpistrat, {order}, {name}"]["rate_over_scan"] > 0
    for row in rows.values():
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in row if key != "what")
        assert row["pass_s"] == pytest.approx(NUM_EXAMPLES / row["examples_per_s"])
    (steps,) = findings.tables["steps"]
    assert steps["num_steps"] == 2
    assert 0 < steps["waiting"] < 1
    assert "PyTorch" in findings.notes[0]
    for table in data.BENCHMARK.tables:
        for row in json.loads(json.dumps(findings.tables[table.key])):
            assert all(column.format(row) not in ("", "-") for column in table.columns)


@pytest.mark.parametrize("num_distinct", [NUM_EXAMPLES, 320])
def test_both_files_hold_the_same_examples(tmp_path, monkeypatch, num_distinct):
    monkeypatch.setattr(data, "_NUM_DISTINCT", num_distinct)
    write_files(tmp_path, NUM_EXAMPLES)
    images = {}
    for name in FILES:
        with h5py.File(tmp_path / f"{name}.h5") as file:
            images[name] = file["image"][()]
            assert file["label"].shape == (NUM_EXAMPLES,)
            assert file["image"].compression == ("gzip" if name == "gzip" else None)
    np.testing.assert_array_equal(*images.values())
    assert len(np.unique(images["gzip"].reshape(NUM_EXAMPLES, -1), axis=0)) == num_distinct


def test_the_loader_reads_from_all_of_the_file(tmp_path):
    write_files(tmp_path, NUM_EXAMPLES)
    path = tmp_path / "gzip.h5"
    examples = data._Examples(path)
    with h5py.File(path) as file:
        for number in (0, len(examples) - 1):
            row = number * NUM_EXAMPLES // len(examples)
            np.testing.assert_array_equal(examples[number][0], file["image"][row])
    assert (len(examples) - 1) * NUM_EXAMPLES // len(examples) == NUM_EXAMPLES - 1
