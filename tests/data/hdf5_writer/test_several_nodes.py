"""File systems that do not show all nodes the same: every rank raises, and no step is lost."""

import errno
import os
import shutil
import socket

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.hdf5_writer import chunk_store

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def path(shared_tmp_path):
    return shared_tmp_path / "out.h5"


@pytest.fixture
def several_hosts(strategy, monkeypatch):
    """Let each rank believe that it runs on a host of its own."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{strategy.rank}")


def append(strategy, out, step=None):
    step = out.steps if step is None else step
    rows = np.array_split(np.arange(120.0) + step, strategy.size)[strategy.rank]
    out.append({"plain": rows, "packed": rows, "step": step})


def open_writer(strategy, path, mode="a", **options):
    out = ms.data.HDF5Writer(path, mode, strategy=strategy, **options)
    out.create_dataset("plain", (None,), "f8", chunks=(50,))
    out.create_dataset("packed", (None,), "f8", chunks=(50,), compression="gzip")
    return out


def assert_steps(path, steps):
    with h5py.File(path, "r") as file:
        numbers = np.arange(steps)
        expected = np.arange(120.0) + numbers[:, None]
        assert np.array_equal(file["step"], numbers)
        assert np.array_equal(file["plain"], expected.reshape(-1))
        assert np.array_equal(file["packed"], expected.reshape(-1))


@pytest.mark.parametrize("per_commit", [1, 3])
def test_pages_are_compared_before_each_commit(strategy, path, several_hosts, per_commit):
    with open_writer(strategy, path, steps_per_commit=per_commit) as out:
        for step in range(per_commit * 4):
            append(strategy, out, step)
    strategy.barrier()
    assert_steps(path, per_commit * 4)
    strategy.barrier()
    with open_writer(strategy, path, "w") as out:
        for _ in range(3):
            append(strategy, out)
    assert_steps(path, 3)


@pytest.mark.parametrize("mode", ["a", "w"])
def test_writes_that_rank_0_does_not_see(strategy, path, several_hosts, monkeypatch, mode):
    if strategy.rank == 0:
        path.write_bytes(b"old") if mode == "w" else None
    strategy.barrier()
    out = open_writer(strategy, path, mode)
    append(strategy, out)
    written = chunk_store.write_all
    if strategy.rank == strategy.size - 1:
        monkeypatch.setattr(chunk_store, "write_all", lambda *_: None)
    message = rf"rank 0 does not find in it what rank {strategy.size - 1} .*out\.h5"
    # The chunks of a step belong to changing ranks, so one of a few steps has one of the last rank.
    with pytest.raises(OSError, match=message):
        for _ in range(4):
            append(strategy, out)
        out.close()
    steps = out.steps
    monkeypatch.setattr(chunk_store, "write_all", written)
    if mode == "a":
        append(strategy, out)
        out.close()
        assert_steps(path, steps + 1)
    else:
        assert path.read_bytes() == b"old"
    strategy.barrier()
    assert os.listdir(path.parent) == ["out.h5"]


def test_each_rank_flushes_before_the_commit(strategy, path, several_hosts, monkeypatch):
    with open_writer(strategy, path) as out:
        events = []
        flush, write = os.fsync, chunk_store.write_all
        monkeypatch.setattr(os, "fsync", lambda handle: (events.append("flush"), flush(handle)))
        monkeypatch.setattr(
            chunk_store, "write_all", lambda *each: (events.append("write"), write(*each))
        )
        append(strategy, out)
        assert "write" not in events or events[-1] == "flush"
        monkeypatch.undo()


def test_a_path_that_names_a_different_file(strategy, path, monkeypatch):
    own = path.with_name(f"local-{strategy.rank}.h5")
    open_writer(strategy, path).close()
    strategy.barrier()
    if strategy.rank:
        shutil.copy(path, own)
        opened = os.open

        def open_local(name, *arguments, **options):
            return opened(own if name == str(path) else name, *arguments, **options)

        monkeypatch.setattr(os, "open", open_local)
    with pytest.raises(OSError, match=r"different file on this rank.*out\.h5") as caught:
        open_writer(strategy, path)
    assert strategy.rank == 0 or caught.value.errno == errno.ESTALE
    monkeypatch.undo()
    strategy.barrier()
    with open_writer(strategy, path) as out:
        append(strategy, out)
