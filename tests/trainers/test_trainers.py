"""Lightning and Hugging Face learn over MPI what they learn over gloo, and resume from HDF5."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mpistrat.lightning.requirements import check_version
from mpistrat.testing import launch
from tests import ROOT
from tests.torch import torchrun

pytestmark = [pytest.mark.launches, pytest.mark.timeout(300)]
PACKAGES = {
    "lightning": ("lightning", "torch"),
    "transformers": ("transformers", "accelerate", "torch"),
}
PROGRAMS = Path(__file__).parent / "programs"


def needs(*names):
    missing = [each for name in names for each in PACKAGES[name] if find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


each_trainer = pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=needs(name)) for name in PACKAGES]
)


def run(trainer, *arguments, ranks=None):
    command = ["-W", "ignore", PROGRAMS / f"{trainer}_training.py", *arguments]
    return launch.run(command, ranks, 150, env={"ON_MPI": "1"} if ranks else None)


def succeeded(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


COMPARED = {
    "lightning": ("compare", {"ddp weights", "sharded weights", "hdf5 weights"}),
    "transformers": ("checks", {"plain weights", "accumulated weights", "limited weights"}),
}


@each_trainer
def test_it_learns_over_mpi_what_it_learns_over_gloo(trainer, tmp_path):
    command, expected = COMPARED[trainer]
    folders = [tmp_path / "gloo", tmp_path / "mpi"]
    for each in folders:
        each.mkdir()
    said = torchrun.run([PROGRAMS / f"{trainer}_training.py", command, folders[0]], 2)
    assert said.count("is done without MPI") == 2
    done = run(trainer, command, folders[1], ranks=2)
    assert succeeded(done).count("is done with MPI") == 2
    gloo, mpi = (np.load(each / "found.npz") for each in folders)
    assert expected <= set(gloo)
    for name in gloo:
        np.testing.assert_allclose(mpi[name], gloo[name], rtol=1e-6, err_msg=name)


@needs("lightning")
def test_a_training_resumes_after_any_step_and_names_mistakes(tmp_path):
    assert succeeded(run("lightning", "checks", tmp_path, ranks=2)).count("is done") == 2


# The files of both trainers are those of one component; its job resumes transformers in CI, too.
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("lightning", marks=needs("lightning")),
        pytest.param("transformers", marks=[needs("transformers"), pytest.mark.campaign]),
    ],
)
def test_killed_and_preempted_jobs_resume_on_other_numbers_of_ranks(trainer, tmp_path):
    folder, path = tmp_path / "runs", tmp_path / "expected.npz"
    succeeded(run(trainer, "reference", path))
    assert run(trainer, "ended", folder, "kill", "13", ranks=2).returncode != 0
    assert (folder / "checkpoint-10.h5").exists()
    preempted = run(trainer, "ended", folder, "term", "16", ranks=3)
    assert preempted.returncode == 75, preempted.stdout + preempted.stderr
    resumed = run(trainer, "resumed", folder, path, ranks=1)
    assert "resumed from checkpoint-16.h5" in succeeded(resumed)
    assert not [each for each in folder.iterdir() if not each.name.startswith("checkpoint-")]


@needs("lightning", "transformers")
def test_the_programs_of_the_page_and_the_docstrings_run(tmp_path):
    page = (ROOT / "docs" / "howto" / "lightning-transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text("\n".join(blocks))
    succeeded(launch.run(["-W", "ignore", "train.py"], 2, 150, cwd=tmp_path))
    examples = tmp_path / "examples"
    examples.mkdir()
    done = launch.run(["-W", "ignore", PROGRAMS / "examples.py"], None, 150, cwd=examples)
    assert succeeded(done).endswith("is done\n")
    for name, steps in (("lightning", (10, 20, 30, 40)), ("transformers", (8,))):
        found = {each.name for each in (tmp_path / "runs" / name).iterdir()}
        assert found == {f"checkpoint-{step}.h5" for step in steps}


@pytest.mark.parametrize(
    ("package", "module", "missing"),
    [
        ("lightning", "mpistrat.lightning", "which is not installed: pip install lightning\n"),
        ("transformers", "mpistrat.transformers", "pip install transformers accelerate\n"),
    ],
)
def test_a_trainer_is_not_imported_early_and_a_missing_one_is_named(package, module, missing):
    names = [package, f"pytorch_{package}"]
    code = (
        f"import sys, {module} as module\n"
        f"print({{*{names}, 'torch', 'mpi4py.MPI'}} & set(sys.modules))\n"
        f"sys.modules |= dict.fromkeys({names})\n"
        "module.HDF5Checkpoint"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
    assert done.returncode == 1
    if find_spec("torch") is not None:
        assert missing in done.stderr


def test_older_versions_are_refused():
    with pytest.raises(NotImplementedError, match="needs Lightning 2.6 or newer, and this is 2.4"):
        check_version(object(), "2.4.0")
