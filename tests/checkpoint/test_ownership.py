"""One path, one writer: groups of ranks of a job that write the same file."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.checkpoint import writer
from mpistrat.system.files import hidden_beside

pytestmark = pytest.mark.mpi


WRITER = "from mpistrat.system.files import this_writer as name; print(name())"


def variable(strategy, value):
    with strategy.scope():
        return ms.Variable(np.float32(value))


@pytest.fixture
def path(mpi_tmp_path):
    return os.fspath(mpi_tmp_path / "run.h5")


@pytest.fixture
def barrier(strategy):
    return lambda: strategy.reduce("sum", 0)


def test_plain_objects_are_written_by_rank_0_alone(path, barrier, rank, caplog):
    checkpoint = ms.Checkpoint(weight=ms.Variable(np.float32(rank + 10)))
    assert checkpoint.write(path) == path
    barrier()
    with h5py.File(path) as file:
        assert file["variables/weight"][()] == 10
    said = [each for each in caplog.records if "rank 0 alone" in each.getMessage()]
    assert len(said) <= (0 if rank == 0 else 1)
    barrier()
    checkpoint.restore(path)
    assert checkpoint.weight.numpy() == 10


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_of_plain_objects_saves_on_rank_0_alone(
    mpi_tmp_path, barrier, rank, asynchronous
):
    weight = ms.Variable(np.float32(0))
    manager = ms.CheckpointManager(
        ms.Checkpoint(weight=weight), mpi_tmp_path, max_to_keep=2, asynchronous=asynchronous
    )
    for step in range(4):
        weight.assign(np.float32(10 * rank + step))
        manager.save(step)
    manager.wait()
    names = [os.path.basename(each) for each in manager.checkpoints]
    assert names == ["checkpoint-2.h5", "checkpoint-3.h5"]
    barrier()
    assert sorted(os.listdir(mpi_tmp_path)) == names
    with h5py.File(manager.latest_checkpoint) as file:
        assert file["variables/weight"][()] == 3


def test_a_strategy_of_each_rank_writes_its_own_file(mpi_tmp_path, rank):
    alone = ms.MPIStrategy(comm=MPI.COMM_SELF, device="cpu")
    path = ms.Checkpoint(weight=variable(alone, rank)).write(mpi_tmp_path / f"rank{rank}.h5")
    with h5py.File(path) as file:
        assert file["variables/weight"][()] == rank


def split(size):
    """Return the strategy of the even or the odd ranks, and the ranks of each."""
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    return ms.MPIStrategy(comm=comm, device="cpu"), range(0, size, 2), range(1, size, 2)


def shown(ranks, size):
    ranks = list(ranks)
    return writer.Writers(tuple(ranks), size).__str__()


@pytest.mark.parametrize("parallel", [False, True])
def test_another_group_may_not_write_the_same_path(path, barrier, rank, size, parallel):
    if size == 1:
        pytest.skip("needs two groups")
    group, even, odd = split(size)
    checkpoint = ms.Checkpoint(weight=variable(group, 10 + rank % 2))
    if rank % 2 == 0:
        checkpoint.write(path, parallel=parallel)
    barrier()
    inode = os.stat(path).st_ino
    if rank % 2:
        with pytest.raises(ms.errors.CheckpointError) as caught:
            checkpoint.write(path, parallel=parallel)
        assert f"cannot be written by {shown(odd, size)}" in str(caught.value)
        assert f"{shown(even, size)} of this job have written it" in str(caught.value)
        assert os.stat(path).st_ino == inode
    barrier()
    if rank % 2 == 0:
        checkpoint.write(path)
    again = ms.MPIStrategy(comm=group.extended._collectives.channel.transport.comm, device="cpu")
    if rank % 2 == 0:  # the same ranks, by another strategy
        ms.Checkpoint(weight=variable(again, 20)).write(path)
    barrier()
    with h5py.File(path) as file:
        assert file["variables/weight"][()] == 20
    assert not list(os.scandir(os.path.dirname(path)))[1:]


@pytest.mark.parametrize("gives_up", ["close", "remove"])
def test_a_path_is_given_up_with_its_strategy_or_its_file(path, barrier, rank, size, gives_up):
    if size == 1:
        pytest.skip("needs two groups")
    group, _, _ = split(size)
    checkpoint = ms.Checkpoint(weight=variable(group, rank % 2))
    if rank % 2 == 0:
        checkpoint.write(path)
    barrier()
    if rank % 2:
        with pytest.raises(ms.errors.CheckpointError, match="remove the file first"):
            checkpoint.write(path)
    barrier()
    if gives_up == "close" and rank % 2 == 0:
        group.close()
    elif gives_up == "remove" and rank == 0:
        os.unlink(path)
    barrier()
    if rank % 2:
        checkpoint.write(path)
    barrier()
    with h5py.File(path) as file:
        assert file["variables/weight"][()] == 1


def test_a_strategy_that_is_closed_does_not_give_up_what_another_has_written_since(
    path, barrier, rank, size
):
    if size == 1:
        pytest.skip("needs two groups")
    group, _, _ = split(size)
    if rank % 2 == 0:
        ms.Checkpoint(weight=variable(group, 1)).write(path)
        again = ms.MPIStrategy(
            comm=group.extended._collectives.channel.transport.comm, device="cpu"
        )
        ms.Checkpoint(weight=variable(again, 2)).write(path)
        group.close()
    barrier()
    if rank % 2:
        with pytest.raises(ms.errors.CheckpointError, match="cannot be written by"):
            ms.Checkpoint(weight=variable(group, 3)).write(path)
    barrier()


def test_of_two_groups_at_the_same_time_one_writes(path, barrier, rank, size):
    if size == 1:
        pytest.skip("needs two groups")
    group, _, _ = split(size)
    results = []
    for attempt in range(10):
        target = f"{path}{attempt}"
        barrier()
        checkpoint = ms.Checkpoint(weight=variable(group, rank % 2))
        try:
            checkpoint.write(target)
            results.append(rank % 2)
        except ms.errors.CheckpointError:
            results.append(-1)
        barrier()
        with h5py.File(target) as file:
            winner = int(file["variables/weight"][()])
        assert results[-1] == (winner if winner == rank % 2 else -1)


def test_a_file_of_an_earlier_job_may_be_replaced(path, strategy, barrier, rank, size):
    if size == 1:
        pytest.skip("a job of one rank leaves no mark")
    if rank == 0:
        with h5py.File(path, "w") as file:
            file.create_group("variables").attrs["writers"] = f"ranks 1-{size - 1} of {size}"
            file.attrs["created"] = "2020-01-01T00:00:00+00:00"
            file.attrs["format"] = "mpistrat-checkpoint"
    barrier()
    ms.Checkpoint(weight=variable(strategy, 1)).write(path)


@pytest.mark.parametrize("is_named", [False, True])
def test_what_a_killed_writer_leaves_is_taken_over(
    path, strategy, barrier, monkeypatch, rank, size, is_named
):
    ended = subprocess.run([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, text=True)
    # A name tells at once that its writer is dead; of an empty file that is assumed after a while.
    monkeypatch.setattr(writer, "_LONGEST_COMMIT_S", 100 if is_named else 0.2)
    claim = hidden_beside(Path(path), "commit")
    if rank == 0:
        claim.write_text(ended.stdout.strip() if is_named else "")
    barrier()
    ms.Checkpoint(weight=variable(strategy, 1)).write(path)
    barrier()
    # A job of one rank makes no claim, and removes only that of a process that has ended.
    assert claim.exists() == (size == 1 and not is_named)
