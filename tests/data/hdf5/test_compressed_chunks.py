"""Chunks that compiled code decodes to their place: which, what, and those that are damaged."""

import os

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat.data import Dataset
from mpistrat.data.hdf5 import chunk_cache
from mpistrat.data.hdf5.catalog import read_catalog
from mpistrat.data.hdf5.layouts import CompressedChunks
from mpistrat.errors import DataError
from mpistrat.native import native_library

hdf5plugin = pytest.importorskip("hdf5plugin")
pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the compiled module")

FILTERS = {
    "lz4": hdf5plugin.LZ4(),
    "lz4, small blocks": hdf5plugin.LZ4(nbytes=1000),
    "zstd": hdf5plugin.Zstd(),
}
KINDS = {
    "smooth": np.arange(1000 * 40, dtype="i4").reshape(1000, 40) // 100,
    "noise": np.random.default_rng(0).integers(0, 256, (1000, 160), np.uint8),
}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    monkeypatch.setattr(chunk_cache, "_ROW_CACHE_BYTES", 0)


def compressed(path):
    """Return where compiled code finds the chunks of x."""
    chunks = read_catalog([str(path)], "x").files[0].layouts[0].chunks
    return chunks if isinstance(chunks, CompressedChunks) else None


@pytest.mark.parametrize("rows", [64, 250, 1000, 3000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILTERS)
def test_whole_chunks_are_decoded_in_place(tmp_path, monkeypatch, name, kind, rows):
    path, array = tmp_path / "x.h5", KINDS[kind]
    shape = (rows, array.shape[1])
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "x", array.shape, array.dtype, chunks=shape, maxshape=(None, None), **FILTERS[name]
        )[...] = array
    in_place = []
    decode = CompressedChunks.decode

    def counting(self, mapped, starts, targets):
        in_place.append(decode(self, mapped, starts, targets))
        return in_place[-1]

    monkeypatch.setattr(CompressedChunks, "decode", counting)
    found = np.concatenate(list(Dataset.from_hdf5(path, "x").batch(100)))
    np.testing.assert_array_equal(found, array)
    # A window has no room for more than all rows.
    assert sum(in_place) == (-(-1000 // rows) if rows <= 1000 else 0)
    shuffled = np.concatenate(list(Dataset.from_hdf5(path, "x").shuffle(0).batch(100)))
    assert not np.array_equal(shuffled, array)
    np.testing.assert_array_equal(np.sort(shuffled, axis=0), np.sort(array, axis=0))


def test_chunks_of_another_kind_are_left_to_others(tmp_path):
    array = KINDS["smooth"]
    others = {
        "parts of rows": {"chunks": (64, 20), **FILTERS["lz4"]},
        "two filters": {"chunks": (64, 40), "shuffle": True, **FILTERS["lz4"]},
        "gzip": {"chunks": (64, 40), "compression": "gzip"},
        "foreign": {"chunks": (64, 40), "dtype": ">i4", **FILTERS["lz4"]},
    }
    for name, options in others.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=array, **options)
        assert compressed(tmp_path / f"{name}.h5") is None, name
        found = np.concatenate(list(Dataset.from_hdf5(tmp_path / f"{name}.h5", "x").batch(100)))
        np.testing.assert_array_equal(found, array, name)


def test_files_with_other_chunks_and_a_chunk_without_its_filter(tmp_path):
    array = KINDS["smooth"]
    for number, (name, rows) in enumerate((("lz4", 64), ("zstd", 100), ("lz4, small blocks", 50))):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            x = file.create_dataset("x", data=array, chunks=(rows, 40), **FILTERS[name])
            x.id.write_direct_chunk((rows, 0), (array[rows : 2 * rows] + 1).tobytes(), 1)
    dataset = Dataset.from_hdf5(f"{tmp_path}/*.h5", "x")
    found = np.concatenate(list(dataset.batch(100)))
    expected = np.concatenate([array] * 3)
    for start, rows in ((0, 64), (1000, 100), (2000, 50)):
        expected[start + rows : start + 2 * rows] += 1
    np.testing.assert_array_equal(found, expected)
    shuffled = np.concatenate(list(dataset.shuffle(2).batch(100)))
    np.testing.assert_array_equal(np.sort(shuffled, axis=0), np.sort(expected, axis=0))


@pytest.mark.parametrize("name", FILTERS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_chunks_touch_nothing_beside_their_place(tmp_path, name, data):
    path, array = tmp_path / "x.h5", KINDS["smooth"][:64]
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=array, chunks=(64, 40), **FILTERS[name])
    chunks = compressed(path)
    offset, size, _ = chunks.places[0].tolist()
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[offset + data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    end = offset + data.draw(st.integers(0, size))
    memory = np.full((66, 40), -7, "i4")
    mapped = np.frombuffer(bytes(content[:end]), np.uint8)
    places = chunks.places.copy()
    if data.draw(st.booleans()):
        places[0, 1] = end - offset  # shorter, but whole as far as the file knows
    done = native_library().decode_chunks(*chunks.codec, mapped, places, [memory[1:65]])
    assert done in (0, 1)
    assert (memory[[0, 65]] == -7).all()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("lz4", 1, np.zeros(9, np.uint8), np.zeros((1, 3), "i4"), [np.zeros(3)]),
        ("lz4", 1, np.zeros(9, np.uint8), np.zeros((2, 3), "i8"), [np.zeros(3)]),
        ("lz4", 1, np.zeros(9, np.uint8), np.zeros((2, 3), "i8"), [np.zeros(3), np.zeros(4)]),
        ("lz4", 1, np.zeros(9, np.uint8), np.zeros((1, 3), "i8"), [np.zeros((3, 3))[:, 0]]),
        ("lz4", 1, np.zeros(9, np.uint8), np.zeros((1, 3), "i8"), ["text"]),
    ],
)
def test_other_arguments_are_refused(arguments):
    with pytest.raises(TypeError, match="decode_chunks"):
        native_library().decode_chunks(*arguments)


@pytest.mark.parametrize("name", FILTERS)
def test_a_file_that_becomes_shorter_is_an_error_and_no_signal(tmp_path, name):
    path = tmp_path / "x.h5"
    array = np.random.default_rng(0).random((4000, 1000))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, chunks=(16, 1000), **FILTERS[name])
    batches = iter(Dataset.from_hdf5(path, "x").shuffle(0).batch(10))
    next(batches)
    os.truncate(path, 2**20)
    with pytest.raises(DataError, match="cannot be read|has changed|is truncated"):
        for _ in batches:
            pass


def test_a_damaged_chunk_is_an_error_where_its_rows_are_read(tmp_path):
    path = tmp_path / "x.h5"
    array = np.random.default_rng(0).integers(0, 9, (4000, 500))
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, chunks=(20, 500), **FILTERS["lz4"])
    offset, size, _ = compressed(path).places[150].tolist()
    content = bytearray(path.read_bytes())
    content[offset + 4 : offset + size] = bytes(size - 4)
    path.write_bytes(content)
    read = 0
    with pytest.raises(DataError, match="3000"):
        for batch in Dataset.from_hdf5(path, "x").batch(50):
            np.testing.assert_array_equal(batch, array[read : read + 50])
            read += len(batch)
    assert read <= 3000  # chunks are decoded several at a time
