"""Shards in a file: what is written part by part is the whole, whatever the parts are."""

import dataclasses
import itertools
import os

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.raw_io import (
    Extent,
    PageRun,
    Written,
    digests_in_file,
    read_box,
    write_box,
)
from mpistrat.checkpoint.write import Room
from mpistrat.checkpoint.writer import create_checkpoint, variable_item
from mpistrat.errors import CheckpointError
from mpistrat.sharding import Box

DTYPES = ["u1", "<f2", "<f4", "<f8", "<c16"]


@pytest.fixture
def handle(tmp_path):
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield handle
    os.close(handle)


def boxes(shape, cuts):
    """Return a grid of boxes that cover an array, cut along each axis."""
    found = [Box(tuple(shape), (), ())]
    for length, of_axis in zip(shape, cuts, strict=True):
        edges = sorted({0, length, *(each for each in of_axis if each < length)})
        ranges = [(a, b - a) for a, b in itertools.pairwise(edges)] or [(0, 0)]
        found = [
            Box(box.shape, (*box.offsets, begin), (*box.sizes, size))
            for box in found
            for begin, size in ranges
        ]
    return found


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    cuts=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=4, max_size=4),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 40),
)
def test_boxes_that_cover_an_array_are_the_array(shape, cuts, dtype, offset):
    handle = os.memfd_create("shards")
    try:
        array = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape).astype(dtype)
        extent = Extent(offset, array.nbytes, array.itemsize)
        parity = num_items = 0
        for box in boxes(shape, cuts[: len(shape)]):
            selection = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            part = np.array(array[selection], order="C")
            written = write_box(handle, extent, box, part)
            again = np.zeros(box.sizes, dtype)
            read_box(handle, extent, box, again)
            assert np.array_equal(again, part)
            parity, num_items = parity ^ written.parity, num_items + written.num_items
        assert os.pread(handle, array.nbytes, offset) == array.tobytes()
        whole = digests_in_file(handle, {"x": extent}, 2)["x"]
        digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(array.tobytes())}"
        assert whole == Written(num_items, parity, digest) == Written(array.size, parity, digest)
    finally:
        os.close(handle)


def test_a_file_that_ends_too_early(handle):
    os.pwrite(handle, b"12", 0)
    with pytest.raises(OSError, match="the file ends at byte 2"):
        digests_in_file(handle, {"x": Extent(0, 4, 1)}, 1)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0, 2)], "have 2 of the 4 elements of x. All ranks of its device mesh"),
        ([(0, 2), (1, 2)], "the file does not contain the values of x that they have written"),
    ],
)
def test_what_the_ranks_have_not_written_as_they_say_is_no_checkpoint(tmp_path, parts, words):
    path = tmp_path / "run.h5"
    array = np.arange(4.0)
    with pytest.raises(CheckpointError, match=words), create_checkpoint(path, Header()) as writer:
        room = Room.reserve(writer, str(path), [variable_item("x", array)])
        written = [
            room.write_part(writer.handle, "x", Box((4,), (begin,), (2,)), array[begin:][:size])
            for begin, size in parts
        ]
        assert dataclasses.replace(room, temporary="/none").open() is None
        assert dataclasses.replace(room, inode=room.inode + 1).open() is None
        found = room.read_back([PageRun("x", 0, 1)], 1)
        room.sign(writer, [{"x": written}], found)
    assert os.listdir(tmp_path) == []
