"""Files that h5py extends with "r+" after they were closed: new rows show the fill value."""

import contextlib
import errno
import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.hdf5_writer import chunk_store, root_file

KINDS = {"plain": {}, "filtered": {"compression": "gzip"}}
CHUNK_ROWS = 7


@pytest.fixture
def path(shared_tmp_path):
    return shared_tmp_path / "out.h5"


@pytest.fixture(params=KINDS)
def options(request):
    return {"chunks": (CHUNK_ROWS, 2), "fillvalue": -1, **KINDS[request.param]}


def open_writer(strategy, path, options, **of_writer):
    out = ms.data.HDF5Writer(path, "a", strategy=strategy, **of_writer)
    out.create_dataset("x", (None, 3), "i4", **options)
    return out


def append(strategy, out, number):
    """Append rows in which each element is the number of its row."""
    first = out.rows["x"]
    own = np.array_split(np.arange(first, first + number, dtype="i4"), strategy.size)
    out.append({"x": np.repeat(own[strategy.rank][:, None], 3, 1)})


def assert_extended(strategy, path, num_rows):
    """Extend the dataset with h5py: the new rows must show the fill value."""
    strategy.barrier()
    if strategy.rank == 0:
        with h5py.File(path, "r+") as file:
            assert len(file["x"]) == num_rows
            file["x"].resize(num_rows + 3 * CHUNK_ROWS, axis=0)
            found = file["x"][:]
    else:
        found = None
    found = strategy.broadcast_object(found)
    assert np.array_equal(found[:num_rows], np.repeat(np.arange(num_rows)[:, None], 3, 1))
    assert np.array_equal(found[num_rows:], np.full((3 * CHUNK_ROWS, 3), -1))


@pytest.mark.parametrize("number", [1, 6, 7, 9])
def test_a_closed_file(strategy, path, options, number):
    with open_writer(strategy, path, options) as out:
        append(strategy, out, number)
    assert_extended(strategy, path, number)


@pytest.mark.parametrize("rows", [0, 3, 7, 8])
def test_a_file_that_was_cut_back(strategy, path, options, rows):
    with open_writer(strategy, path, options) as out:
        append(strategy, out, rows)
        state = out.state_dict()
        for number in (1, 3, 9):
            append(strategy, out, number)
        out.load_state_dict(state)
        append(strategy, out, 1)
        append(strategy, out, 4)
        out.load_state_dict(state)
    assert_extended(strategy, path, rows)


@contextlib.contextmanager
def full_disk(strategy, path, monkeypatch):
    """Let rank 0 fail at the headers of a commit, when the chunks are in the file."""
    written = root_file.write_all

    def full(handle, address, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    if strategy.rank == 0:
        monkeypatch.setattr(root_file, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        yield
    monkeypatch.setattr(root_file, "write_all", written)


@pytest.mark.parametrize("per_commit", [1, 2])
@pytest.mark.parametrize("later", [[], [0], [1], [2, 1], [9]])
def test_a_commit_that_failed(strategy, path, options, monkeypatch, later, per_commit):
    with open_writer(strategy, path, options, steps_per_commit=per_commit) as out:
        append(strategy, out, 2)
        out.flush()
        for number in (4, 6):
            with full_disk(strategy, path, monkeypatch):
                for _ in range(per_commit):
                    append(strategy, out, number)
            assert out.rows == {"x": 2}
        for number in later:
            append(strategy, out, number)
            out.flush()
    assert_extended(strategy, path, 2 + sum(later))


def test_a_failed_step_that_ends_the_program(strategy, path, options, monkeypatch):
    with (
        full_disk(strategy, path, monkeypatch),
        open_writer(strategy, path, options) as out,
    ):
        monkeypatch.undo()
        append(strategy, out, 2)
        with full_disk(strategy, path, monkeypatch):
            append(strategy, out, 4)
        raise OSError("No space left: the end of the program")
    assert_extended(strategy, path, 2)


def test_a_resumed_file_of_a_killed_writer(strategy, path, options, monkeypatch):
    out = open_writer(strategy, path, options)
    append(strategy, out, 2)
    # As a kill would leave it: the rows of the next step are in the file, and its headers are not.
    monkeypatch.setattr(chunk_store.ChunkStore, "undo", lambda *_: None)
    with full_disk(strategy, path, monkeypatch):
        append(strategy, out, 4)
    monkeypatch.undo()
    out._session.abandon()
    strategy.barrier()
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        assert out.rows == {"x": 2}
    assert_extended(strategy, path, 2)


def test_resuming_after_h5py(strategy, path, options):
    for number in (2, 9):
        with open_writer(strategy, path, options) as out:
            first = out.rows["x"]
            append(strategy, out, number)
        assert_extended(strategy, path, first + number)
        strategy.barrier()
        if strategy.rank == 0:
            with h5py.File(path, "r+") as file:
                file["x"][first + number :] = np.arange(first + number, len(file["x"]))[:, None]
                file["x"].resize(first + number + 4, axis=0)
        strategy.barrier()
    with open_writer(strategy, path, options) as out:
        assert out.steps == 2
        append(strategy, out, 5)
    assert_extended(strategy, path, 2 + 4 + 9 + 4 + 5)


def test_h5py_may_end_the_file_at_any_byte(strategy, path):
    """Of a killed writer, the stated end is a multiple of 16 MiB. h5py's may be one by chance."""
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.append({"x": 1.0})
    strategy.barrier()
    if strategy.rank == 0:
        with h5py.File(path, "r+") as file:
            end = path.stat().st_size
            file.create_dataset("more", data=np.ones(root_file.AHEAD_BYTES - end - 2**14, "u1"))
        assert end < path.stat().st_size <= root_file.AHEAD_BYTES
        # Behind the data are only bytes that nothing names.
        with open(path, "r+b") as raw:
            raw.truncate(root_file.AHEAD_BYTES)
            raw.seek(40)
            raw.write(root_file.AHEAD_BYTES.to_bytes(8, "little"))
    strategy.barrier()
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        for step in range(3):
            out.append({"x": 2.0 + step})
    with h5py.File(path, "r") as file:
        assert file["x"][:].tolist() == [1, 2, 3, 4]
        assert file["more"][:].min() == 1


def test_a_flush_that_fails_after_the_commit(strategy, path, options, monkeypatch):
    with open_writer(strategy, path, options, durable=True) as out:
        append(strategy, out, 3)
        flushed, calls = os.fdatasync, []

        def failing(handle):
            calls.append(handle)
            if len(calls) == 2:  # rows and headers, then the superblock
                raise OSError(errno.EIO, "Input/output error", str(path))
            flushed(handle)

        if strategy.rank == 0:
            monkeypatch.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError, match="Input/output error"):
            append(strategy, out, 2)
        monkeypatch.setattr(os, "fdatasync", flushed)
        with h5py.File(path, "r") as file:
            assert len(file["x"]) == 3
        strategy.barrier()
        append(strategy, out, 1)
    assert_extended(strategy, path, 4)


def test_cutting_back_on_a_full_disk(strategy, path, options, monkeypatch):
    with open_writer(strategy, path, options) as out:
        append(strategy, out, 3)
        state = out.state_dict()
        append(strategy, out, 5)
        with full_disk(strategy, path, monkeypatch):
            out.load_state_dict(state)
        assert out.steps == 2
        assert out.rows == {"x": 8}
        append(strategy, out, 4)
        assert out.steps == 3
    assert_extended(strategy, path, 12)
