"""Writers that are killed: see killed_writers.py."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.launches


def run(folder, number, how, durable="fast"):
    command = [sys.executable, "-m", "tests.data.hdf5_writer.killed_writers"]
    command += [str(folder), str(number), how, durable]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("how", ["writes", "times"])
def test_a_killed_writer_leaves_every_step_it_has_acknowledged(tmp_path, how):
    assert run(tmp_path, 10, how) >= 5


@pytest.mark.campaign
@pytest.mark.timeout(660)
@pytest.mark.parametrize("durable", ["fast", "durable"])
def test_two_hundred_kills_at_writes(tmp_path, durable):
    assert run(tmp_path, 220 if durable == "fast" else 40, "writes", durable) >= 30


@pytest.mark.campaign
@pytest.mark.timeout(660)
def test_two_hundred_kills_at_random_times(tmp_path):
    assert run(tmp_path, 210, "times") >= 200
