import json

import pytest

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
