"""All ranks write to one file: each byte once, no two to one page, the file as ever."""

import errno
import itertools
import mmap
import os
import resource
import signal

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import write as writing

LARGE = 2**16
"""Elements of the variables that ranks share: 256 KiB of float32."""
NAMES = [f"weight{i}" for i in range(5)]
PAGE = mmap.PAGESIZE


@pytest.fixture
def world(strategy):
    """Return the collectives, and a checkpoint with its large variables."""
    with strategy.scope():
        large = {
            name: ms.Variable(np.arange(LARGE + 7 * i, dtype=np.float32), name=name)
            for i, name in enumerate(NAMES)
        }
        small = ms.Variable(np.arange(3.0), name="small")
        on_read = ms.Variable(
            np.ones(LARGE),
            name="on_read",
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    own = ms.Variable(np.full(LARGE, 7), name="own")
    rng = np.random.default_rng(0)
    objects = {**large, "small": small, "on_read": on_read, "own": own, "rng": rng}
    return strategy.extended._collectives, ms.Checkpoint(**objects), large


@pytest.fixture
def blocks_written(monkeypatch):
    """Return the list of what this rank writes for itself from now on."""
    found = []
    write_at = writing.write_at

    def spy(handle, offset, piece):
        if piece.size:
            found.append((offset, piece.nbytes))
        write_at(handle, offset, piece)

    monkeypatch.setattr(writing, "write_at", spy)
    return found


def contents(path):
    """Return all that a checkpoint says, but for when it was made."""
    found = {}
    with h5py.File(path) as file:
        found["/"] = {k: v for k, v in file.attrs.items() if k not in ("created", "digest")}
        file.visititems(
            lambda name, each: found.update(
                {name: (dict(each.attrs.items()), getattr(each, "dtype", None))}
                | ({f"{name} values": each[()].tobytes()} if hasattr(each, "shape") else {})
            )
        )
    return found


@pytest.mark.mpi
def test_each_rank_writes_whole_pages_of_its_own(world, mpi_tmp_path, blocks_written):
    collectives, checkpoint, large = world
    size = collectives.size
    together = checkpoint.write(mpi_tmp_path / "together.h5", parallel=True)
    by_rank = collectives.gather_json(blocks_written)
    alone = checkpoint.write(mpi_tmp_path / "alone.h5")
    assert str(contents(together)) == str(contents(alone))
    assert sum(map(bool, by_rank)) == min(size, len(NAMES))
    blocks = sorted(itertools.chain.from_iterable(by_rank))
    assert sum(num_bytes for _, num_bytes in blocks) == sum(
        each._storage.nbytes for each in large.values()
    )
    pages = {
        (page, rank)
        for rank, own in enumerate(by_rank)
        for offset, num_bytes in own
        for page in range(offset // PAGE, -(-(offset + num_bytes) // PAGE))
    }
    assert len({page for page, _ in pages}) == len(pages), "two ranks wrote to one page"
    checkpoint.restore(together).assert_consumed()


@pytest.mark.mpi
def test_ranks_that_do_not_see_the_file_leave_it_to_the_others(
    world, mpi_tmp_path, blocks_written, monkeypatch
):
    collectives, checkpoint, _ = world
    rank, size = collectives.rank, collectives.size
    find = os.open

    def elsewhere(path, *arguments):
        """Find no file on odd ranks, and another one of this name on even ones."""
        if rank % 2:
            raise FileNotFoundError(path)
        return find(mpi_tmp_path / f"of-rank-{rank}", os.O_RDWR | os.O_CREAT)

    with monkeypatch.context() as patch:
        if rank:
            patch.setattr(writing.os, "open", elsewhere)
        path = checkpoint.write(mpi_tmp_path / "run.h5", parallel=True)
    by_rank = collectives.gather_json(len(blocks_written))
    assert by_rank == [by_rank[0]] + [0] * (size - 1)
    checkpoint.restore(path).assert_consumed()


def fail_to_grow(patch):
    """No file of this process may grow over 100 kB."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))


def write_nothing(patch):
    """What this rank writes never comes, and the file may end before it."""
    patch.setattr(writing, "write_at", lambda handle, offset, piece: None)


def write_elsewhere(patch):
    """What this rank writes is not where rank 0 sees it."""
    write_at = writing.write_at
    patch.setattr(
        writing,
        "write_at",
        lambda handle, offset, piece: write_at(handle, offset + 2**24, piece),
    )


def fail_at_the_end(patch):
    """The disk is full for what comes after the whole pages of a variable."""
    write_at = writing.write_at

    def write(handle, offset, piece):
        if 0 < piece.nbytes < PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(handle, offset, piece)

    patch.setattr(writing, "write_at", write)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("rank", "trouble", "words"),
    [
        (-1, fail_to_grow, "cannot be written: File too large"),
        (-1, write_elsewhere, "rank 0 does not find in it what rank"),
        (-1, write_nothing, "rank 0 does not find in it what rank"),
        (0, fail_at_the_end, "cannot be written: No space left on device"),
    ],
)
def test_what_one_rank_fails_at_all_ranks_raise(
    world, mpi_tmp_path, monkeypatch, rank, trouble, words
):
    collectives, checkpoint, large = world
    manager = ms.CheckpointManager(checkpoint, mpi_tmp_path, parallel=True)
    older = manager.save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            if collectives.rank == rank % collectives.size:
                trouble(patch)
            with pytest.raises(ms.errors.CheckpointError, match=words):
                manager.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    collectives.gather_json(None)
    assert os.listdir(mpi_tmp_path) == ["checkpoint-1.h5"]
    for each in large.values():
        each.assign(each.value() * 0)
    checkpoint.restore(older).assert_consumed()
    assert all(each.numpy()[-1] == each.shape[0] - 1 for each in large.values())
    assert manager.save(2) == manager.latest_checkpoint


@pytest.mark.mpi
def test_bad_switches_are_refused_on_every_rank(world, mpi_tmp_path):
    collectives, checkpoint, _ = world
    rank, size = collectives.rank, collectives.size
    with pytest.raises(TypeError, match="parallel must be True or False, not 1"):
        checkpoint.write(mpi_tmp_path / "run.h5", parallel=1)
    with pytest.raises(ValueError, match="not with both"):
        ms.CheckpointManager(checkpoint, mpi_tmp_path, asynchronous=True, parallel=True)
    if size > 1:
        with pytest.raises(ms.errors.CollectiveMismatchError, match="Checkpoint.write"):
            checkpoint.write(mpi_tmp_path / "run.h5", parallel=rank == 0)
    assert os.listdir(mpi_tmp_path) == []
