"""The smoke test tries what it says, and names what fails."""

import re
from pathlib import Path

import pytest

from mpistrat.testing import launch
from mpistrat.testing.smoke import CHECKS

pytestmark = pytest.mark.launches

SMOKE = ("-m", "mpistrat.testing", "smoke")


def names_of(text):
    return re.findall(r"^ok  (\w+)", text, re.MULTILINE)


@pytest.mark.parametrize("ranks", [None, 2, 3])
def test_a_good_installation(ranks, tmp_path):
    done = launch.run(SMOKE, ranks, 60, cwd=tmp_path, env={"MPISTRAT_OVERSUBSCRIBE": "on"})
    assert (done.returncode, done.stderr) == (0, "")
    assert names_of(done.stdout) == [check.__name__.strip("_") for check in CHECKS]
    count = ranks or 1
    assert f"all is well on {count} rank" in done.stdout
    assert ("not tried on one rank" in done.stdout) == (count == 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("gpus", "text"), [(1, "and share 1 GPU"), (2, "with a GPU each")])
def test_it_says_which_ranks_share_a_gpu(tmp_path, gpus, text):
    standin = str(Path(__file__).parents[1] / "standin")
    env = {"PYTHONPATH": standin, "FAKE_CUPY_GPUS": str(gpus), "MPISTRAT_SHARE_GPUS": "on"}
    done = launch.run(SMOKE, 2, 60, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert f"2 ranks found each other, {text} (" in done.stdout
    assert "all is well on 2 ranks" in done.stdout


@pytest.mark.parametrize(("collective", "check"), [(20, "collectives"), (33, "training")])
def test_what_fails_on_one_rank_ends_the_job_and_is_named(tmp_path, collective, check):
    fault = {"MPISTRAT_FAULT": f"raise:OSError@rank=1,collective={collective}"}
    done = launch.run(SMOKE, 2, 60, cwd=tmp_path, env=fault)
    assert done.returncode != 0
    assert f"smoke: {check} failed on rank 1 of 2: OSError" in done.stderr
    assert "all is well" not in done.stdout
    assert check not in names_of(done.stdout)


def test_a_folder_that_cannot_be_written_is_named_on_every_rank(tmp_path):
    done = launch.run([*SMOKE, "--folder", tmp_path / "none"], 2, 60, cwd=tmp_path)
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr
    assert "all is well" not in done.stdout
