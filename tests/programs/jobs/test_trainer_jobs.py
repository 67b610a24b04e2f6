"""The jobs with the trainers of Lightning and Hugging Face: they learn, and resume."""

import re
import shutil
from importlib.util import find_spec

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.timeout(300)]

JOBS = {"lightning": ("lightning",), "transformers": ("transformers", "accelerate")}
"""Names of the jobs, and the packages that they need."""
LEARNT = {"lightning": 0.85, "transformers": 0.5}
"""Accuracies after four epochs."""


def train(name, digits, output, ranks, epochs):
    options = ["--data", digits, "--output", output, "--epochs", str(epochs)]
    program = ROOT / "jobs" / f"train_{name}.py"
    done = launch.run(["-W", "ignore", program, *options], ranks, limit_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(text):
    return float(re.search(r"test accuracy: (\S+)", text)[1])


@pytest.mark.parametrize("name", JOBS)
def test_it_learns_and_resumes_on_a_different_number_of_ranks(name, digits, tmp_path):
    for package in ("torch", *JOBS[name]):
        if find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    first = train(name, digits, tmp_path / "first", ranks=2, epochs=4)
    assert accuracy(first) > LEARNT[name]
    files = sorted(
        (each for each in (tmp_path / "first").iterdir() if each.suffix == ".h5"),
        key=lambda each: int(each.stem.partition("-")[2]),
    )
    assert len(files) == 4
    (tmp_path / "second").mkdir()
    shutil.copy(files[2], tmp_path / "second")
    resumed = train(name, digits, tmp_path / "second", ranks=1, epochs=4)
    assert f"resumed from {tmp_path / 'second' / files[2].name} on 1 rank(s)" in resumed
    assert accuracy(resumed) == pytest.approx(accuracy(first), abs=0.02)


@pytest.mark.parametrize("name", JOBS)
def test_a_missing_package_is_one_line(name):
    if find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    package = JOBS[name][0]
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'jobs')!r}); "
        f"sys.modules[{package!r}] = None; import train_{name}"
    )
    done = launch.run(["-c", program])
    assert done.returncode == 1
    assert re.fullmatch(rf"train_{name}.py needs \w+: pip install {package}.*\n", done.stderr)
