"""Lightning's trainer learns over MPI what it learns over gloo, and resumes from HDF5 files."""

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
needs_lightning = pytest.mark.skipif(
    find_spec("lightning") is None or find_spec("torch") is None, reason="needs Lightning"
)

PROGRAM = Path(__file__).parent / "programs" / "training.py"


def run(*arguments, ranks=None):
    return launch.run(["-W", "ignore", PROGRAM, *arguments], ranks, 150)


def succeeded(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_lightning
def test_it_learns_over_mpi_what_it_learns_over_gloo(tmp_path):
    folders = [tmp_path / "gloo", tmp_path / "mpi"]
    for each in folders:
        each.mkdir()
    said = torchrun.run([PROGRAM, "compare", folders[0]], 2)
    assert said.count("is done without MPI") == 2
    assert succeeded(run("compare", folders[1], ranks=2)).count("is done with MPI") == 2
    gloo, mpi = (np.load(each / "found.npz") for each in folders)
    assert {"ddp weights", "sharded weights", "hdf5 weights"} <= set(gloo)
    for name in gloo:
        np.testing.assert_allclose(mpi[name], gloo[name], rtol=1e-6, err_msg=name)


@needs_lightning
def test_a_training_resumes_after_any_step_and_names_mistakes(tmp_path):
    assert succeeded(run("checks", tmp_path, ranks=2)).count("is done") == 2


@needs_lightning
def test_killed_and_preempted_jobs_resume_on_other_numbers_of_ranks(tmp_path):
    folder, path = tmp_path / "runs", tmp_path / "expected.npz"
    succeeded(run("reference", path))
    assert run("ended", folder, "kill", "13", ranks=2).returncode != 0
    assert (folder / "checkpoint-10.h5").exists()
    preempted = run("ended", folder, "term", "16", ranks=3)
    assert preempted.returncode == 75, preempted.stdout + preempted.stderr
    assert "resumed from checkpoint-16.h5" in succeeded(run("resumed", folder, path, ranks=1))
    assert not [each for each in folder.iterdir() if not each.name.startswith("checkpoint-")]


@needs_lightning
def test_the_programs_of_the_page_and_the_docstrings_run(tmp_path):
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        pytest.skip("needs transformers and accelerate")
    page = (ROOT / "docs" / "howto" / "lightning-transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text("\n".join(blocks))
    succeeded(launch.run(["-W", "ignore", "train.py"], 2, 150, cwd=tmp_path))
    examples = tmp_path / "examples"
    examples.mkdir()
    done = launch.run(["-W", "ignore", PROGRAM.with_name("examples.py")], None, 150, cwd=examples)
    assert succeeded(done).endswith("is done\n")
    for name, steps in (("lightning", (10, 20, 30, 40)), ("transformers", (8,))):
        found = {each.name for each in (tmp_path / "runs" / name).iterdir()}
        assert found == {f"checkpoint-{step}.h5" for step in steps}


def test_lightning_is_not_imported_early_and_a_missing_one_is_named():
    code = (
        "import sys, mpistrat.lightning as ml\n"
        "print({'lightning', 'pytorch_lightning', 'torch', 'mpi4py.MPI'} & set(sys.modules))\n"
        "sys.modules |= dict.fromkeys(('lightning', 'pytorch_lightning'))\n"
        "ml.HDF5Checkpoint"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
    assert done.returncode == 1
    if find_spec("torch") is not None:
        assert "which is not installed: pip install lightning\n" in done.stderr


def test_older_versions_are_refused():
    with pytest.raises(NotImplementedError, match="needs Lightning 2.6 or newer, and this is 2.4"):
        check_version(object(), "2.4.0")
