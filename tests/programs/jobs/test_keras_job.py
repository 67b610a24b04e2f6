"""The job with Keras: it learns, and resumes on a different number of ranks."""

import re
import shutil

import pytest

from mpistrat.testing import launch
from tests import ROOT
from tests.keras.conftest import missing

pytestmark = [pytest.mark.launches, pytest.mark.timeout(400)]
PROGRAM = ROOT / "jobs" / "train_keras.py"


def train(digits, output, ranks):
    options = ["--data", digits, "--output", output, "--epochs", "3"]
    done = launch.run(["-W", "ignore", PROGRAM, *options], ranks, limit_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_it_learns_and_resumes_on_a_different_number_of_ranks(digits, tmp_path):
    first = train(digits, tmp_path / "first", ranks=1)
    assert float(re.search(r"test accuracy: (\S+)", first)[1]) > 0.85
    names = sorted(each.name for each in (tmp_path / "first").iterdir())
    assert names == ["checkpoint-29.h5", "checkpoint-58.h5", "checkpoint-87.h5", "history.csv"]
    (tmp_path / "second").mkdir()
    shutil.copy(tmp_path / "first" / names[1], tmp_path / "second")
    resumed = train(digits, tmp_path / "second", ranks=2)
    assert f"resumed from {tmp_path / 'second'}/checkpoint-58.h5 on 2 rank(s)" in resumed
    assert float(re.search(r"test accuracy: (\S+)", resumed)[1]) > 0.85
    assert len((tmp_path / "second" / "history.csv").read_text().splitlines()) == 2  # and a head


def test_a_missing_package_is_one_line():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'jobs')!r}); sys.modules['keras'] = None; "
        "import train_keras"
    )
    done = launch.run(["-c", program])
    assert done.returncode == 1
    assert done.stderr == "This job needs Keras: pip install --pre keras-nightly\n"
