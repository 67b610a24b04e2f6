"""The jobs with PyTorch: all learn the same, and each resumes from checkpoints of the others."""

import re
import shutil
from importlib.util import find_spec

import h5py
import numpy as np
import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.timeout(200)]


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the package {package}")


JOBS = [
    pytest.param("fsdp"),
    pytest.param("fabric", marks=needs("lightning")),
    pytest.param("accelerate", marks=needs("accelerate")),
]
"""Those that must do what `train_torch_ddp.py` does."""


class TorchJob:
    """One of the jobs, with the data and a folder of checkpoints."""

    def __init__(self, name, data, output):
        self.program = ROOT / "jobs" / f"train_torch_{name}.py"
        self.options = ["--data", data, "--output", output, "--epochs", "3"]
        self.output = output

    def run(self, ranks, torchrun=False):
        """Run it to the third epoch, and return what it prints."""
        program = [self.program, *self.options]
        if torchrun:
            program = [
                "-m",
                *f"torch.distributed.run --standalone --nproc-per-node={ranks}".split(),
                *program,
            ]
        done = launch.run(program, None if torchrun else ranks, limit_s=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout

    def drop_checkpoints(self, *epochs):
        for epoch in epochs:
            (self.output / f"checkpoint-{epoch}.h5").unlink()

    def tensors(self):
        """Return the tensors after the third epoch by name."""
        found = {}
        with h5py.File(self.output / "checkpoint-3.h5") as file:
            for name in ("model", "optimizer"):
                file["variables"][name].visititems(
                    lambda path, item: (
                        found.update({path: item[()]} if item.shape else {})
                        if isinstance(item, h5py.Dataset)
                        else None
                    )
                )
        assert {"0.weight", "4.bias", "state/3/momentum_buffer"} <= found.keys()
        return found


def losses(text):
    return [float(loss) for loss in re.findall(r"^epoch \d+, loss: (\S+),", text, re.MULTILINE)]


def accuracy(text):
    return float(re.search(r"test accuracy: (\S+)\n*$", text)[1])


def assert_same_tensors(job, other):
    ours, theirs = job.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def alone(digits, tmp_path_factory):
    """The job with DDP after a run on one rank, which is only looked at."""
    if find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    job = TorchJob("ddp", digits, tmp_path_factory.mktemp("alone"))
    job.text = job.run(ranks=1)
    return job


def test_it_learns(alone):
    assert len(losses(alone.text)) == 3
    assert accuracy(alone.text) > 0.85


def test_ddp_resumes_to_the_same_parameters_on_another_number_of_ranks(alone, digits, tmp_path):
    job = TorchJob("ddp", digits, tmp_path)
    shutil.copy(alone.output / "checkpoint-1.h5", job.output)
    resumed = job.run(ranks=3)
    assert f"resumes from {tmp_path}/checkpoint-1.h5 on 3 rank(s)" in resumed
    assert "epoch 1," not in resumed
    assert_same_tensors(job, alone)


def test_ddp_resumes_under_torchrun_and_from_there(alone, digits, tmp_path):
    job = TorchJob("ddp", digits, tmp_path)
    shutil.copy(alone.output / "checkpoint-1.h5", job.output)
    resumed = job.run(3, torchrun=True)
    assert "checkpoint-1.h5 on 3 rank(s)" in resumed
    np.testing.assert_allclose(losses(resumed), losses(alone.text)[1:], atol=2e-4)
    assert_same_tensors(job, alone)
    job.drop_checkpoints(3)
    assert "checkpoint-2.h5 on 2 rank(s)" in job.run(2)
    assert_same_tensors(job, alone)


@pytest.mark.parametrize("name", JOBS)
def test_the_losses_are_those_of_ddp_on_one_rank(name, alone, digits, tmp_path):
    job = TorchJob(name, digits, tmp_path)
    text = job.run(ranks=2)
    np.testing.assert_allclose(losses(text), losses(alone.text), atol=2e-4)
    assert accuracy(text) == pytest.approx(accuracy(alone.text), abs=0.01)
    assert_same_tensors(job, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_it_resumes_from_ddp_and_from_itself_at_another_number_of_ranks(
    name, alone, digits, tmp_path
):
    job = TorchJob(name, digits, tmp_path)
    shutil.copy(alone.output / "checkpoint-1.h5", job.output)
    assert "checkpoint-1.h5 on 2 rank(s)" in job.run(ranks=2)
    job.drop_checkpoints(3)
    assert "checkpoint-2.h5 on 3 rank(s)" in job.run(ranks=3)
    assert_same_tensors(job, alone)
    ddp = TorchJob("ddp", digits, tmp_path)
    ddp.drop_checkpoints(3)
    assert "checkpoint-2.h5 on 1 rank(s)" in ddp.run(ranks=1)
    assert_same_tensors(ddp, alone)


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("ddp", "torch", "needs PyTorch: pip install torch"),
        pytest.param(
            *("fabric", "lightning", "needs Lightning: pip install lightning"), marks=needs("torch")
        ),
        pytest.param(
            *("accelerate", "accelerate", "needs Accelerate: pip install accelerate"),
            marks=needs("torch"),
        ),
    ],
)
def test_a_missing_package_is_one_line(name, missing, said):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'jobs')!r}); "
        f"sys.modules[{missing!r}] = None; import train_torch_{name}"
    )
    done = launch.run(["-c", program])
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
