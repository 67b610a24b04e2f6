"""``mpistrat verify`` and ``mpistrat diff`` of HDF5 files that are no checkpoints."""

import json
import re
import struct
import zlib

import h5py
import hdf5plugin
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cli import main

ROWS = np.arange(60.0).reshape(20, 3)


def verify(path, capsys):
    """Return the exit code of the command, and what it prints on one line."""
    code = main(["verify", str(path)])
    return code, " ".join(capsys.readouterr().out.split())


def create(path, **options):
    """Create a file with chunks of 5 rows, and return what HDF5 says of them."""
    with h5py.File(path, "w", libver="earliest") as file:
        options = {"chunks": (5, 3), "maxshape": (None, 3), **options}
        file.create_dataset("group/x", data=ROWS, **options)
        file["beside"] = np.arange(4.0)
    with h5py.File(path) as file:
        return [file["group/x"].id.get_chunk_info(n) for n in range(4)]


def patch(path, place, content):
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


def move(path, chunk, address):
    """Let the B-tree name a different address for a chunk."""
    content = path.read_bytes()
    old = struct.pack("<Q", chunk.byte_offset)
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, struct.pack("<Q", address)))


FILTERS = {
    "none": {},
    "gzip": {"compression": "gzip", "shuffle": True},
    "fletcher32": {"fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lz4": hdf5plugin.LZ4(),
    "zstd": hdf5plugin.Zstd(),
    "scaleoffset": {"scaleoffset": 2},  # only HDF5 can decode it
}


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_whole_files(tmp_path, capsys, options):
    path = tmp_path / "data.h5"
    create(path, **options)
    with h5py.File(path, "r+") as file:
        file["text"], file["nothing"], file["empty"] = ["a", "bc"], h5py.Empty("f4"), np.zeros(0)
        file["same"], file["soft"] = file["group/x"], h5py.SoftLink("/nowhere")
        file.create_dataset("sparse", (100, 4), "f8", chunks=(10, 4))[55] = 1
    code, shown = verify(path, capsys)
    assert code == 0, shown
    assert "ok" in shown


@pytest.mark.parametrize("mode", ["a", "w"])
def test_files_of_the_writer(tmp_path, capsys, mode):
    path = tmp_path / "data.h5"
    with ms.data.HDF5Writer(path, mode, compression="gzip") as out:
        for step in range(100):
            out.append({"x": np.full((step % 3, 4), step), "time": step / 2})
            if mode == "a" and step % 30 == 0:  # while it grows
                assert verify(path, capsys)[0] == 0
    code, shown = verify(path, capsys)
    assert code == 0
    assert "2 datasets" in shown


@pytest.mark.parametrize("distance", [0, 8, 119])
def test_chunks_that_overlap(tmp_path, capsys, distance):
    path = tmp_path / "data.h5"
    chunks = create(path)
    move(path, chunks[2], chunks[0].byte_offset + distance)
    code, shown = verify(path, capsys)
    assert code == 1
    assert "DAMAGED" in shown
    for rows in ("'group/x', rows 0 to 4", "'group/x', rows 10 to 14"):
        assert rows in shown
    assert "overlap" in shown


def test_chunks_of_the_same_rows_that_overlap(tmp_path, capsys):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        x = file.create_dataset("x", data=np.arange(80.0).reshape(4, 20), chunks=(4, 5))
        chunks = [x.id.get_chunk_info(n) for n in range(4)]
    move(path, chunks[3], chunks[1].byte_offset)
    code, shown = verify(path, capsys)
    assert code == 1
    assert "'x', rows 0 to 3" in shown


def test_a_chunk_over_a_contiguous_dataset(tmp_path, capsys):
    path = tmp_path / "data.h5"
    chunks = create(path)
    with h5py.File(path) as file:
        place = file["beside"].id.get_offset()
    move(path, chunks[1], place)
    code, shown = verify(path, capsys)
    assert code == 1
    assert "'beside'" in shown
    assert "'group/x', rows 5 to 9" in shown


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}], ids=["plain", "gzip"])
def test_a_chunk_outside_the_file(tmp_path, capsys, options):
    path = tmp_path / "data.h5"
    chunks = create(path, **options)
    move(path, chunks[3], path.stat().st_size - 1)
    code, shown = verify(path, capsys)
    assert code == 1
    assert re.search("'group/x', rows 15 to 19: the chunk ends at byte", shown)


@pytest.mark.parametrize("name", ["gzip", "fletcher32", "lzf", "lz4", "zstd"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_damaged_chunk_is_named(tmp_path, capsys, name, number):
    path = tmp_path / "data.h5"
    chunk = create(path, **FILTERS[name])[number]
    # Zstandard has no checksum of the content, so some changes of it only give different values.
    start = 0 if name == "zstd" else 10
    patch(path, chunk.byte_offset + start, b"\xff" * 8)
    code, shown = verify(path, capsys)
    assert code == 1
    assert f"dataset 'group/x', rows {5 * number} to {5 * number + 4}" in shown


def test_a_chunk_of_a_different_size(tmp_path, capsys):
    path = tmp_path / "data.h5"
    create(path, compression="gzip")
    with h5py.File(path, "r+") as file:
        file["group/x"].id.write_direct_chunk((5, 0), zlib.compress(bytes(8)))
    code, shown = verify(path, capsys)
    assert code == 1
    assert "dataset 'group/x', rows 5 to 9" in shown


def test_a_truncated_file(tmp_path, capsys):
    path = tmp_path / "data.h5"
    create(path)
    path.write_bytes(path.read_bytes()[:-20])
    code, shown = verify(path, capsys)
    assert code == 1, shown


def test_verify_for_programs(tmp_path, capsys):
    whole, damaged = tmp_path / "whole.h5", tmp_path / "damaged.h5"
    for path in (whole, damaged):
        chunks = create(path, fletcher32=True)
    patch(damaged, chunks[2].byte_offset, b"\xff")
    assert main(["verify", "--json", str(whole), str(damaged)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found[str(whole)] == {
        "sound": True,
        "num_datasets": 2,
        "size_bytes": ROWS.nbytes + 4 * 4 + 32,
    }
    assert found[str(damaged)]["sound"] is False
    assert "rows 10 to 14" in found[str(damaged)]["error"]


def diff(a, b, capsys):
    code = main(["diff", str(a), str(b)])
    return code, " ".join(capsys.readouterr().out.split())


def test_equal_files_with_different_layouts(tmp_path, capsys):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    create(a)
    create(b, compression="gzip", chunks=(7, 2))
    kind = h5py.vlen_dtype("i4")
    for path in (a, b):
        with h5py.File(path, "r+") as file:
            file["nan"], file["text"] = [1.0, np.nan], ["a", "bc"]
            file["one"], file["nothing"] = 3, h5py.Empty("f4")
            file["pairs"] = np.array([(1, np.nan), (2, 3)], [("a", "i4"), ("b", "f8")])
            file.create_dataset("ragged", (2,), kind)[:] = [np.arange(3), np.arange(1)]
    assert diff(a, b, capsys)[0] == 0


@pytest.mark.parametrize("row", [0, 7, 19])
def test_a_difference_names_dataset_and_row(tmp_path, capsys, row):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    for path in (a, b):
        create(path)
    with h5py.File(b, "r+") as file:
        file["group/x"][row, 1] = -1
    code, shown = diff(a, b, capsys)
    assert code == 1
    assert "group/x" in shown
    assert f"1 of 60 elements differ, first in row {row}" in shown
    assert "beside" not in shown


def test_differences_of_any_kind(tmp_path, capsys):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    kind = h5py.vlen_dtype("i4")
    for path in (a, b):
        with h5py.File(path, "w") as file:
            is_b = path == b
            file[f"only_{path.stem}"] = 1
            file["dtype"] = np.arange(3, dtype="f4" if is_b else "f8")
            file["shape"] = np.zeros(4 if is_b else 5)
            file["text"] = ["a", "x" if is_b else "y"]
            file["one"] = float(is_b)
            file["pairs"] = np.array([(1, 2), (2, 3 + is_b)], [("a", "i4"), ("b", "f8")])
            values = [np.arange(3), np.arange(1 + is_b)]
            file.create_dataset("ragged", (2,), kind)[:] = values
            file["nan"] = [np.nan, np.nan if is_b else 0]
            file["same"] = np.arange(3)
    assert main(["diff", "--json", str(a), str(b)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["num_paths"] == 10
    assert found["differences"] == {
        "only_a": "only in a",
        "only_b": "only in b",
        "dtype": "float64 (3,) in a, float32 (3,) in b",
        "shape": "float64 (5,) in a, float64 (4,) in b",
        "text": "1 of 2 elements differ, first in row 1",
        "one": "1 of 1 elements differ",
        "pairs": "1 of 2 elements differ, first in row 1",
        "ragged": "1 of 2 elements differ, first in row 1",
        "nan": "1 of 2 elements differ, first in row 1",
    }


def test_diff_of_a_file_that_cannot_be_read(tmp_path, capsys):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    create(a)
    b.write_bytes(b"no HDF5 file")
    assert diff(a, b, capsys)[0] == 2
