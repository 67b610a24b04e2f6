"""Torch's own tests of process groups, unmodified, as far as they apply."""

import importlib.util
import json
from pathlib import Path

import pytest

from mpistrat.testing import launch

c10d = pytest.importorskip("torch")._C._distributed_c10d

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs expecttest"),
]

PROGRAM = Path(__file__).parent / "programs" / "torch_suite.py"
NOT_OURS = {
    "gloo": {
        "test_get_backend": "asks for the name gloo",
    },
    "mpi": {"test_get_backend": "asks for the name mpi"},
    "mpistrat": {},
}
"""Tests that fail, and why. Torch reserves some for a backend by its name."""
AT_LEAST = {"mpistrat": 60, "gloo": 80, "mpi": 80}


MONITORED = [f"test_monitored_barrier_gloo{end}" for end in ("", "_subgroup", "_rank_0_timeout")]
"""For gloo only before torch 2.14. Then a rank is stuck in each, and they ask for gloo's words."""
STUCK = "test_barrier_timeout_full_group"
"""The test in which only rank 0 calls a barrier; ranks that are stuck end the job with an error."""


def listed(result):
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith('["')]


def outcomes_of(ranks, **variables):
    """Return the outcome of each test as [name, outcome, why, ...]."""
    result = launch.run(["-W", "ignore", PROGRAM], ranks, 300, env=variables)
    assert result.returncode == 0, result.stderr[-2000:]
    return listed(result)


@pytest.mark.parametrize(("ranks", "named"), [(2, "mpistrat"), (3, "gloo"), (3, "mpi")])
def test_torchs_own_tests_pass(ranks, named):
    outcomes = outcomes_of(ranks, BACKEND=named, LEFT_OUT=" ".join([STUCK, *MONITORED]))
    failed = {
        name: why for name, outcome, why, *_ in outcomes if outcome not in ("passed", "skipped")
    }
    unexpected = {name: why for name, why in failed.items() if name not in NOT_OURS[named]}
    assert not unexpected, unexpected
    assert sum(outcome == "passed" for _, outcome, *_ in outcomes) >= AT_LEAST[named]


def test_a_barrier_that_times_out_fails_and_so_does_the_job():
    result = launch.run(["-W", "ignore", PROGRAM, STUCK], 3, 100, env={"BACKEND": "gloo"})
    assert [each[:2] for each in listed(result)] == [[STUCK, "passed"]]
    assert result.returncode != 0
    assert "Ranks 1-2 did not come to torch.barrier" in result.stderr


@pytest.mark.skipif("rank" not in (c10d.Backend.__init__.__doc__ or ""), reason="needs torch 2.14")
def test_torchs_own_tests_pass_beside_the_backend_of_another_device():
    # Torch does not forward is_completed and the source of works in such groups.
    left_out = [
        f"test_{operation}{profiler}"
        for operation in ("irecv", "isend", "send_recv_any_source")
        for profiler in ("", "_autograd_profiler", "_torch_profiler")
    ]
    outcomes = outcomes_of(
        2, BACKEND="mpistrat", GROUP_BACKEND="cpu:mpistrat,cuda:gloo", LEFT_OUT=" ".join(left_out)
    )
    failed = {name for name, outcome, *_ in outcomes if outcome not in ("passed", "skipped")}
    # They ask for the name of the backend.
    assert failed == {"test_get_backend", "test_ddp_logging_data_cpu"}
    assert sum(outcome == "passed" for _, outcome, *_ in outcomes) >= 50
