"""Structures of HDF5 that the writer makes itself, read back by HDF5 and by plain models."""

import io
import struct

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat import hdf5
from mpistrat.data.hdf5_writer.chunk_tree import (
    MAX_CHILDREN,
    ChunkEntry,
    ChunkTree,
    build_linked,
    encode_node,
    read_chunks,
)
from mpistrat.data.hdf5_writer.encoders import make_encoder
from mpistrat.data.hdf5_writer.geometry import Geometry, automatic_chunks
from mpistrat.data.hdf5_writer.root_file import KEPT_COMMITS, ReuseList
from mpistrat.data.hdf5_writer.superblock import lookup3, read_superblock
from mpistrat.errors import DataError


@pytest.mark.parametrize("version", ["earliest", "v108", "v110", "latest"])
def test_a_superblock_is_written_as_it_was_read(version):
    memory = io.BytesIO()
    with h5py.File(memory, "w", libver=version) as file:
        file["x"] = 1
    data = memory.getvalue()
    found = read_superblock("file.h5", data[:96])
    for offset, written in (found.commit(found.root, found.end), found.state_end(found.end)):
        assert data[offset : offset + len(written)] == written


def test_the_checksum_of_metadata_is_lookup3():
    # From the comments in Bob Jenkins' lookup3.c, driver5.
    assert lookup3(b"") == 0xDEADBEEF
    assert lookup3(b"Four score and seven years ago") == 0x17770551


class Memory:
    def __init__(self):
        self.data = bytearray(64)

    def allocate(self, num_bytes):
        self.data += bytes(num_bytes)
        return len(self.data) - num_bytes

    def put(self, address, written):
        self.data[address : address + len(written)] = written

    def read(self, address, num_bytes):
        return bytes(self.data[address : address + num_bytes])


def entries(number):
    return [ChunkEntry((3 * n, 0), 100 + n, n % 3, 8 * n) for n in range(number)]


@given(st.lists(st.integers(0, 3 * MAX_CHILDREN), min_size=1, max_size=4), st.integers(0, 130))
def test_a_tree_has_its_chunks_after_each_step(counts, num_last):
    memory, tree = Memory(), ChunkTree((3, 5), 4)

    def write(node):
        assert 0 < len(node.children) <= MAX_CHILDREN
        address = memory.allocate(tree.node_bytes)
        memory.put(address, encode_node(node))
        return address

    known, total = entries(sum(counts) + num_last), 0
    for count in counts:
        for entry in known[total : total + count]:
            tree.add(entry, write)
        total += count
        edge = tree.copy()
        for entry in known[total : total + num_last]:
            edge.add(entry, write)
        root = edge.edge(write)
        assert read_chunks(memory.read, root, 2) == known[: total + num_last]


def test_nodes_of_a_closed_file_know_their_siblings():
    memory, tree = Memory(), ChunkTree((3, 5), 4)
    known = entries(MAX_CHILDREN**2 + 100)
    root, nodes = build_linked(tree, known, memory.allocate)
    for address, data in nodes:
        memory.put(address, data)
    assert read_chunks(memory.read, root, 2) == known
    for level in range(2):
        row = sorted((a, *struct.unpack("<QQ", d[8:24])) for a, d in nodes if d[5] == level)
        places = [2**64 - 1, *(address for address, _, _ in row), 2**64 - 1]
        assert [left for _, left, _ in row] == places[:-2]
        assert [right for _, _, right in row] == places[2:]


def test_a_damaged_tree_is_an_error():
    with pytest.raises(DataError, match="damaged at byte 64"):
        read_chunks(Memory().read, 64, 2)


FILTERS = {
    "gzip": {"compression": "gzip"},
    "gzip 9, shuffle": {"compression": "gzip", "compression_opts": 9, "shuffle": True},
    "lzf, shuffle, checksum": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "checksum": {"fletcher32": True},
    "lz4": dict(hdf5plugin.LZ4()),
    "zstd": dict(hdf5plugin.Zstd()),
    "bitshuffle": dict(hdf5plugin.Bitshuffle()),
    "bzip2": dict(hdf5plugin.BZip2()),
}


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("kind", ["random", "smooth", "zero"])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_hdf5_decodes_what_is_encoded(options, kind, is_fast):
    values = np.zeros(3001, [("a", "f4"), ("b", "i2"), ("c", "S3")])
    if kind != "zero":
        high = 256 if kind == "random" else 4
        values.view(np.uint8)[:] = np.random.default_rng(0).integers(high, size=values.nbytes)
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        made = file.create_dataset("x", (3001,), values.dtype, chunks=(3001,), **options)
        data, mask = make_encoder("x", hdf5.filters_of(made), is_fast).encode(values)
        made.id.write_direct_chunk((0,), bytes(data), filter_mask=mask)
    with h5py.File(memory, "r") as file:
        assert file["x"][:].tobytes() == values.tobytes()
    assert len(data) <= 1.01 * values.nbytes


def test_only_hdf5_can_apply_some_filters():
    with pytest.raises(DataError, match="scaleoffset"):
        make_encoder("x", [(6, (0,) * 20)], False)


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.data(),
)
def test_pieces_cover_a_part_once(chunk, inner, data):
    chunk = (chunk[0], *(min(pair) for pair in zip(chunk[1:], inner, strict=True)))
    geometry = Geometry(chunk, inner)
    starts = tuple(data.draw(st.integers(0, length - 1)) for length in inner)
    pairs = zip(starts, inner, strict=True)
    lengths = tuple(data.draw(st.integers(1, length - start)) for start, length in pairs)
    first = data.draw(st.integers(0, 20))
    rows = data.draw(st.sampled_from([range(first, first + 7), np.array([17, 3, 4, 30])]))
    part = np.arange(len(rows) * lengths[0] * lengths[1]).reshape(len(rows), *lengths)
    whole, expected = (np.full((40, *inner), -1) for _ in range(2))
    index = tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))
    expected[(np.asarray(rows), *index)] = part
    for piece in geometry.pieces(rows, starts, lengths):
        values = part[(piece.source_rows, *piece.source)]
        offsets = geometry.offsets(piece.block, piece.cell)
        assert geometry.place_of(offsets) == (piece.block, piece.cell)
        within = np.arange(chunk[0])[piece.rows] + offsets[0]
        place = [
            slice(o + s, o + s + n)
            for o, s, n in zip(offsets[1:], piece.starts, values.shape[1:], strict=True)
        ]
        assert (whole[(within, *place)] == -1).all()
        whole[(within, *place)] = values
    assert np.array_equal(whole, expected)


@pytest.mark.parametrize(
    ("shape", "item_bytes", "expected"),
    [
        ((None,), 8, (1024,)),
        ((None, 512, 512), 4, (1, 512, 512)),
        ((None, 512, 512), 8, (1, 256, 512)),
        ((None, 100), 4, (163, 100)),
        ((1000, 30), 8, (1000, 30)),
        ((10**6, 30), 8, (4369, 30)),
    ],
)
def test_automatic_chunks(shape, item_bytes, expected):
    assert automatic_chunks(shape, item_bytes) == expected


def test_a_place_is_reused_after_many_commits():
    free = ReuseList()
    free.add(7, 4096, 100)
    assert free.take(7 + KEPT_COMMITS - 1, 100) is None
    assert free.take(7 + KEPT_COMMITS, 101) is None
    assert free.take(7 + KEPT_COMMITS, 100) == 4096
    assert free.take(7 + KEPT_COMMITS, 100) is None
