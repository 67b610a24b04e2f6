"""Chunks decoded outside of HDF5: whatever the filters and shapes, what h5py gives."""

import ctypes

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat import hdf5
from mpistrat.data import Dataset
from mpistrat.data.hdf5.layouts import CompressedChunks
from mpistrat.data.hdf5.open_files import FieldAccess, StoredRows
from mpistrat.errors import DataError
from mpistrat.testing import launch

GZIP = {"compression": "gzip", "compression_opts": 1}
KNOWN = {
    "none": {},
    "gzip": GZIP,
    "gzip, shuffle, fletcher32": {**GZIP, "shuffle": True, "fletcher32": True},
    "fletcher32": {"fletcher32": True},
    "lzf, shuffle": {"compression": "lzf", "shuffle": True},
    "blosc": hdf5plugin.Blosc(cname="zlib", shuffle=2),
    "blosc2": hdf5plugin.Blosc2(cname="lz4"),
    "bitshuffle": hdf5plugin.Bitshuffle(),
    "bzip2": hdf5plugin.BZip2(),
    "lz4": hdf5plugin.LZ4(),
    "zstd, fletcher32": {**hdf5plugin.Zstd(), "fletcher32": True},
}
LEFT_TO_HDF5 = {
    "scaleoffset": {"scaleoffset": 8},
    "zfp": hdf5plugin.Zfp(reversible=True),
}
DTYPES = ("?", "i1", "u2", ">i4", "u8", "f2", ">f4", "f8", "c8", "S5")


def count_decoded(monkeypatch):
    """Return a list that grows with each chunk that is decoded outside of HDF5."""
    decoded = []
    decode = StoredRows.decode

    def counting(self, rows):
        decode(self, rows)
        decoded.append(len(rows))

    in_place = CompressedChunks.decode

    def counting_in_place(self, mapped, starts, targets):
        done = in_place(self, mapped, starts, targets)
        decoded.extend(map(len, targets[:done]))
        return done

    monkeypatch.setattr(StoredRows, "decode", counting)
    monkeypatch.setattr(CompressedChunks, "decode", counting_in_place)
    return decoded


@st.composite
def arrays(draw):
    """Return an array of a few rows, and the shape of its chunks."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunks = tuple(draw(st.integers(1, length)) for length in shape)
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    numbers = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 50, shape)
    return numbers.astype(dtype), chunks


@pytest.mark.parametrize("name", KNOWN)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=arrays())
def test_every_known_filter_gives_what_h5py_gives(tmp_path, monkeypatch, name, drawn):
    array, chunks = drawn
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, chunks=chunks, **KNOWN[name])
    with monkeypatch.context() as patched:
        decoded = count_decoded(patched)
        straight = np.concatenate(list(Dataset.from_hdf5(path, "x").batch(4)))
        with h5py.File(path) as file:
            expected = file["x"][...]
            access = FieldAccess(file["x"], 0, file["x"].dtype)
            rows = np.empty((min(chunks[0], len(array)), *array.shape[1:]), array.dtype)
            access.fetch(0).decode(rows)
    assert straight.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(straight, expected)
    np.testing.assert_array_equal(rows, expected[: len(rows)])
    assert sum(decoded) == len(array) + len(rows), "h5py had to help"


def test_what_only_hdf5_can_decode_is_left_to_it(tmp_path, monkeypatch):
    array = np.random.default_rng(0).integers(0, 50, (100, 6)).astype(np.float32)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, options in LEFT_TO_HDF5.items():
            file.create_dataset(name, data=array, chunks=(16, 4), **options)
        # Never written, but for one chunk, and an edge that sticks out.
        holes = file.create_dataset("holes", (100, 6), "f4", chunks=(16, 4), fillvalue=7, **GZIP)
        holes[20:24] = array[20:24]
        twelve_bits = h5py.h5t.NATIVE_UINT16.copy()
        twelve_bits.set_precision(12)
        space = h5py.h5s.create_simple((100,))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((16,))
        odd = h5py.h5d.create(file.id, b"odd", twelve_bits, space, properties)
        odd.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(100, dtype="u2"))
    decoded = count_decoded(monkeypatch)
    dataset = Dataset.from_hdf5(tmp_path / "data.h5").shuffle(0)
    batches = list(dataset.batch(7))
    order = np.concatenate([batch["odd"] for batch in batches])
    assert sorted(order) == list(range(100))
    with h5py.File(tmp_path / "data.h5") as file:
        for name in file:
            got = np.concatenate([batch[name] for batch in batches])
            np.testing.assert_array_equal(got, file[name][...][order], err_msg=name)
    assert decoded == [16]  # where something was written


def test_chunks_that_skipped_a_filter(tmp_path, monkeypatch):
    """The filter mask of a chunk says which filters were left out when it was written."""
    array = np.arange(64, dtype="<i4").reshape(16, 4)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        x = file.create_dataset("x", (16, 4), "<i4", chunks=(8, 4), shuffle=True, **GZIP)
        x[...] = array
        plain = (array[8:] + 1000).tobytes()
        x.id.write_direct_chunk((8, 0), plain, filter_mask=0b11)
    decoded = count_decoded(monkeypatch)
    (batch,) = Dataset.from_hdf5(tmp_path / "data.h5", "x").batch(16)
    np.testing.assert_array_equal(batch, array + np.repeat([[0], [1000]], 8, axis=0))
    assert sum(decoded) == 16


SHORT = {name: KNOWN[name] for name in KNOWN if "fletcher32" not in name and name != "none"} | {
    "gzip, shuffle": {**GZIP, "shuffle": True},
    "lzf": {"compression": "lzf"},
    "shuffle": {"shuffle": True},
    "zstd": hdf5plugin.Zstd(),
}


@pytest.mark.parametrize("how", ["its end is missing", "too few rows", "empty"])
@pytest.mark.parametrize("name", SHORT)
def test_a_chunk_that_is_too_short_is_never_delivered(tmp_path, streamed, name, how):
    array = np.random.default_rng(0).integers(0, 50, (64, 8)).astype(np.float32)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        x = file.create_dataset("x", data=array, chunks=(16, 8), **SHORT[name])
        few = file.create_dataset("few", data=array[:8], chunks=(8, 8), **SHORT[name])
        whole = x.id.read_direct_chunk((16, 0))[1]
        short = {
            "its end is missing": whole[: len(whole) // 2],
            "too few rows": few.id.read_direct_chunk((0, 0))[1],
            "empty": b"\0",
        }
        x.id.write_direct_chunk((16, 0), short[how])
    dataset = Dataset.from_hdf5(tmp_path / "data.h5", "x")
    for each in (dataset, dataset.shuffle(0)):
        with pytest.raises(DataError, match=r"Rows 16 to 31 of the field 'x' of .*data\.h5"):
            list(each.batch(8))


@pytest.mark.parametrize("name", ["deflate", "shuffle"])
def test_chunks_at_the_edge_without_filters(tmp_path, name):
    array = np.arange(140).reshape(20, 7) * 1234567
    with h5py.File(tmp_path / "data.h5", "w", libver="latest") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((8, 5))
        properties.set_deflate(4) if name == "deflate" else properties.set_shuffle()
        set_options = ctypes.CDLL(hdf5.extension_path()).H5Pset_chunk_opts
        set_options.argtypes = [ctypes.c_int64, ctypes.c_uint]
        assert set_options(properties.id, 2) >= 0  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
        space = h5py.h5s.create_simple(array.shape)
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I64LE, space, properties)
        h5py.Dataset(dataset)[...] = array
    got = np.concatenate(list(Dataset.from_hdf5(tmp_path / "data.h5", "x").batch(6)))
    np.testing.assert_array_equal(got, array)


def test_a_checksum_before_compression(tmp_path, monkeypatch):
    """The order of h5py is the other one; other programs may choose."""
    array = np.arange(64, dtype="f4").reshape(16, 4)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((8, 4))
        properties.set_fletcher32()
        properties.set_filter(h5py.h5z.FILTER_LZF, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple(array.shape)
        x = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
        x.write(h5py.h5s.ALL, h5py.h5s.ALL, np.zeros_like(array))
        x.write(h5py.h5s.ALL, h5py.h5s.ALL, array)
    decoded = count_decoded(monkeypatch)
    (batch,) = Dataset.from_hdf5(tmp_path / "data.h5", "x").batch(16)
    np.testing.assert_array_equal(batch, array)
    assert sum(decoded) == 16


@pytest.mark.parametrize("options", [{}, GZIP, {"maxshape": (None, 3)}])
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_chunks_of_which_none_was_written_hold_the_fill_value(
    tmp_path, monkeypatch, cache_bytes, options
):
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", cache_bytes)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("x", (100, 3), "f4", chunks=(16, 3), fillvalue=7, **options)
    dataset = Dataset.from_hdf5(tmp_path / "data.h5", "x")
    for each in (dataset, dataset.shuffle(0)):
        got = np.concatenate(list(each.batch(8)))
        np.testing.assert_array_equal(got, np.full((100, 3), 7, np.float32))


@pytest.mark.parametrize("userblock", [0, 512])
def test_contiguous_compact_external_and_unwritten_data(tmp_path, userblock):
    array = np.arange(300, dtype=">f4").reshape(100, 3)
    with h5py.File(tmp_path / "data.h5", "w", userblock_size=userblock) as file:
        file["big"] = array
        file["flag"] = array[:, 0] > 30
        file.create_dataset("holes", (100, 3), "f4", fillvalue=7)
        file.create_dataset("outside", data=array, external=[(tmp_path / "raw", 0, array.nbytes)])
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((100,))
        compact = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I16BE, space, properties)
        compact.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(100, dtype="i2"))
    dataset = Dataset.from_hdf5(tmp_path / "data.h5")
    shuffled = list(dataset.shuffle(1).batch(9))
    order = np.concatenate([batch["compact"] for batch in shuffled])
    with h5py.File(tmp_path / "data.h5") as file:
        for name in file:
            got = np.concatenate([batch[name] for batch in shuffled])
            np.testing.assert_array_equal(got, file[name][...][order], err_msg=name)
            straight = np.concatenate([batch[name] for batch in dataset.batch(32)])
            np.testing.assert_array_equal(straight, file[name][...], err_msg=name)
            assert straight.dtype.isnative


WITHOUT_PLUGINS = """
import sys
sys.modules["hdf5plugin"] = None
import mpistrat as ms
for name in ("plain", "gzip", "lzf"):
    (batch,) = ms.data.Dataset.from_hdf5("data.h5", name).batch(6)
    assert batch.tolist() == [0, 1, 2, 3, 4, 5], batch
try:
    list(ms.data.Dataset.from_hdf5("data.h5", "zstd"))
except ms.errors.DataError as error:
    print(error)
"""


@pytest.mark.launches
def test_without_hdf5plugin_its_filters_alone_are_missing_and_named(tmp_path):
    kinds = {
        "plain": {},
        "gzip": {"compression": "gzip", "shuffle": True, "fletcher32": True},
        "lzf": {"compression": "lzf"},
        "zstd": dict(hdf5plugin.Zstd()),
    }
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, options in kinds.items():
            chunks = (3,) if options else None
            file.create_dataset(name, data=np.arange(6), chunks=chunks, **options)
    no_plugins = {"HDF5_PLUGIN_PATH": str(tmp_path)}  # which importing hdf5plugin has set here
    done = launch.run(["-W", "error", "-c", WITHOUT_PLUGINS], cwd=tmp_path, env=no_plugins)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "The field 'zstd' of data.h5 was compressed by zstd, a filter that the HDF5 of this rank "
        "does not have. Install it with: pip install hdf5plugin.\n"
    )
