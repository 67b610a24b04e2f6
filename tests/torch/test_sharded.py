"""Checkpoints of sharded tensors: each rank writes and reads its own shards, and no more."""

import os

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mpistrat as ms
import mpistrat.torch as mst
from mpistrat.checkpoint.reader import open_checkpoint

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.mpi]

MIB = 2**20


@pytest.fixture
def path(shared_tmp_path):
    with mst.strategy().scope():
        yield shared_tmp_path / "run.h5"


class Weight(nn.Module):
    """A module with one tensor, sharded over `mesh`."""

    def __init__(self, full, mesh, layout):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(full, mesh, layout, src_data_rank=None))


def peak_mib(work):
    """Return how many MiB of memory `work` needs at most, beyond what there was."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("the system does not reset the peak of memory")
    before = status_mib("VmRSS")
    work()
    return status_mib("VmHWM") - before


def status_mib(name):
    with open("/proc/self/status") as file:
        (line,) = (each for each in file if each.startswith(name))
    return int(line.split()[1]) / 1024


def test_memory_does_not_depend_on_the_whole(path):
    size = dist.get_world_size()
    if size == 1:
        pytest.skip("one rank has all of it")
    mesh = init_device_mesh("cpu", (size,))
    whole_mib, spare_mib = 128, 30
    length = whole_mib * MIB // 4 // 1024
    saved = Weight(torch.arange(float(length)).expand(1024, length).T, mesh, [Shard(0)])
    torch.manual_seed(0)
    ms.Checkpoint(first=nn.Linear(2, 2)).write(path)  # imports what every save needs
    assert peak_mib(lambda: ms.Checkpoint(model=saved).write(path)) < spare_mib
    with torch.no_grad():
        loaded = Weight(torch.zeros(length, 1024), mesh, [Shard(0)])
    restore = ms.Checkpoint(model=loaded).restore
    assert peak_mib(lambda: restore(path).assert_consumed()) < whole_mib / size + spare_mib
    assert torch.equal(loaded.weight.to_local(), saved.weight.to_local())


@pytest.mark.thorough_product
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("saved_layout", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("loaded_layout", [Shard(0), Shard(1), Replicate()])
def test_large_shards_of_any_layout(path, parallel, saved_layout, loaded_layout):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(300_000.0).reshape(1000, 300)
    ms.Checkpoint(model=Weight(full, mesh, [saved_layout])).write(path, parallel=parallel)
    with h5py.File(path) as file:
        assert np.array_equal(file["variables/model/weight"], full.numpy())
    loaded = Weight(torch.zeros(1000, 300), mesh, [loaded_layout])
    ms.Checkpoint(model=loaded).restore(path).assert_consumed()
    assert torch.equal(loaded.weight.full_tensor(), full)


def test_groups_that_shard_the_same_tensor_write_it_once(path):
    size = dist.get_world_size()
    if size < 4 or size % 2:
        pytest.skip("needs two groups of several ranks")
    groups = torch.arange(size).reshape(2, -1).tolist()
    meshes = [DeviceMesh("cpu", each) for each in groups]
    mesh = meshes[dist.get_rank() >= size // 2]
    full = torch.arange(200_000.0).reshape(1000, 200)
    ms.Checkpoint(model=Weight(full, mesh, [Shard(0)])).write(path)
    loaded = Weight(torch.zeros(1000, 200), mesh, [Shard(0)])
    ms.Checkpoint(model=loaded).restore(path).assert_consumed()
    assert torch.equal(loaded.weight.full_tensor(), full)


@pytest.mark.parametrize("shape", [(500, 200), (3, 2)])
def test_a_mesh_of_some_of_the_ranks(path, shape):
    rank, size = dist.get_rank(), dist.get_world_size()
    members = list(range(size // 2, size))
    mesh = DeviceMesh("cpu", members)
    full = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    module = Weight(full, mesh, [Shard(0)])
    ms.Checkpoint(model=module).write(path)
    with h5py.File(path) as file:
        assert np.array_equal(file["variables/model/weight"], full.numpy())
    with torch.no_grad():
        module.weight.to_local().zero_()
    ms.Checkpoint(model=module).restore(path).assert_consumed()
    if rank in members:
        assert torch.equal(module.weight.full_tensor(), full)
    if size > 1:
        manager = ms.CheckpointManager(ms.Checkpoint(model=module), path.parent, asynchronous=True)
        with pytest.raises(ms.errors.ContextError, match="DTensor of which rank 0 has no part"):
            manager.save(1)


def test_ranks_that_differ_in_what_is_sharded_are_told(path):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        pytest.skip("needs ranks that differ")
    mesh = init_device_mesh("cpu", (size,))
    module = Weight(torch.ones(size, 2), mesh, [Shard(0)])
    if rank:
        module.weight = nn.Parameter(torch.ones(size, 2))
    with pytest.raises(ms.errors.CheckpointError, match="model: differs between rank 0 and rank"):
        ms.Checkpoint(model=module).write(path)


def test_damage_of_a_sharded_tensor_changes_nothing(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ms.Checkpoint(model=Weight(torch.ones(1000, 300), mesh, [Shard(0)])).write(path)
    if dist.get_rank() == 0:
        with open_checkpoint(path) as reader:
            offset = reader.extent_of("model/weight").offset
        with open(path, "r+b") as file:
            file.seek(offset + 1_000_000)
            file.write(b"\x99")
    dist.barrier()
    loaded = Weight(torch.zeros(1000, 300), mesh, [Shard(0)])
    with pytest.raises(ms.errors.CheckpointCorruptError, match="damaged at model/weight"):
        ms.Checkpoint(model=loaded).restore(path)
    assert not loaded.weight.to_local().any()


def test_a_manager_gathers_shards_for_an_asynchronous_save(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(300_000.0).reshape(1000, 300)
    module = Weight(full, mesh, [Shard(0)])
    manager = ms.CheckpointManager(ms.Checkpoint(model=module), path.parent, asynchronous=True)
    saved = manager.save(1)
    with torch.no_grad():
        module.weight.to_local().zero_()
    manager.wait()
    ms.Checkpoint(model=module).restore(saved).assert_consumed()
    assert torch.equal(module.weight.full_tensor(), full)
    assert os.path.isfile(saved)
