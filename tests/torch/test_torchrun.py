"""Datasets and checkpoints in programs that torchrun starts, without MPI."""

import itertools
import json
import os
import random
import re
import signal
import time

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpistrat.checkpoint.reader import open_checkpoint  # noqa: E402
from mpistrat.sharding import slice_of_rank  # noqa: E402
from mpistrat.testing import launch  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.torch import torchrun  # noqa: E402

pytestmark = [pytest.mark.launches, pytest.mark.timeout(600)]

START = "import torch.distributed as dist, mpistrat as ms, mpistrat.torch as mst\n"


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("gloo", 1),
        ("gloo", 2),
        pytest.param("gloo", 3, marks=pytest.mark.quick),
        # A group without a backend for the host, as one of NCCL.
        ("cuda:gloo", 2),
        pytest.param(
            *("nccl", 1),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
        ),
    ],
)
def test_all_that_a_group_without_mpi_can_do(tmp_path, backend, ranks):
    program = [torchrun.PROGRAMS / "group_checks.py", backend, tmp_path]
    printed = torchrun.run(program, ranks)
    assert all(f"rank {rank} is done" in printed for rank in range(ranks))


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def shown(launcher, ranks, action, path, folder):
    """Return the global batches that a program has printed part by part."""
    program = [torchrun.PROGRAMS / "data_positions.py", action, path, folder]
    printed = torchrun.run_on(launcher, program, ranks)
    lines = [json.loads(line) for line in printed.splitlines()]
    for parts in lines:
        whole = joined(parts)
        assert parts == [whole[slice_of_rank(len(whole), ranks, rank)] for rank in range(ranks)]
    return [joined(parts) for parts in lines]


def test_a_position_moves_between_torchrun_and_mpi(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("label", data=np.arange(43), chunks=(5,))
    read = {}
    for launcher, ranks in (("torchrun", 3), ("mpiexec", 2)):
        folder = tmp_path / launcher
        folder.mkdir()
        read[launcher] = shown(launcher, ranks, "read", path, folder)
    assert read["torchrun"] == read["mpiexec"]
    assert contents(tmp_path / "torchrun/position.h5") == contents(tmp_path / "mpiexec/position.h5")
    resumed = [
        shown("mpiexec", 2, "resume", path, tmp_path / "torchrun"),
        shown("mpiexec", 1, "resume", path, tmp_path / "torchrun"),
        shown("torchrun", 2, "resume", path, tmp_path / "mpiexec"),
    ]
    assert all(each == resumed[0] for each in resumed)
    assert resumed[0][3:] == read["mpiexec"][2:]


def contents(path):
    """Return everything in a file except when, by whom, and with which library it was written."""
    found = {}

    def visit(name, item):
        found[name] = {key: str(value) for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            found[name]["values"] = str(item.dtype), item.shape, item[()].tobytes()

    with h5py.File(path) as file:
        visit("/", file)
        file.visititems(visit)
    # The digest is of these attributes too.
    for name in ("created", "digest", "mpi_library", "num_replicas"):
        del found["/"][name]
    found["variables"].pop("writers", None)
    return found


def test_files_are_those_that_mpi_writes(tmp_path):
    for launcher in ("torchrun", "mpiexec"):
        program = [torchrun.PROGRAMS / "saves.py", tmp_path / f"{launcher}.h5"]
        torchrun.run_on(launcher, program, 2)
    assert contents(tmp_path / "torchrun.h5") == contents(tmp_path / "mpiexec.h5")
    with h5py.File(tmp_path / "torchrun.h5") as file:
        assert file.attrs["mpi_library"] == b"none"
        assert file["variables"].attrs["writers"] == b"ranks 0-1 of 2"


def test_shards_move_between_torchrun_and_mpi(tmp_path):
    program = torchrun.PROGRAMS / "shards.py"
    path = tmp_path / "run.h5"
    torchrun.run([program, "save", path], 3)
    torchrun.run_on("mpiexec", [program, "restore", path], 2)
    torchrun.run([program, "restore", path], 1)


def test_the_storage_of_dcp(tmp_path):
    program = torchrun.PROGRAMS / "dcp.py"
    torchrun.run([program, "save", tmp_path / "run.h5"], 3)
    torchrun.run([program, "load", tmp_path / "run.h5"], 2)


def test_importing_imports_no_mpi():
    code = "import sys, mpistrat.torch; print([n for n in sys.modules if n.startswith('mpi4py')])"
    done = launch.run(["-c", code])
    assert done.stdout == "[]\n", done.stderr


def test_the_program_of_the_page(tmp_path):
    page = (ROOT / "docs/guide/pytorch.md").read_text()
    mark = "<!-- under torchrun -->\n<!-- not run -->\n"
    (code,) = re.findall(rf"{mark}```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = tmp_path / "train.py"
    program.write_text(code)
    torchrun.run([program], 2, cwd=tmp_path)
    torchrun.run([program], 1, cwd=tmp_path)  # which resumes
    with open_checkpoint(tmp_path / "runs/torchrun/checkpoint-10.h5") as reader:
        reader.verify()


def test_a_group_is_needed(tmp_path):
    program = tmp_path / "no_group.py"
    program.write_text(f"{START}mst.HDF5Dataset(ms.data.Dataset.range(8).batch(4))\n")
    said = torchrun.failure([program], 2)
    words = "Call mpistrat.torch.init() or torch.distributed.init_process_group(...) first."
    assert "LaunchError: HDF5Dataset: this process is one of several" in said
    assert words in said


def test_a_rank_that_does_not_arrive_is_awaited_as_long_as_the_group_waits(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        f"{START}"
        "import time, datetime, torch\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=4))\n"
        "checkpoint = ms.Checkpoint(model=torch.nn.Linear(1, 1))\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(60)\n"
        "began = time.monotonic()\n"
        "try:\n"
        "    checkpoint.write('run.h5')\n"
        "except RuntimeError as error:\n"
        "    print(f'{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}')\n"
        "try:\n"
        "    checkpoint.write('run.h5')\n"
        "except ms.errors.CollectiveError as error:\n"
        "    print(error)\n"
        "raise SystemExit(3)\n"
    )
    done = launch.run(torchrun.command([program], 2), None, 50, cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r"(?m)^RuntimeError after [3-9] s: .*[Tt]imed out", done.stdout), done
    assert "The wait for Checkpoint.write at late.py:9 was interrupted" in done.stdout
    assert not list(tmp_path.glob("*.h5"))


@pytest.mark.parametrize(
    ("switch", "victim"),
    [
        ("plain", 0),
        *[
            pytest.param(switch, victim, marks=pytest.mark.slow)
            for switch, victim in (("plain", 1), ("asynchronous", 0), ("parallel", 1))
        ],
    ],
)
def test_a_killed_rank_loses_no_checkpoint(tmp_path, switch, victim):
    folder = tmp_path / "runs"
    program = [torchrun.PROGRAMS / "endless_saves.py", folder, switch]
    chance = random.Random(f"{switch} {victim}")
    launched = launch.Launched(torchrun.command(program, 2), None, cwd=tmp_path)
    launched.wait_for_output("saved 3\n")
    time.sleep(chance.uniform(0, 0.3))
    os.kill(int((tmp_path / f"pid-{victim}").read_text()), signal.SIGKILL)
    assert launched.finish(60).returncode != 0
    reported = [int(each) for each in re.findall(r"saved (\d+)\n", launched.stdout())]
    assert reported == list(range(1, len(reported) + 1))
    steps = {}
    for path in folder.glob("*.h5"):
        with open_checkpoint(path) as reader:
            reader.verify()
            steps[reader.header.step] = reader.read_variable("model/weight")
    assert max(steps) >= reported[-1]
    assert all((values == step).all() for step, values in steps.items())
    # A new start goes on from there, on another number of ranks.
    launched = launch.Launched(torchrun.command(program, 3), None, cwd=tmp_path)
    launched.wait_for_output(f"saved {max(steps) + 3}\n")
    launched.kill()
    assert launched.stdout().startswith(f"saved {max(steps) + 1}\n")
