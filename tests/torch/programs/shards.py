"""Saves a sharded module and its optimizer, or restores them on another number of ranks."""

import sys

import h5py
import pytest
import torch
import torch.distributed as dist
from joining import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mpistrat as ms


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 5)  # which no number of ranks above 1 divides
        self.second = torch.nn.Linear(5, 2, dtype=torch.float64)

    def forward(self, x):
        return self.second(self.first(x).double())


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        self.b.weight = self.a.weight  # of one element, which only one rank has


class Refuses:
    value = 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if state["value"] == 1:
            raise RuntimeError("never")


def made(seed, is_sharded):
    torch.manual_seed(seed)
    model = Model()
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 0.1 * step + 0.1)).square().sum().backward()
        optimizer.step()


def whole(state):
    """Return a state with full tensors."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def check_others(path):
    """Check tied and sharded weights, all ranks as writers, undoing, and what does not fit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tied = fully_shard(Tied(), mesh=mesh)
    sharded, _ = model = made(4, True)
    train(*model, 1)
    other = f"{path}.other"
    ms.Checkpoint(model=sharded, tied=tied, last=Refuses()).write(other, parallel=True)
    with h5py.File(other) as file:
        assert list(file["variables/tied"]) == ["a.weight"]
        assert file["variables/model/second.weight"].shape == (2, 5)
    last = Refuses()
    last.value = 2
    before = whole(dict(sharded.state_dict()))
    train(*model, 1)
    after = whole(dict(sharded.state_dict()))
    with pytest.raises(ms.errors.CheckpointMismatchError, match="never"):
        ms.Checkpoint(model=sharded, last=last).restore(other)
    torch.testing.assert_close(whole(dict(sharded.state_dict())), after)
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"model/a\.weight: missing"):
        ms.Checkpoint(model=tied).restore(other)
    ms.Checkpoint(model=sharded, tied=tied).restore(other).expect_partial()
    torch.testing.assert_close(whole(dict(sharded.state_dict())), before)


class Notes:
    """An object of the user's own with tensors on a mesh of two dimensions."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def check_meshes(path):
    """Check that shards of any layout come back as whole tensors to an object of the user's."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    full = torch.arange(35.0).reshape(7, 5)
    layouts = [Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]
    notes = Notes({i: distribute_tensor(full, mesh, each) for i, each in enumerate(layouts)})
    notes.state["small"] = distribute_tensor(full.bfloat16(), mesh["tp"], [Shard(1)])
    ms.Checkpoint(notes=notes).write(path)
    ms.Checkpoint(notes=notes).restore(path).assert_consumed()
    assert [type(each) for each in notes.state.values()] == 4 * [torch.Tensor]
    assert all(torch.equal(each.float(), full) for each in notes.state.values())


def main(what, path):
    join()
    if what == "save":
        model, optimizer = made(1, True)
        train(model, optimizer, 2)
        ms.Checkpoint(model=model, optimizer=optimizer).write(path)
        with h5py.File(path) as file:
            assert file["variables/model/first.weight"].shape == (5, 3)
            assert file["variables/optimizer/state/0/exp_avg"].shape == (5, 3)
    for is_sharded in (True, False):
        expected, model = made(1, False), made(2, is_sharded)
        train(*expected, 2)
        ms.Checkpoint(model=model[0], optimizer=model[1]).restore(path).assert_consumed()
        for steps in (0, 2):
            train(*expected, steps)
            train(*model, steps)
            for key, value in whole(dict(model[0].state_dict())).items():
                torch.testing.assert_close(value, expected[0].state_dict()[key])
    if what == "save":
        check_others(path)
        check_meshes(f"{path}.notes")
    with torch.device("meta"):
        model, _ = made(3, True)
    ms.Checkpoint(model=model).restore(path).expect_partial()
    assert all(each.device.type == "cpu" for each in model.parameters())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    dist.destroy_process_group()


main(*sys.argv[1:])
