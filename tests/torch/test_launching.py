"""Rendezvous, environment and entry points: torch finds its ranks by MPI."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from mpistrat.testing import launch

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
INIT = """
import os, torch, torch.distributed as dist
import mpistrat.torch as mst
"""


def run(tmp_path, text, ranks=2, limit_s=60, **variables):
    script = tmp_path / "program.py"
    script.write_text(text)
    return launch.run(["-W", "ignore", script], ranks, limit_s, tmp_path, variables)


def test_importing_the_room_starts_no_mpi():
    text = "import mpistrat.torch, sys; assert 'mpi4py.MPI' not in sys.modules"
    assert launch.run(["-c", text]).returncode == 0
    text = "import mpistrat, sys; assert 'torch' not in sys.modules"
    assert launch.run(["-c", text]).returncode == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_init_sets_what_libraries_look_for(tmp_path, ranks):
    text = (
        INIT
        + """
group = mst.init()
assert group is dist.group.WORLD and mst.strategy().rank == dist.get_rank()
assert dist.get_backend() == "mpistrat"
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
open(f"seen-{dist.get_rank()}", "w").write(" ".join(os.environ[name] for name in names))
dist.destroy_process_group()
"""
    )
    result = run(tmp_path, text, ranks)
    assert result.returncode == 0, result.stderr
    seen = [(tmp_path / f"seen-{rank}").read_text().split() for rank in range(ranks)]
    ports = {each.pop() for each in seen}
    assert len(ports) == 1
    assert seen == [[str(r), str(ranks), str(r), str(ranks), "127.0.0.1"] for r in range(ranks)]


def test_the_rendezvous_in_torchs_words_and_again(tmp_path):
    text = (
        INIT
        + """
for _ in range(3):
    dist.init_process_group("mpistrat", init_method="mpi://")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 3
    dist.destroy_process_group()
"""
    )
    assert run(tmp_path, text, 3).returncode == 0


def test_a_group_is_made_after_a_collective_that_failed(tmp_path):
    text = (
        INIT
        + """
import mpistrat as ms
mst.set_environment()
strategy = ms.MPIStrategy(device="cpu")
try:
    strategy.reduce("sum" if strategy.rank else "mean", 1.0)
except ms.errors.CollectiveMismatchError:
    pass
mst.init()
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [dist.get_world_size()] * 3
dist.destroy_process_group()
"""
    )
    result = run(tmp_path, text)
    assert result.returncode == 0, result.stderr


def test_a_second_init_is_torchs_own_error(tmp_path):
    text = (
        INIT
        + """
mst.init()
try:
    mst.init()
except ValueError as error:
    assert "twice" in str(error), error
else:
    raise AssertionError
"""
    )
    assert run(tmp_path, text).returncode == 0


def test_init_starts_none_of_torchs_threads(tmp_path):
    """A child would wait for them forever, and their number could not be set any more."""
    text = (
        INIT
        + """
mst.init()
torch.set_num_interop_threads(2)
if os.fork() == 0:
    def double(x):
        return torch.jit.wait(torch.jit.fork(torch.neg, x))
    os._exit(int(torch.jit.script(double)(torch.ones(2)).sum().item() != -2))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
dist.destroy_process_group()
"""
    )
    result = run(tmp_path, text)
    assert result.returncode == 0, result.stderr


def test_the_time_limit_is_a_number_or_a_timedelta(tmp_path):
    text = (
        INIT
        + """
from datetime import timedelta
for given, expected in ((7, 7), (timedelta(seconds=8), 8), (None, 9)):
    mst.init(timeout=given)
    assert mst.strategy().extended._collectives.channel.timeout_s == expected
    dist.destroy_process_group()
try:
    mst.init(timeout=-1)
except ValueError as error:
    assert "timeout" in str(error)
"""
    )
    result = run(tmp_path, text, MPISTRAT_TIMEOUT_S="9")
    assert result.returncode == 0, result.stderr


def test_torchrun_is_refused_before_anything_waits(tmp_path):
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    for rank, says_why in (("0", True), ("1", False)):  # one of them is enough
        result = run(tmp_path, INIT + "mst.init()", None, RANK=rank, **variables)
        assert result.returncode
        assert ("LaunchError: torchrun" in result.stderr) == says_why
        assert ("mpiexec or srun" in result.stderr) == says_why


def test_ranks_of_another_launcher_are_refused_by_the_creator(tmp_path):
    text = (
        INIT
        + """
from mpi4py import MPI
rank = MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank
dist.init_process_group("mpistrat", store=dist.FileStore("store", 2), rank=rank, world_size=2)
"""
    )
    result = run(tmp_path, text)
    assert result.returncode
    assert re.search(
        r"Torch takes this process for rank [01].*but it is rank [01] of 2 in MPI", result.stderr
    )


@pytest.mark.slow
def test_two_thousand_groups_one_after_the_other(tmp_path):
    text = (
        INIT
        + """
import resource
mst.init()
rank, size = dist.get_rank(), dist.get_world_size()
used = []
for number in range(2000):
    ranks = range(size) if number % 2 else [size - 1]
    group = dist.new_group(ranks)
    if rank in ranks:
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x[0] == len(ranks)
        dist.destroy_process_group(group)
    if number in (200, 1999):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        used.append((len(os.listdir("/proc/self/fd")), memory))
assert used[1][0] <= used[0][0] + 2, used
assert used[1][1] <= used[0][1] + 20_000, used
print("made", rank)
"""
    )
    result = run(tmp_path, text, 2, limit_s=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("made") == 2


def test_entry_points_are_lazy():
    text = """
import torch, sys
import mpistrat_torch_autoload as entry
entry.autoload()
entry.register()
assert "mpistrat" not in sys.modules
assert "mpistrat" in torch.distributed.Backend.backend_list
import mpistrat.torch
"""
    result = launch.run(["-c", text], cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_the_backend_is_known_without_an_import(tmp_path, autoload):
    """By the entry point that torch asks when the name is used, or by that of its start."""
    asks = hasattr(torch.distributed.Backend, "_ensure_backend_registered")
    if autoload == "0" and not asks:
        pytest.skip("needs torch 2.14")
    group = "torch.distributed.backends" if autoload == "0" else "torch.backends"
    if "mpistrat" not in importlib.metadata.entry_points(group=group).names:
        pytest.skip("needs an installed package")
    text = """
import sys, torch, torch.distributed as dist
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert "mpistrat" not in sys.modules
store = dist.FileStore("store", comm.size)
dist.init_process_group("mpistrat", store=store, rank=comm.rank, world_size=comm.size)
x = torch.ones(2)
dist.all_reduce(x)
assert x.tolist() == [comm.size] * 2
assert dist.get_backend() == "mpistrat"
dist.destroy_process_group()
"""
    result = run(tmp_path, text, 2, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert result.returncode == 0, result.stderr
