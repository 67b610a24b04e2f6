"""Asynchronous training that continues under MPIStrategy, and a scan that outlives a worker."""

import json
import os
import signal
import time

import pytest

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch
from tests import ROOT

pytestmark = pytest.mark.launches

TRAIN = ROOT / "jobs" / "train_digits_async.py"
SCAN = ROOT / "jobs" / "scan.py"


def accuracy_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout.partition("test accuracy: ")[2].split()[0])


@pytest.mark.parametrize(("ranks", "servers"), [(3, 0), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_asynchronous_training_continues_under_replicas(digits, tmp_path, ranks, servers):
    file = tmp_path / "run.h5"
    options = ["--data", digits, "--file", file]
    done = launch.run([TRAIN, *options, "--servers", str(servers)], ranks)
    assert accuracy_of(done) > 0.85
    assert "600 steps" in done.stdout
    done = launch.run([TRAIN, *options, "--sync", "--steps", "200"], 2)
    assert accuracy_of(done) > 0.9
    assert "from step 600 to 800" in done.stdout


@pytest.mark.parametrize("ranks", [None, 3])
def test_a_scan(tmp_path, ranks):
    done = launch.run([SCAN, "--output", tmp_path / "scan.json", "--steps", "50"], ranks)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "scan.json").read_text())
    assert len({(each["rate"], each["decay"]) for each in results}) == 200
    assert results[0]["loss"] == min(each["loss"] for each in results)
    assert "best of 200" in done.stdout
    assert "150 of 200 trainings are done" in done.stdout


@pytest.mark.skipif(not launch.is_open_mpi(), reason="MPICH ends the job with the rank")
def test_a_scan_that_loses_a_worker(tmp_path, monkeypatch):
    first, *rest = mpiexec(4)
    monkeypatch.setattr(launch, "mpiexec", lambda _: [first, "--with-ft", "ulfm", *rest])
    output = tmp_path / "scan.json"
    launched = launch.Launched([SCAN, "--output", output, "--steps", "2000"], 4)
    launched.wait_for_output("50 of 200")
    ranks = [pid for pid in launched.pids() if _rank_of(pid) == "2"]
    os.kill(ranks[0], signal.SIGKILL)
    began = time.monotonic()
    done = launched.finish(60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 50
    assert len({(each["rate"], each["decay"]) for each in json.loads(output.read_text())}) == 200
    assert "worker 1 (rank 2" in done.stderr


def _rank_of(pid):
    try:
        with open(f"/proc/{pid}/environ") as file:
            variables = dict(each.split("=", 1) for each in file.read().split("\0") if "=" in each)
    except OSError:
        return None
    return variables.get("OMPI_COMM_WORLD_RANK")
