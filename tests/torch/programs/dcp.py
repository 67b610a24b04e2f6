"""Saves or loads a sharded state by torch.distributed.checkpoint: see `main`."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from joining import join
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import mpistrat.torch as mst
from mpistrat.testing.launch import rank_and_size


def made(seed, is_sharded=True):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    if is_sharded:
        fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def state_of(module, optimizer, step):
    names = "model", "optimizer"
    return {**dict(zip(names, get_state_dict(module, optimizer), strict=True)), "step": step}


def whole(state):
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def save(path):
    dcp.save(state_of(*made(1), 5), storage_writer=mst.HDF5Writer(path))


def load(path, is_sharded=True):
    module, optimizer = made(2, is_sharded)
    state = state_of(module, optimizer, 0)
    dcp.load(state, storage_reader=mst.HDF5Reader(path))
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert state["step"] == 5
    found, expected = whole(state_of(module, optimizer, 5)), state_of(*made(1, False), 5)
    groups = [each["optimizer"].pop("param_groups") for each in (found, expected)]
    assert groups[0] == groups[1]
    torch.testing.assert_close(found, expected)


class Dies(DefaultSavePlanner):
    """Is killed while it writes."""

    def resolve_data(self, item):
        found = super().resolve_data(item)
        if dist.get_rank() == int(os.environ["VICTIM"]) and item.index.fqn.endswith("last"):
            Path(sys.argv[2]).with_name("began").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def shards(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((40, 50), value)
    return {"m": {name: distribute_tensor(full, mesh, [Shard(0)]) for name in ("w", "last")}}


def killed(path, is_asynchronous):
    dcp.save(shards(1.0), storage_writer=mst.HDF5Writer(path))
    state, writer = shards(2.0), mst.HDF5Writer(path)
    if is_asynchronous:
        group = dist.new_group()
        dcp.async_save(state, storage_writer=writer, planner=Dies(), process_group=group).result()
    else:
        dcp.save(state, storage_writer=writer, planner=Dies())


def again(path):
    """Save in the place of what was killed, whose remains disappear."""
    dcp.save(shards(3.0), storage_writer=mst.HDF5Writer(path))
    state = shards(0.0)
    dcp.load(state, storage_reader=mst.HDF5Reader(path))
    assert (state["m"]["w"].full_tensor() == 3).all()


def main(what, path):
    if what == "alone":  # without any process group
        load(path, is_sharded=False)
        return
    if what == "gloo":
        rank, size = rank_and_size()
        dist.init_process_group(
            "gloo", init_method=f"file://{path}.store", rank=rank, world_size=size
        )
        save(path)
        load(path)
    else:
        join()
        if what.startswith("killed"):
            killed(path, what.endswith("async"))
        else:
            {"save": save, "load": load, "again": again}[what](path)
    dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
