"""Rows that are copied from their place in the file: which, what, and files that become shorter."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data import Dataset
from mpistrat.data.hdf5 import chunk_cache
from mpistrat.data.hdf5.catalog import read_catalog
from mpistrat.data.hdf5.open_files import OpenFiles
from mpistrat.data.hdf5.row_reader import Hdf5Reader
from mpistrat.data.hdf5.rows import is_placed
from mpistrat.data.hdf5.source import Hdf5Source
from mpistrat.data.random import PassStream
from mpistrat.errors import DataError
from mpistrat.native import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the compiled module")

ROWS = np.arange(3000 * 40, dtype=np.int32).reshape(3000, 5, 8)


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    monkeypatch.setattr(chunk_cache, "_ROW_CACHE_BYTES", 0)


def gzipped(file):
    file.create_dataset("x", data=ROWS, chunks=(64, 5, 8), compression="gzip")


def in_chunks(file):
    file.create_dataset("x", data=ROWS, chunks=(64, 5, 8))


def in_pieces(file):
    file.create_dataset("x", data=ROWS, chunks=(64, 5, 4))


def contiguous(file):
    file["x"] = ROWS


def unwritten(file):
    file.create_dataset("x", shape=ROWS.shape, dtype=ROWS.dtype, chunks=(64, 5, 8))[64:] = ROWS[64:]


def foreign(file):
    file["x"] = ROWS.astype(">i4")


KINDS = {
    contiguous: True,
    in_chunks: True,
    in_pieces: False,
    gzipped: False,
    unwritten: False,
    foreign: False,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_bytes", [0, 512])
def test_every_kind_gives_its_rows_and_some_without_decoding(tmp_path, kind, block_bytes):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=block_bytes) as file:
        kind(file)
        expected = file["x"][()]
    # Versions of HDF5 differ in where chunks lie in a file with a user block.
    known = KINDS[kind] and not (block_bytes and kind is in_chunks)
    assert is_placed(read_catalog([str(path)], "x"), 0) == known
    assert np.array_equal(np.concatenate(list(Dataset.from_hdf5(path, "x").batch(70))), expected)
    shuffled = np.concatenate(list(Dataset.from_hdf5(path, "x").shuffle(0).batch(70)))
    order = shuffled[:, 0, 0].astype(np.int64)
    assert not np.array_equal(shuffled, expected)
    assert np.array_equal(np.sort(order), np.sort(expected[:, 0, 0].astype(np.int64)))
    if kind is not unwritten:
        assert np.array_equal(shuffled, ROWS[order // 40])


def test_rows_of_several_files_of_several_kinds(tmp_path):
    for number, kind in enumerate((contiguous, in_chunks)):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            kind(file)
    dataset = Dataset.from_hdf5(f"{tmp_path}/part-*.h5", "x").shuffle(3).batch(128)
    found = np.concatenate(list(dataset))
    assert np.array_equal(np.sort(found[:, 0, 0]), np.sort(np.tile(ROWS[:, 0, 0], 2)))
    assert np.array_equal(found, ROWS[found[:, 0, 0] // 40])


def test_files_that_cannot_be_mapped_are_read_too(tmp_path, monkeypatch):
    for number, kind in enumerate((contiguous, in_chunks)):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            kind(file)
    source = Dataset.from_hdf5(f"{tmp_path}/part-*.h5", "x")
    expected = np.concatenate(list(source.shuffle(3).batch(128)))
    monkeypatch.setattr(OpenFiles, "mapping", lambda self, file: None)
    found = np.concatenate(list(source.shuffle(3).batch(128)))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", [contiguous, in_chunks, gzipped])
def test_rows_may_be_read_in_other_numbers_than_those_before(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("MPISTRAT_DATA_THREADS", "3")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        kind(file)
    source = Hdf5Source(tmp_path / "x.h5", "x")
    rng = np.random.default_rng(0)
    announced = rng.permutation(len(ROWS))
    with closing(source.open(len(ROWS), PassStream(0, 0))) as reader:
        reader.expect(announced[:1000])
        reader.expect(announced[1000:])
        position = 0
        while position < len(ROWS):
            count = int(rng.integers(1, 900))
            numbers = announced[position : position + count]
            assert np.array_equal(reader.read(numbers), ROWS[numbers])
            position += count


def test_a_window_of_all_examples_costs_no_memory_and_mixes_all(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        contiguous(file)
    dataset = Dataset.from_hdf5(tmp_path / "x.h5", "x").shuffle(0, window=3000).batch(100)
    first = next(iter(dataset))[:, 0, 0] // 40
    assert first.min() < 300
    assert first.max() > 2700


@given(
    num_rows=st.integers(1, 30),
    row_bytes=st.integers(1, 40),
    chosen=st.lists(st.integers(0, 10**6), max_size=40),
    has_places=st.booleans(),
)
def test_copies_are_those_of_numpy(num_rows, row_bytes, chosen, has_places):
    mapped = np.random.default_rng(0).integers(0, 256, num_rows * row_bytes, np.uint8)
    rows = np.array([each % num_rows for each in chosen], np.int64)
    places = np.random.default_rng(1).permutation(len(rows)).astype(np.int64)
    output = np.zeros((len(rows), row_bytes), np.uint8)
    own = places if has_places else None
    assert native_library().copy_rows(mapped, rows * row_bytes, own, output)
    expected = np.zeros_like(output)
    expected[places if has_places else slice(None)] = mapped.reshape(num_rows, -1)[rows]
    assert np.array_equal(output, expected)


@given(
    row_bytes=st.integers(1, 5000),
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    num_helpers=st.integers(0, 9),
    ended=st.permutations(range(6)),
    num_given_up=st.integers(0, 5),
)
def test_copies_by_helpers_are_those_of_numpy(row_bytes, counts, num_helpers, ended, num_given_up):
    mapped = np.random.default_rng(0).integers(0, 256, 50 * row_bytes, np.uint8)
    begun = {}
    for number, count in enumerate(counts):
        rows = np.random.default_rng(number).integers(0, 50, count)
        output = np.zeros((count, row_bytes), np.uint8)
        arguments = (mapped, rows * row_bytes, None, output, num_helpers)
        begun[number] = native_library().begin_copy(*arguments), rows, output
    del mapped
    for number in [each for each in ended if each in begun][num_given_up:]:
        copy, rows, output = begun.pop(number)
        assert native_library().end_copy(copy)
        assert native_library().end_copy(copy)
        content = np.random.default_rng(0).integers(0, 256, 50 * row_bytes, np.uint8)
        assert np.array_equal(output, content.reshape(50, -1)[rows])


def test_what_is_no_copy_cannot_be_ended():
    for arguments in ((), (None,), (np.ones(1),)):
        with pytest.raises((TypeError, ValueError)):
            native_library().end_copy(*arguments)
    with pytest.raises(TypeError):
        native_library().begin_copy(np.ones(1, np.uint8), np.array([0]), None, np.ones(1), "two")


def test_a_forked_process_has_its_own_helpers():
    mapped = np.arange(10**6, dtype=np.uint8)
    output = np.zeros((1000, 1000), np.uint8)
    arguments = (mapped, np.arange(1000) * 1000, None, output, 3)
    before = native_library().begin_copy(*arguments)
    child = os.fork()
    if not child:
        del before
        output[...] = 0
        is_copied = native_library().end_copy(native_library().begin_copy(*arguments))
        os._exit(0 if is_copied and (output.ravel() == mapped).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert native_library().end_copy(before)
    assert (output.ravel() == mapped).all()


@pytest.mark.parametrize(
    ("offsets", "places", "error"),
    [([-1], None, None), ([98], None, None), ([0], [1], IndexError), ([0, 1], None, ValueError)],
)
def test_nothing_is_copied_from_or_to_elsewhere(offsets, places, error):
    mapped, output = np.ones(100, np.uint8), np.zeros((1, 3), np.uint8)
    arguments = (mapped, np.array(offsets), None if places is None else np.array(places), output)
    if error is None:
        assert native_library().copy_rows(*arguments) is False
    else:
        with pytest.raises(error):
            native_library().copy_rows(*arguments)
    assert not output.any()


def test_a_file_that_becomes_shorter_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.ones((4000, 1000))
    batches = iter(Dataset.from_hdf5(path, "x").shuffle(0).batch(10))
    next(batches)
    os.truncate(path, 2**20)
    with pytest.raises(DataError, match="become shorter|has changed"):
        for _ in batches:
            pass


SHORTER = """
import faulthandler, os, signal, sys
import numpy as np
from mpistrat.native import native_library

if "faulthandler" in sys.argv:
    faulthandler.enable()
with open("file", "wb") as file:
    file.write(bytes(10**6))
handle = os.open("file", os.O_RDWR)
mapped = native_library().map_file(handle, 10**6)
os.truncate(handle, 5000)
rows = np.zeros((2, 1000), np.uint8)
for _ in range(3):
    assert not native_library().copy_rows(mapped, np.array([0, 900_000]), None, rows)
    assert native_library().copy_rows(mapped, np.array([0, 1000]), None, rows)
large = np.zeros((300, 1000), np.uint8)
for _ in range(30):
    begun = [
        native_library().begin_copy(mapped, np.full(300, offset), None, large, 3)
        for offset in (0, 900_000, 2000)
    ]
    assert [native_library().end_copy(each) for each in begun] == [True, False, True]
print("alive", flush=True)
if "touch" in sys.argv:
    bytes(mapped[900_000:])
"""


@pytest.mark.parametrize("before", ["", "faulthandler"])
def test_a_signal_outside_of_a_copy_is_as_fatal_as_before(tmp_path, before):
    command = [sys.executable, "-c", SHORTER, before]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    done = subprocess.run(
        [*command, "touch"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "alive\n")
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(before)


def test_a_mapping_needs_no_descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 5000)
    handle = os.open(path, os.O_RDONLY)
    mapped = native_library().map_file(handle, 15_000)
    os.close(handle)
    assert bytes(mapped[:6]) == b"abcabc"
    assert not mapped.flags.writeable


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (8, 3)}, {"chunks": (8, 3), "compression": "lzf"}]
)
@pytest.mark.parametrize("size", [1, 3])
def test_small_batches_that_are_read_together_are_batches_of_their_own(tmp_path, options, size):
    values = np.arange(900).reshape(300, 3)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("x", data=values, **options)
        file["label"] = np.arange(300)
    dataset = Dataset.from_hdf5(tmp_path / "data.h5", ("x", "label"))
    for each in (dataset, dataset.shuffle(0), dataset.skip(7), dataset.repeat(2)):
        for batch_size in (1, 4, 7):
            passes = [
                list(each.batch(batch_size)._pipeline.elements(0, 0, size, rank))
                for rank in range(size)
            ]
            for batch in zip(*passes, strict=True):
                rows = np.concatenate([x for x, _ in batch])
                labels = np.concatenate([label for _, label in batch])
                assert (rows == values[labels]).all()
                for x, label in batch:  # what a program writes to one batch is in no other
                    x[...] = -1
                    label[...] = -1


def test_a_large_batch_does_not_wait_for_the_next_one_to_be_announced(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((4096, 512)), chunks=(64, 512), compression="gzip")
    announced = []

    def expect(self, numbers, expect=Hdf5Reader.expect):
        announced.append(len(numbers))
        expect(self, numbers)

    monkeypatch.setattr(Hdf5Reader, "expect", expect)
    batches = iter(Dataset.from_hdf5(tmp_path / "data.h5", "x").batch(1024))
    next(batches)
    assert announced == [1024]
    assert sum(len(each) for each in batches) == 3 * 1024
    assert sum(announced) == 4096


def test_an_error_in_small_batches_comes_with_its_batch(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        data = np.arange(90).reshape(30, 3)
        file.create_dataset("x", data=data, chunks=(2, 3), compression="gzip", fletcher32=True)
        chunk = file["x"].id.get_chunk_info(5)
    raw = bytearray(path.read_bytes())
    raw[chunk.byte_offset + 3] ^= 0xFF
    path.write_bytes(raw)
    seen = []
    with pytest.raises(DataError, match="Rows 10 to 11"):
        for batch in Dataset.from_hdf5(path, "x").batch(2):
            seen.append(batch)
    assert len(seen) in (0, 5)  # chunks of several batches may be decoded together
