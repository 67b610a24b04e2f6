"""`benchmarks/replicas.py`: its loops learn the same, and its figures have places in tables."""

import json

import numpy as np
import pytest

import mpistrat as ms
from benchmarks import replicas
from benchmarks.small_network import random_batch
from mpistrat.bench.benchmark import Choices


def test_replicas_and_accumulation_by_hand_learn_the_same(strategy, rank, size):
    several = ms.MPIStrategy(device="cpu", num_replicas=4 * size)
    of_replicas = replicas.replica_loop(several)
    parts = [random_batch(4 * rank + each, 4 * size) for each in range(4)]
    by_hand = replicas.AccumulatingLoop(strategy, parts)
    for _ in range(4):
        of_replicas.step()
        by_hand.step()
    for one, other in zip(of_replicas.weights(), by_hand.weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    several.close()


def test_all_figures_have_places_in_tables(strategy, size, monkeypatch):
    monkeypatch.setattr(replicas, "_LOCAL", (2, 3))
    findings = replicas.BENCHMARK.measure(Choices(num_samples=1, sizes=(64, 2**16)))
    everyone = strategy.extended._collectives.gather_json(findings.tables)
    assert all(each == everyone[0] for each in everyone)
    assert bool(findings.tables["sums"]) == (not findings.notes)
    assert [row["num_replicas"] for row in findings.tables["meetings"]] == [2, 3]
    steps = {row["name"]: row for row in findings.tables["results"]}
    assert steps["several"]["ratio"] == pytest.approx(
        steps["several"]["step_s"] / steps["by_hand"]["step_s"]
    )
    for table in replicas.BENCHMARK.tables:
        for row in json.loads(json.dumps(findings.tables[table.key])):
            assert all(column.format(row) for column in table.columns)
