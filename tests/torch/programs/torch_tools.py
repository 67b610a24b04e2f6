"""Tools of torch itself over groups of this package: each part asserts; the end says so."""

import os
import signal
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import mpistrat as ms
import mpistrat.torch as mst

PARTS = {}


def part(function):
    PARTS[function.__name__] = function


@part
def compiled(rank, size):
    """torch.compile of DDP trains as DDP itself does."""
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        plain = DistributedDataParallel(torch.nn.Sequential(*layers))
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        inner = torch.nn.Sequential(*layers)
        model = torch.compile(DistributedDataParallel(inner), backend=backend)
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
        for each in (plain, model):
            for _ in range(3):
                each.zero_grad()
                (each(rows) ** 2).sum().backward()
        torch.testing.assert_close(plain.module[0].weight.grad, inner[0].weight.grad)


@part
def hooks(rank, size):
    """The communication hooks that are written in C++."""
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = DistributedDataParallel(torch.nn.Linear(8, 8))
        model._register_builtin_comm_hook(kind)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 8) * (rank + 1)).sum().backward()
            assert abs(model.module.weight.grad[0, 0].item() - (size + 1)) < 1e-2


@part
def profile(rank, size):
    """The profiler shows collectives, those of a thread too."""
    with torch.profiler.profile() as found:
        dist.all_reduce(torch.ones(100))
        work = dist.all_reduce(torch.ones(1 << 21), async_op=True)
        work.wait()
        dist.broadcast(torch.ones(3), 0)
    counts = {each.key: each.count for each in found.key_averages()}
    assert counts["mpistrat:all_reduce"] == 2
    assert counts["mpistrat:broadcast"] == 1


@part
def numbers(rank, size):
    """Sequence numbers count the operations of a group."""
    group = dist.new_group()
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    group._set_sequence_number_for_group()
    assert group._get_sequence_number_for_group() == before + 3
    dist.destroy_process_group(group)


@part
def meta(rank, size):
    """Nothing depends on the default device."""
    torch.set_default_device("meta")
    try:
        host = {"device": "cpu"}
        tensor = torch.full((5,), float(rank), **host)
        parts = [torch.zeros(5, **host) for _ in range(size)]
        dist.all_gather(parts, tensor)
        assert [each[0].item() for each in parts] == list(range(size))
        dist.all_to_all(parts, [each.clone() for each in parts])
        dist.reduce_scatter(tensor, parts)
        places = torch.tensor([[0, 1]], **host)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sparse = torch.sparse_coo_tensor(places, torch.ones(2, **host), (4,), **host)
        dist.all_reduce(sparse)
        rows = ms.data.Dataset.from_arrays({"x": np.arange(8.0)}).batch(4)
        assert all(each["x"].device.type == "cpu" for each in mst.HDF5Dataset(rows))
        model = torch.nn.Linear(3, 2, **host)
        mst.assert_replicas_agree(torch.zeros(3, **host))
        checkpoint = ms.Checkpoint(model=model)
        checkpoint.write(f"{FOLDER}/meta.h5")
        checkpoint.restore(f"{FOLDER}/meta.h5")
        DistributedDataParallel(model)(torch.ones(2, 3, **host)).sum().backward()
    finally:
        torch.set_default_device(None)


@part
def numpy_values(rank, size):
    """NumPy's arrays and scalars in a state dict of torch's checkpoints."""
    values = {
        "float": np.float64(3.5),
        "int": np.int16(3),
        "flag": np.bool_(True),
        "text": np.str_("a"),
        "array": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "random": np.random.default_rng(1).integers(0, 2**32, 624, dtype=np.uint32),
        "complex": np.array([1 + 2j]),
        "big-endian": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 2), np.float32),
        "in a list": [np.float32(0.5), {"deep": np.arange(2)}],
    }
    path = f"{FOLDER}/numpy.h5"
    state = {"weight": torch.ones(3), "values": values}
    dcp.save(state, storage_writer=mst.HDF5Writer(path))
    blank = {
        name: None if name == "in a list" else each * 0 if name != "text" else each
        for name, each in values.items()
        if name != "flag"
    }
    blank |= {"flag": np.bool_(False), "in a list": [None, {"deep": None}]}
    loaded = {"weight": torch.zeros(3), "values": blank}
    dcp.load(loaded, storage_reader=mst.HDF5Reader(path))
    found = loaded["values"]
    for name, each in values.items():
        if name == "in a list":
            assert found[name][0] == np.float32(0.5)
            assert found[name][1]["deep"].tolist() == [0, 1]
        else:
            assert type(found[name]) is type(each), name
            assert found[name].dtype == each.dtype.newbyteorder("="), name
            assert np.array_equal(found[name], each), name
    with pytest.raises(dcp.api.CheckpointException, match="TypeError"):
        dcp.save({"x": np.array([object()])}, storage_writer=mst.HDF5Writer(path))


@part
def interrupt(rank, size):
    """Ctrl-C while backward waits for another rank is KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = DistributedDataParallel(torch.nn.Linear(400, 400))
    for _ in range(3):
        model(torch.ones(2, 400)).sum().backward()
    dist.barrier()
    loss = model(torch.ones(2, 400)).sum()
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(1.5)
    try:
        loss.backward()
        time.sleep(0.2)
        assert rank > 0
    except KeyboardInterrupt:
        assert rank == 0


@part
def aborted(rank, size):
    """A group without operations is aborted by one rank, and the program ends well."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(2), group=group)
    if rank == 0:
        group.abort()
        group.abort()
    dist.barrier()


if __name__ == "__main__":
    FOLDER, chosen = sys.argv[1], sys.argv[2:] or list(PARTS)
    mst.init(timeout=60)
    for name in chosen:
        PARTS[name](dist.get_rank(), dist.get_world_size())
    print(f"{', '.join(chosen)}: all is well", flush=True)
