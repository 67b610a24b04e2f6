"""Keras on several ranks learns what it learns on one process, and resumes on other numbers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.keras.requirements import check_version
from mpistrat.testing import launch
from tests import ROOT
from tests.programs.jobs.conftest import digits  # noqa: F401

pytestmark = [pytest.mark.launches, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 250

usual_on = {
    2: [2, pytest.param(3, marks=pytest.mark.campaign)],
    3: [pytest.param(2, marks=pytest.mark.campaign), 3],
}
"""Numbers of ranks, where one suffices as a rule."""


def run(program, *arguments, ranks=None, cwd=None):
    command = ["-W", "ignore", PROGRAMS / f"{program}.py", *arguments]
    return launch.run(command, ranks, LIMIT_S, cwd=cwd)


def succeeded(done, text="is done"):
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.count(text)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """What one process learns from the global batches."""
    path = tmp_path_factory.mktemp("learnt") / "learnt.npz"
    succeeded(run("parallel", "reference", path))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """How a training without a stop ends, on one process."""
    path = tmp_path_factory.mktemp("trained") / "trained.npz"
    succeeded(run("training", "reference", path))
    return path


@pytest.mark.parametrize("ranks", usual_on[2])
def test_it_learns_what_one_process_learns(ranks, learnt, tmp_path):
    done = run("parallel", "compare", learnt, ranks=ranks, cwd=tmp_path)
    assert succeeded(done) == ranks


@pytest.mark.parametrize("ranks", usual_on[3])
def test_datasets(ranks, tmp_path):
    assert succeeded(run("datasets", ranks=ranks, cwd=tmp_path)) == ranks


@pytest.mark.campaign
def test_datasets_of_one_process(tmp_path):
    assert succeeded(run("datasets", cwd=tmp_path)) == 1


@pytest.mark.parametrize("ranks", usual_on[3])
def test_replicas_and_files(ranks, tmp_path):
    done = run("replicas", ranks=ranks, cwd=tmp_path)
    assert done.stdout.count("is done") == ranks, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", usual_on[2])
def test_a_training_resumes_after_any_step(ranks, trained, tmp_path):
    path = tmp_path / "trained.npz"
    path.write_bytes(trained.read_bytes())
    assert succeeded(run("training", "within", path, ranks=ranks)) == ranks


@pytest.mark.parametrize(
    "stops",
    [
        [(2, "kill", 13), (3, "term", 11), (1, None, None)],
        pytest.param([(3, "kill", 20), (2, None, None)], marks=pytest.mark.campaign),
        pytest.param([(1, "term", 48), (3, None, None)], marks=pytest.mark.campaign),
    ],
    ids=["kill_2_term_3_end_1", "kill_3_end_2", "term_1_end_3"],
)
def test_killed_and_preempted_jobs_resume_on_other_numbers_of_ranks(stops, trained, tmp_path):
    folder = tmp_path / "runs"
    for ranks, how, step in stops:
        if how is None:
            done = run("training", "resumed", folder, trained, ranks=ranks)
            assert succeeded(done, "resumed from checkpoint-") == ranks
            continue
        done = run("training", "ended", folder, how, str(step), ranks=ranks)
        assert done.returncode != 0
        if how == "term":
            assert done.returncode == 75, done.stdout + done.stderr
    assert not [each for each in folder.iterdir() if not each.name.startswith("checkpoint-")]


def test_the_program_of_the_page_runs(digits, tmp_path):  # noqa: F811
    page = (ROOT / "docs" / "howto" / "keras.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "data").mkdir()
    shutil.copy(digits, tmp_path / "data")
    (tmp_path / "train.py").write_text(code)
    done = launch.run(["-W", "ignore", "train.py"], 2, LIMIT_S, cwd=tmp_path)
    assert succeeded(done, "started from None") == 2
    steps = [f"checkpoint-{step}.h5" for step in (20, 40, 58)]
    assert sorted(each.name for each in (tmp_path / "runs" / "keras").iterdir()) == steps
    lines = (tmp_path / "history.csv").read_text().splitlines()
    assert [line[0] for line in lines] == ["e", "0", "1"]


@pytest.mark.campaign
def test_the_tutorial_runs(tmp_path):
    page = (ROOT / "docs" / "coming-from" / "keras.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "epochs=3, steps_per_epoch=70" in code
    shorter = code.replace("epochs=3, steps_per_epoch=70", "epochs=2, steps_per_epoch=2")
    (tmp_path / "train.py").write_text(f"{shorter}\nprint('is done')\n")
    with h5py.File(tmp_path / "mnist.h5", "w") as file:
        file["image"] = np.zeros((600, 28, 28), np.uint8)
        file["label"] = np.zeros(600, np.uint8)
    done = launch.run(["-W", "ignore", "train.py"], 2, LIMIT_S, cwd=tmp_path)
    assert succeeded(done) == 2


START = "import mpistrat.keras as mk\nmk.init()\n"


@pytest.mark.parametrize(
    ("before", "variables", "said"),
    [
        ("", {"KERAS_BACKEND": ""}, "LaunchError: The backend of Keras is 'tensorflow'"),
        ("", {"KERAS_BACKEND": "jax"}, "environment variable KERAS_BACKEND=torch before"),
        (
            "import sys, types\n"
            "config = types.SimpleNamespace(backend=lambda: 'numpy')\n"
            "sys.modules['keras'] = types.SimpleNamespace(config=config)",
            {},
            "LaunchError: The backend of Keras is 'numpy', but",
        ),
        ("import sys; sys.modules['keras'] = None", {}, "ImportError: mpistrat.keras needs Keras"),
    ],
    ids=["no_backend", "jax", "imported", "missing"],
)
def test_init_refuses_what_cannot_work(before, variables, said, tmp_path):
    variables = {"KERAS_BACKEND": "torch", "KERAS_HOME": str(tmp_path), **variables}
    done = launch.run(["-W", "ignore", "-c", f"{before}\n{START}"], limit_s=100, env=variables)
    assert done.returncode != 0
    assert said in done.stderr


def test_versions_that_cannot_distribute_are_refused():
    text = "needs Keras 3.16 or newer, and this is 3.15.0: Keras distributes"
    with pytest.raises(NotImplementedError, match=text):
        check_version("3.15.0")
    for version in ("3.16.0", "3.16.0.dev2026102704", "4.0.0"):
        check_version(version)


STARTS = """
import os, pytest
import mpistrat.keras as mk
from mpistrat.errors import LaunchError
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
with pytest.raises(LaunchError, match="torchrun"):
    mk.init()
import keras, torch.distributed
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    del os.environ[name]
assert keras.distribution.distribution() is None
from keras.src.backend.torch.ops import core
core.DEFAULT_DEVICE = "cuda"
with pytest.raises(NotImplementedError, match="would train on 'cuda', but"):
    mk.init()
core.DEFAULT_DEVICE = "cpu"
group = mk.init()
kept = keras.distribution.distribution()
assert kept.auto_shard_dataset is False
torch.distributed.destroy_process_group()
mk.init(timeout=60)
assert keras.distribution.distribution() is kept
with pytest.raises(ValueError):
    mk.init()
print("has started")
"""


def test_init_under_torchrun_and_by_the_file_of_settings(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    variables = {"KERAS_BACKEND": "", "KERAS_HOME": str(tmp_path)}
    done = launch.run(["-W", "ignore", "-c", STARTS], limit_s=100, env=variables)
    assert done.stdout == "has started\n", done.stderr


def test_neither_keras_nor_torch_is_imported_early():
    code = "import sys, mpistrat, mpistrat.keras\nprint({'keras', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    code = "import sys, mpistrat.torch\nprint({'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
