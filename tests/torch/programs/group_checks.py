"""Datasets and checkpoints on a process group without MPI. Arguments: backend, folder."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpistrat as ms
import mpistrat.torch as mst
from mpistrat.context import collectives_of
from mpistrat.sharding import slice_of_rank
from mpistrat.torch import group_transport

backend, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group(backend, timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
LENGTH, BATCH = 43, 10


def numbered():
    return ms.data.Dataset.range(LENGTH).shuffle(3).batch(BATCH)


def parts_of(passes, start=0):
    """Return this rank's parts of some passes, from what one process reads."""
    whole = ms.OneDeviceStrategy().experimental_distribute_dataset(numbered())
    batches = [np.asarray(batch) for _ in range(passes) for batch in whole][start:]
    return own(batches)


def own(batches):
    return [each[slice_of_rank(len(each), size, rank)].tolist() for each in batches]


def check_order():
    dataset = mst.HDF5Dataset(numbered())
    assert (dataset.strategy.rank, dataset.strategy.size) == (rank, size)
    assert dataset.num_batches == 5
    read = [batch.tolist() for _ in range(2) for batch in dataset]
    assert read == parts_of(2)
    assert dataset.state_dict()["pass"] == 2
    dataset.set_epoch(1)
    assert [batch.tolist() for batch in dataset] == parts_of(2, 5)
    elements = iter(mst.HDF5Dataset(numbered(), group=dist.group.WORLD))
    assert next(elements).tolist() == parts_of(1)[0]
    with pytest.raises(
        ValueError, match="num_workers must be 0: mpistrat reads in threads"
    ) as info:
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
    assert "MPI" not in str(info.value)


def check_positions():
    dataset = mst.HDF5Dataset(numbered())
    elements = iter(dataset)
    next(elements), next(elements)
    state = dataset.state_dict()
    assert dataset.strategy.gather_objects(state) == [state] * size
    again = mst.HDF5Dataset(numbered())
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == parts_of(1, 2)


def check_files():
    """Check sources and transformations whose preparation needs messages."""
    path = folder / "numbers.h5"
    if rank == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(LENGTH), chunks=(4,), compression="gzip")
    wait_for_all()
    base = ms.data.Dataset.from_hdf5(str(path), "x")
    for dataset in (
        base.shuffle(1).batch(BATCH),
        base.filter(lambda x: x % 3 != 0).shuffle(1).batch(BATCH),
        base.cache().shuffle(1).batch(BATCH),
        base.batch(4).unbatch().batch(BATCH),
        ms.data.Dataset.from_hdf5(str(folder / "numbers*.h5"), "x").batch(BATCH),
    ):
        expected = own(list(dataset))
        assert [batch.tolist() for batch in mst.HDF5Dataset(dataset)] == expected


def check_differences():
    if size == 1:
        return
    with pytest.raises(
        ms.errors.DataError, match=r"rank 0 has 40 examples, rank 1 has 41 examples"
    ):
        mst.HDF5Dataset(ms.data.Dataset.range(40 + rank).batch(BATCH))
    with pytest.raises(ms.errors.DataError, match="a bad example"):
        mst.HDF5Dataset(ms.data.Dataset.range(40).filter(fails_on_rank_1).batch(BATCH))
    list(mst.HDF5Dataset(numbered()))  # the group is still usable


def fails_on_rank_1(x):
    if rank == 1:
        raise ms.errors.DataError("a bad example")
    return True


def check_strategy():
    strategy = mst.HDF5Dataset(numbered()).strategy
    assert strategy.broadcast_object({"rank": rank}, root=size - 1) == {"rank": size - 1}
    assert strategy.gather_objects("x" * rank) == ["x" * each for each in range(size)]
    collectives = collectives_of(strategy)
    assert collectives.gather_json([rank] * rank) == [[each] * each for each in range(size)]
    assert collectives.broadcast_json({"of": rank}, root=0) == {"of": 0}
    with pytest.raises(ValueError, match="there is no rank|0 to|at most"):
        strategy.broadcast_object(1, root=size)
    one = np.ones(2)
    for call in (
        strategy.scope,
        lambda: strategy.run(lambda: None),
        lambda: strategy.reduce("sum", one),
        lambda: strategy.all_reduce("sum", one),
        lambda: strategy.gather(one, axis=0),
        lambda: strategy.broadcast(one),
        lambda: strategy.extended.reduce_to("sum", one, "cpu:0"),
        lambda: strategy.assert_replicas_agree([]),
    ):
        with pytest.raises(NotImplementedError, match=r"mpistrat\.torch\.init\(\)"):
            call()
    assert isinstance(strategy, ms.Strategy)
    assert f"rank {rank} of {size}" in repr(strategy)
    with pytest.raises(TypeError, match=r"mpistrat\.torch\.init\(\)"):
        mst.strategy()


def check_transport():
    """Check messages that need several pieces, or have different lengths on the ranks."""
    transport = collectives_of(mst.HDF5Dataset(numbered()).strategy).channel.transport
    if size == 1:
        return
    counts = [3 * each for each in range(size)]
    part = np.full(counts[rank], rank, np.int32)
    joined = np.repeat(np.arange(size, dtype=np.int32), counts)
    pieces, group_transport._PIECE_BYTES = group_transport._PIECE_BYTES, 8
    for _ in range(2):  # in pieces, and at once
        assert transport.all_gather(part, counts).tolist() == joined.tolist()
        for root in range(size):
            gathered = transport.gather(part, counts, root)
            assert gathered.tolist() == joined.tolist() if rank == root else gathered is None
            buffer = np.arange(12.0).reshape(3, 4) * (rank == root)
            buffer.flags.writeable = rank != root
            transport.broadcast(buffer, root)
            assert (buffer == np.arange(12.0).reshape(3, 4)).all()
        group_transport._PIECE_BYTES = pieces
    poll = transport.start_all_gather(part, counts)
    while (found := poll()) is None:
        pass
    assert found.tolist() == joined.tolist()
    sent = np.concatenate([np.full(to + 1, rank, np.int16) for to in range(size)])
    received = transport.all_to_all(sent, [to + 1 for to in range(size)], [rank + 1] * size)
    assert received.tolist() == np.repeat(np.arange(size), rank + 1).tolist()


def check_drift():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    mst.assert_replicas_agree(model)
    mst.assert_replicas_agree(
        torch.nn.parallel.DistributedDataParallel(model)
    ) if has_cpu() else None
    with torch.no_grad():
        model.weight[1, 2] += rank
    if size > 1:
        with pytest.raises(
            ms.errors.ReplicaDriftError, match=r"'weight'.*have drifted apart"
        ) as info:
            mst.assert_replicas_agree(model)
        assert f"largest difference: {size - 1} at [1, 2]" in str(info.value)
    mst.assert_replicas_agree(model.bias)


def has_cpu():
    return "cpu" in {each.type for each in dist.group.WORLD._device_types}


def wait_for_all():
    mst.HDF5Dataset(numbered()).strategy.barrier()


def made(value):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(value)
    return model


class Notes:
    """State that can fail on one rank."""

    def __init__(self, saves=True, loads=True):
        self.value, self.saves, self.loads = 1, saves, loads

    def state_dict(self):
        if not self.saves:
            raise KeyError("no state here")
        return {"value": self.value}

    def load_state_dict(self, state):
        if not self.loads:
            raise KeyError("takes no state")
        self.value = state["value"]


def check_manager(switches):
    model, dataset = made(1.0), mst.HDF5Dataset(numbered())
    generator = ms.PerReplicaState(np.random.default_rng(rank))
    place = folder / f"runs-{'-'.join(switches) or 'plain'}"
    manager = ms.CheckpointManager(
        ms.Checkpoint(model=model, batches=dataset, generator=generator),
        place,
        max_to_keep=2,
        **switches,
    )
    assert manager.restore_or_initialize() is None
    elements = iter(dataset)
    for step in range(1, 4):
        next(elements)
        with torch.no_grad():
            model.bias.fill_(step)
        manager.save(step)
    manager.wait()
    wait_for_all()
    assert sorted(each.name for each in place.iterdir()) == ["checkpoint-2.h5", "checkpoint-3.h5"]
    model, dataset = made(7.0), mst.HDF5Dataset(numbered())
    own = np.random.default_rng(99)
    checkpoint = ms.Checkpoint(model=model, batches=dataset, generator=ms.PerReplicaState(own))
    manager = ms.CheckpointManager(checkpoint, place, **switches)
    assert manager.restore_or_initialize() == str(place / "checkpoint-3.h5")
    assert model.bias.tolist() == [3.0, 3.0]
    assert own.random() == np.random.default_rng(rank).random()
    assert [batch.tolist() for batch in dataset] == parts_of(1, 3)


def check_failures():
    path = folder / "failures.h5"
    model = made(1.0)
    ms.Checkpoint(model=model, notes=Notes()).write(path)
    before = path.read_bytes()
    missing = folder / "no such file.h5"
    with pytest.raises(ms.errors.CheckpointError, match="There is no file"):
        ms.Checkpoint(model=model).restore(missing)
    is_last = rank == size - 1
    with pytest.raises(KeyError, match="no state here"):
        ms.Checkpoint(model=model, notes=Notes(saves=not is_last)).write(path)
    with pytest.raises(ms.errors.CheckpointMismatchError, match="takes no state"):
        ms.Checkpoint(model=model, notes=Notes(loads=not is_last)).restore(path)
    blocker = folder / "a file"
    blocker.touch()
    with pytest.raises(ms.errors.CheckpointError):
        ms.Checkpoint(model=model).write(blocker / "x.h5")
    if size > 1:
        with pytest.raises(ms.errors.CheckpointError, match="generator: differs"):
            ms.Checkpoint(generator=torch.Generator().manual_seed(rank)).write(path)
        with pytest.warns(ms.errors.ReplicaDriftWarning, match="model/bias"):
            ms.Checkpoint(model=made(rank)).write(folder / "drifted.h5")
    assert path.read_bytes() == before
    ms.Checkpoint(model=model, notes=Notes()).restore(path).assert_consumed()


def check_handler():
    manager = ms.CheckpointManager(ms.Checkpoint(model=made(2.0)), folder / "preempted")
    with ms.PreemptionCheckpointHandler(manager, signals=[signal.SIGUSR1]) as handler:
        assert not handler.save_checkpoint_if_preempted(1)
        if rank == size - 1:  # only one rank gets the signal
            os.kill(os.getpid(), signal.SIGUSR1)
        assert handler.save_checkpoint_if_preempted(2)
    assert (folder / "preempted" / "checkpoint-2.h5").is_file()
    assert ms.latest_checkpoint(folder / "preempted") == str(folder / "preempted/checkpoint-2.h5")


def check_shards():
    """Check that each rank writes and reads its own shards."""
    mesh = init_device_mesh("cpu", (size,))
    path = folder / "shards.h5"
    for value in (5.0, 6.0):
        model = fully_shard(made(value), mesh=mesh)
        ms.Checkpoint(model=model).write(path, overwrite=True)
    other = fully_shard(made(0.0), mesh=mesh)
    ms.Checkpoint(model=other).restore(path).assert_consumed()
    assert (other.weight.full_tensor() == 6).all()


def check_groups():
    """Check a group of some ranks: the others are not concerned."""
    if size < 3:
        return
    group = dist.new_group([0, 2], backend="gloo")
    if rank == 1:
        with pytest.raises(TypeError, match="that this rank is a member of"):
            mst.HDF5Dataset(numbered(), group=group)
        return
    dataset = mst.HDF5Dataset(numbered(), group=group)
    assert (dataset.strategy.rank, dataset.strategy.size) == (rank // 2, 2)
    assert [len(batch) for batch in dataset] == [5, 5, 5, 5, 2 - rank // 2]
    assert dataset.strategy.broadcast_object(rank, root=1) == 2
    mst.assert_replicas_agree(torch.ones(2), group=group)
    ms.Checkpoint(batches=dataset).write(folder / "of-two.h5")


check_order()
check_positions()
check_files()
check_differences()
check_strategy()
check_transport()
check_drift()
check_manager({})
check_manager({"asynchronous": True})
check_manager({"parallel": True})
check_failures()
check_handler()
if has_cpu():
    check_shards()
check_groups()
assert not [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]
wait_for_all()
print(f"rank {rank} is done", flush=True)
dist.destroy_process_group()
