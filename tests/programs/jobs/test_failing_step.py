"""What happens to the digits job when one rank fails."""

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.timeout(200)]

# The job, with a loss that fails on one rank in the third batch.
SABOTAGED = """
import sys
sys.path.insert(0, {jobs!r})
import mpistrat as ms, train_digits
calls = []
cross_entropy = train_digits.cross_entropy
def failing_cross_entropy(*args):
    calls.append(args)
    if ms.get_replica_context().replica_id_in_sync_group == {rank} and len(calls) == 3:
        raise FloatingPointError("the loss is broken here")
    return cross_entropy(*args)
train_digits.cross_entropy = failing_cross_entropy
train_digits.main()
"""


@pytest.mark.quick
def test_an_exception_in_step_on_one_rank_ends_the_job(job, tmp_path):
    program = tmp_path / "sabotaged.py"
    program.write_text(SABOTAGED.format(jobs=str(ROOT / "jobs"), rank=1))
    options = job.command("--epochs", 2)[1:]
    done = launch.run([program, *options], 2, limit_s=60)
    assert done.returncode != 0
    assert done.stderr.count("FloatingPointError: the loss is broken here") == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "rank 1 of 2 failed at" in done.stderr
    line = SABOTAGED[: SABOTAGED.index("raise")].count("\n") + 1
    assert f"sabotaged.py:{line}" in done.stderr
    assert not list(job.output.glob("*.png"))
