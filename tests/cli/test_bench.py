import json

import pytest

from mpistrat.bench import BENCHMARKS
from mpistrat.testing import launch

pytestmark = pytest.mark.launches


def test_bench_writes_what_it_measured_on_all_ranks(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["-m", "mpistrat", "bench", "allreduce", "--sizes", "8", "4096", "--samples", "2"]
    result = launch.run([*arguments, "--output", report], 2, 60)
    assert result.returncode == 0, result.stderr
    assert "times faster" in result.stdout
    found = json.loads(report.read_text())
    assert found["num_ranks"] == 2
    assert [each["num_bytes"] for each in found["results"]] == [8, 4096]
    assert all(each["raw_s"] > 0 and each["ratio"] > 0 for each in found["results"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_a_choice_of_the_command(name):
    assert name in launch.run(["-m", "mpistrat", "bench", "--help"], limit_s=60).stdout


def test_what_the_agreement_costs_is_measured(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["-m", "mpistrat", "bench", "agreement", "--samples", "2", "--output", report]
    result = launch.run(arguments, 2, 60)
    assert result.returncode == 0, result.stderr
    rows = json.loads(report.read_text())["results"]
    assert [row["checked_s"] - row["unchecked_s"] for row in rows] == pytest.approx(
        [row["cost_s"] for row in rows]
    )
