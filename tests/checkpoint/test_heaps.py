import h5py
import numpy as np
import pytest

from mpistrat.checkpoint.heaps import check_heap, check_heaps
from mpistrat.checkpoint.links import survey


def heap_object(number, content):
    header = number.to_bytes(2, "little") + bytes(6) + len(content).to_bytes(8, "little")
    return header + content.ljust(-(-len(content) // 8) * 8, b"\0")


def free(size_bytes):
    return bytes(8) + size_bytes.to_bytes(8, "little") + bytes(size_bytes - 16)


def heap(*parts):
    return bytes(16) + b"".join(parts)


@pytest.mark.parametrize(
    "parts",
    [
        [heap_object(1, b"SUM"), heap_object(2, b""), free(64)],
        [heap_object(7, b"a text"), free(16)],
        [heap_object(1, b"SUM"), bytes(8)],  # less than a header is free space without one
        [heap_object(1, b"SUM")],
        [free(4080)],
    ],
)
def test_sound_heaps(parts):
    check_heap(heap(*parts), at=0)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([heap_object(1, b"SUM"), bytes(16)], "ends elsewhere"),  # where HDF5 loops for ever
        ([heap_object(1, b"SUM"), free(64)[:-8]], "ends elsewhere"),
        ([heap_object(1, b"SUM"), free(64), free(16)], "ends elsewhere"),
        ([heap_object(1, b"SUM"), heap_object(1, b"NONE"), free(64)], "two objects 1"),
        ([heap_object(1, b"SUM")[:-8]], "do not fit"),
        ([heap_object(1, b"SUM")[:8] + b"\xff" * 16], "do not fit"),
        ([], "do not fit"),
    ],
)
def test_damaged_heaps(parts, words):
    with pytest.raises(ValueError, match=f"byte 96 .*{words}|{words}.* byte 96"):
        check_heap(heap(*parts), at=96)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file.h5"
    with h5py.File(path, "w") as opened:
        opened.attrs["text"] = "something"
    return path


def check(path):
    with h5py.File(path) as opened:
        check_heaps(survey(opened).datasets.values(), path)


@pytest.mark.parametrize("options", [{}, {"chunks": (100,)}, {"chunks": (64,), "fletcher32": True}])
def test_values_may_be_the_bytes_of_a_damaged_file(file, tmp_path, options):
    damaged = file.read_bytes().replace(b"GCOL\x01\0\0\0", b"GCOL\x01\0\0\0\xff")
    assert len(damaged) == file.stat().st_size + 1
    path = tmp_path / "outer.h5"
    with h5py.File(path, "w") as opened:
        opened.create_dataset("bytes", data=np.frombuffer(damaged, np.uint8), **options)
        opened.attrs["text"] = "something"
    assert b"GCOL\x01\0\0\0\xff" in path.read_bytes() or options
    check(path)


@pytest.mark.parametrize(("offset", "value"), [(8, 255), (16, 0), (24, 255), (31, 1)])
def test_a_damaged_heap_is_found_in_the_file(file, offset, value):
    data = bytearray(file.read_bytes())
    data[data.find(b"GCOL") + offset] = value
    file.write_bytes(data)
    with pytest.raises(ValueError, match="global heap at byte"):
        check(file)
