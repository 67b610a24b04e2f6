"""Chunks of which one rank has all rows: it encodes and writes them instead of their owner."""

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.data.hdf5.filters import LZ4, lz4_function, plugin_functions, run_plugin
from mpistrat.data.hdf5_writer import exchange
from mpistrat.data.hdf5_writer.chunk_store import ChunkStore
from mpistrat.data.hdf5_writer.encoders import make_encoder
from mpistrat.errors import DataError

FILTERS = [{"compression": "gzip", "shuffle": True}, dict(hdf5plugin.LZ4()), {"fletcher32": True}]


@pytest.fixture
def path(shared_tmp_path):
    return shared_tmp_path / "out.h5"


def rows_of(rank, size, num_rows):
    return slice(num_rows * rank // size, num_rows * (rank + 1) // size)


def values_of(num_rows, width=5):
    return np.arange(num_rows * width, dtype="f4").reshape(num_rows, width)


def moved(monkeypatch):
    """Return a list to which the rank adds each piece that it sends."""
    sent, packed = [], exchange._packed
    monkeypatch.setattr(exchange, "_packed", lambda *each: sent.append(each[1]) or packed(*each))
    return sent


@pytest.mark.parametrize("options", FILTERS, ids=["gzip", "lz4", "fletcher32"])
@pytest.mark.parametrize("mode", ["w", "a"])
def test_only_shared_chunks_travel(strategy, path, monkeypatch, options, mode):
    rank, size = strategy.rank, strategy.size
    num_rows, sent = 100 * size + 7, moved(monkeypatch)
    own = values_of(num_rows)[rows_of(rank, size, num_rows)]
    with ms.data.HDF5Writer(path, mode, strategy=strategy) as out:
        shape = (None if mode == "a" else num_rows, 5)
        out.create_dataset("x", shape, "f4", chunks=(8, 5), **options)
        (out.write if mode == "w" else out.append)({"x": own})
    bounds = rows_of(rank, size, num_rows)
    shared = {bounds.start // 8} if bounds.start % 8 else set()
    shared |= {bounds.stop // 8} if bounds.stop % 8 else set()
    assert {piece.block for piece in sent} <= shared
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], values_of(num_rows))


def test_others_help_a_rank_that_has_most_rows(strategy, path, monkeypatch):
    rank, size = strategy.rank, strategy.size
    sent = moved(monkeypatch)
    own = values_of(160) if rank == size - 1 else values_of(0)
    with ms.data.HDF5Writer(path, strategy=strategy) as out:
        out.create_dataset("x", (160, 5), "f4", chunks=(8, 5), compression="gzip")
        out.write({"x": own})
    owned = [block for block in range(20) if block % size == size - 1]
    assert len(sent) == (20 - len(owned) if rank == size - 1 else 0)
    with h5py.File(path) as file:
        assert np.array_equal(file["x"], values_of(160))


def filled(strategy, path, later):
    """Create a file of which each rank has written its whole chunks, and write `later` rows."""
    rank, size = strategy.rank, strategy.size
    out = ms.data.HDF5Writer(path, strategy=strategy)
    out.create_dataset("x", (16 * size, 5), "f4", chunks=(8, 5), compression="gzip")
    own = rows_of(rank, size, 8 * size)
    out.write({"x": values_of(16 * size)[own]}, at=own)
    # The last rank writes into the first chunk, which the first rank has kept.
    rows = np.array(later if rank == size - 1 else [], int)
    out.write({"x": values_of(16 * size)[rows]}, at=rows)
    return out


@pytest.mark.parametrize("row", [0, 7])
def test_rows_of_a_kept_chunk_are_not_written_twice(strategy, path, row):
    with pytest.raises(DataError, match=rf"row {row} of dataset 'x' was written twice"):
        filled(strategy, path, [8 * strategy.size, row]).close()


def test_rows_that_are_missing_are_named(strategy, path):
    first = 8 * strategy.size
    out = filled(strategy, path, range(first, first + 5))
    with pytest.raises(DataError, match=rf"row {first + 5} of dataset 'x'"):
        out.close()
    assert not path.exists()


def test_a_chunk_that_all_ranks_hold_is_written_once(strategy, path, monkeypatch):
    put, taken = ChunkStore.put, []
    monkeypatch.setattr(ChunkStore, "put", lambda *each: taken.append(each[2]) or put(*each))
    with ms.data.HDF5Writer(path, strategy=strategy) as out:
        out.create_dataset("x", (5,), "f4", chunks=(1,), compression="gzip")
        for row in range(5):
            out.write({"x": np.float32(row)}, at=slice(row, row + 1))
    blocks = [piece.block for piece in taken]
    assert blocks == [block for block in range(5) if block % strategy.size == strategy.rank]
    with h5py.File(path) as file:
        assert file["x"][:].tolist() == [0, 1, 2, 3, 4]


def test_two_ranks_do_not_keep_the_same_chunk(strategy, path):
    if strategy.size == 1:
        pytest.skip("needs two ranks that can write the same rows")
    with (
        pytest.raises(DataError, match="row 0 of dataset 'x' was written twice"),
        ms.data.HDF5Writer(path, strategy=strategy) as out,
    ):
        out.create_dataset("x", (16, 5), "f4", chunks=(8, 5), compression="gzip")
        out.write({"x": values_of(8)}, at=slice(0, 8))
    assert not path.exists()


def test_the_stored_bytes_are_those_of_one_rank(strategy, path):
    rank, size = strategy.rank, strategy.size
    num_rows = 24 * size + 5
    own = values_of(num_rows)[rows_of(rank, size, num_rows)]
    with ms.data.HDF5Writer(path, strategy=strategy) as out:
        out.create_dataset("x", (num_rows, 5), "f4", chunks=(8, 5), **hdf5plugin.LZ4())
        out.write({"x": own})
    with h5py.File(path) as file:
        chunks = [file["x"].id.read_direct_chunk((start, 0)) for start in range(0, num_rows, 8)]
    encoder = make_encoder("x", [(LZ4, (0,))], False)
    whole = np.zeros((-(-num_rows // 8) * 8, 5), "f4")
    whole[:num_rows] = values_of(num_rows)
    for number, (mask, stored) in enumerate(chunks):
        assert (bytes(encoder.encode(whole[8 * number : 8 * number + 8])[0]), mask) == (stored, 0)


@pytest.mark.skipif(LZ4 not in plugin_functions(), reason="needs hdf5plugin")
@given(
    data=st.one_of(
        st.binary(min_size=1, max_size=3000),
        st.builds(
            lambda part, n: part * n, st.binary(min_size=1, max_size=40), st.integers(1, 500)
        ),
    ),
    block_bytes=st.sampled_from([None, 0, 7, 100, 4096]),
)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_lz4_stores_what_the_plugin_stores(data, block_bytes):
    assert lz4_function("compress_default") is not None
    values = () if block_bytes is None else (block_bytes,)
    encoded, mask = make_encoder("x", [(LZ4, values)], False).encode(np.frombuffer(data, np.uint8))
    assert (bytes(encoded), mask) == (run_plugin(LZ4, values, 0, memoryview(data)), 0)
