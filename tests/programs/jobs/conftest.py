"""What the tests of the jobs share: the data, and a way to train on it."""

import hashlib
import json
import re

import pytest

from mpistrat.testing import launch
from tests import ROOT

PREPARE = ROOT / "jobs" / "prepare_digits.py"
TRAIN = ROOT / "jobs" / "train_digits.py"


class Job:
    """train_digits.py with one data file and one output folder."""

    def __init__(self, data, output):
        self.data = data
        self.output = output

    def command(self, *options):
        return [TRAIN, "--data", self.data, "--output", self.output, *map(str, options)]

    def run(self, *options, ranks=2, limit_s=120):
        return launch.run(self.command(*options), ranks, limit_s)

    def train(self, *options, ranks=2, limit_s=120):
        """Run the job, which must succeed, and return the test accuracy it prints last."""
        done = self.run(*options, ranks=ranks, limit_s=limit_s)
        assert done.returncode == 0, done.stdout + done.stderr
        last_line = done.stdout.strip().split("\n")[-1].strip()
        return float(re.fullmatch(r"test accuracy: (\d\.\d+)", last_line)[1])

    def rows(self):
        return json.loads((self.output / "learning_curve.json").read_text())

    def files(self):
        """Return the digest of every file under the folder that holds the output folder."""
        return {
            path: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.output.parent.rglob("*")
            if path.is_file()
        }


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return the path of the prepared data."""
    path = tmp_path_factory.mktemp("data") / "digits.h5"
    done = launch.run([PREPARE, "--output", path])
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def job(digits, tmp_path):
    return Job(digits, tmp_path / "runs" / "digits")
