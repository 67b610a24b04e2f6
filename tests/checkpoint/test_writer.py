"""The file as other programs see it: h5py, h5ls and h5dump."""

import json
import re
import shutil
import subprocess
import threading
import time

import h5py
import numpy as np
import pytest
import xxhash

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.checkpoint.writer import create_checkpoint, state_item, variable_item
from mpistrat.errors import CheckpointError

KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES = {
    "kernel": KERNEL,
    "turned": KERNEL.T,
    "half": np.float16([1.5, np.nan, np.inf]),
    "flags": np.array([True, False]),
    "waves": np.array([1 + 2j, -3j], np.complex64),
    "scalar": np.int64(-7),
    "count": np.uint8([0, 255]),
    "none": np.zeros((0, 3)),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.h5"
    with create_checkpoint(path, Header(step=12, num_replicas=4, mpi_library="MPICH")) as writer:
        modes = {"synchronization": "ON_READ", "aggregation": "SUM", "trainable": True}
        writer.add(variable_item("model/layers/0/kernel", KERNEL, **modes))
        writer.add(variable_item("data/mean", np.ones(2)))
        writer.add(variable_item("data/x", np.ones(3)))
        writer.add(state_item("data", {"pass": 2, "name": "Zürich"}, ["mean", "x"]))
    return path


def tool(name, *arguments):
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def test_h5py_sees_the_contract(file):
    with h5py.File(file) as found:
        assert found.attrs["format"] == b"mpistrat-checkpoint"
        assert found.attrs["format_version"] == 2
        assert found.attrs["step"] == 12
        assert found.attrs["num_replicas"] == 4
        assert found.attrs["mpi_library"] == b"MPICH"
        assert found.attrs["mpistrat_version"]
        others = {
            name: value.decode() if isinstance(value, bytes) else int(value)
            for name, value in found.attrs.items()
            if name != "digest"
        }
        text = json.dumps(others, sort_keys=True).encode()
        assert found.attrs["digest"] == f"xxh3-128:{xxhash.xxh3_128_hexdigest(text)}".encode()
        assert re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*\+00:00", found.attrs["created"])
        kernel = found["variables/model/layers/0/kernel"]
        assert np.array_equal(kernel, KERNEL)
        assert kernel.dtype == np.float32
        assert kernel.attrs["synchronization"] == b"ON_READ"
        assert kernel.attrs["aggregation"] == b"SUM"
        assert kernel.attrs["trainable"].dtype == bool
        assert kernel.attrs["trainable"]
        digest = xxhash.xxh3_128_hexdigest(KERNEL.tobytes())
        assert kernel.attrs["digest"] == f"xxh3-128:{digest}".encode()
        text = found["state/data"][()]
        assert json.loads(text) == {"pass": 2, "name": "Zürich"}
        digest = xxhash.xxh3_128_hexdigest(text)
        assert found["state/data"].attrs["digest"] == f"xxh3-128:{digest}".encode()
        assert h5py.check_string_dtype(found["state/data"].dtype) == ("utf-8", len(text))
        assert found["state/data"].attrs["arrays"].tolist() == [b"mean", b"x"]


def test_h5ls_shows_the_tree(file):
    listing = tool("h5ls", "-r", str(file))
    assert re.search(r"^/variables/model/layers/0/kernel\s+Dataset \{2, 3\}$", listing, re.M)
    assert re.search(r"^/state/data\s+Dataset \{SCALAR\}$", listing, re.M)


def test_h5dump_shows_values_and_attributes(file):
    dump = tool("h5dump", str(file))
    assert '"mpistrat-checkpoint"' in dump
    assert '"ON_READ"' in dump
    assert '(0): "mean", "x"' in dump
    assert "H5T_IEEE_F32LE" in dump
    assert "(1,0): 3, 4, 5" in dump
    assert "TRUE" in dump


def test_every_dtype_comes_back_to_the_bit(tmp_path):
    path = tmp_path / "run.h5"
    with create_checkpoint(path, Header()) as writer:
        for name, array in VALUES.items():
            writer.add(variable_item(name, np.asarray(array)))
    with open_checkpoint(path) as reader:
        assert sorted(reader.variables) == sorted(VALUES)
        for name, array in VALUES.items():
            read = reader.read_variable(name)
            assert read.dtype == array.dtype
            assert read.shape == array.shape
            assert read.tobytes() == array.tobytes()


def test_values_in_the_other_byte_order_are_read(tmp_path):
    path = tmp_path / "run.h5"
    swapped = KERNEL.astype(KERNEL.dtype.newbyteorder())
    with create_checkpoint(path, Header()) as writer:
        writer.add(variable_item("kernel", swapped))
    with open_checkpoint(path) as reader:
        assert reader.variables["kernel"].dtype == KERNEL.dtype
        read = reader.read_variable("kernel")
    assert read.dtype.isnative
    assert np.array_equal(read, KERNEL)


@pytest.mark.parametrize("userblock", [0, 512])
def test_values_of_another_program_are_read_where_they_lie(file, tmp_path, userblock):
    path = tmp_path / "other.h5"
    odd = h5py.h5t.NATIVE_INT32.copy()
    odd.set_precision(24)  # of 32 bits: the others are no part of the number
    numbers = np.arange(-3, 97, dtype=np.int32)
    values = {"kernel": KERNEL, "odd": numbers, "swapped": numbers.astype(">i4")}
    modes = {"synchronization": "AUTO", "aggregation": "NONE", "trainable": True}
    with h5py.File(file) as old, h5py.File(path, "w", userblock_size=userblock) as new:
        new.attrs.update(old.attrs)
        new.create_group("state")
        for name, value in values.items():
            dtype = h5py.Datatype(odd) if name == "odd" else None
            dataset = new.create_dataset(f"variables/{name}", data=value, dtype=dtype)
            digest = xxhash.xxh3_128_hexdigest(value.tobytes())
            dataset.attrs.update(modes, digest=f"xxh3-128:{digest}")
    with open_checkpoint(path) as reader:
        for name, value in values.items():
            assert np.array_equal(reader.read_variable(name), value)
            assert (reader.extent_of(name) is None) == (name != "kernel")
        reader.verify()


def test_no_metadata_lies_in_a_global_heap(file):
    assert b"GCOL" not in file.read_bytes()  # which has no checksum, and can make HDF5 loop


def test_a_repacked_file_is_as_good(file, tmp_path):
    repacked = tmp_path / "repacked.h5"
    tool("h5repack", "-f", "GZIP=9", str(file), str(repacked))
    with open_checkpoint(repacked) as reader:
        assert np.array_equal(reader.read_variable("model/layers/0/kernel"), KERNEL)
        assert reader.header.step == 12
        reader.verify()


def test_a_file_of_another_program_needs_no_digest_of_the_attributes(file):
    with h5py.File(file, "r+") as opened:
        del opened.attrs["digest"], opened["state/data"].attrs["arrays"]
        opened.attrs["created"] = "2030-01-02T03:04:05Z"
    with open_checkpoint(file) as reader:
        reader.verify()
        assert reader.header.created_s == 1893553445


@pytest.mark.launches
def test_a_state_may_have_many_arrays_and_a_long_text(tmp_path):
    path = tmp_path / "run.h5"
    names = [f"history/{i:0100}" for i in range(700)]
    with create_checkpoint(path, Header()) as writer:
        for name in names:
            writer.add(variable_item(f"data/{name}", np.zeros(1)))
        writer.add(state_item("data", {"text": "x" * 100_000}, names))
    with open_checkpoint(path) as reader:
        reader.verify()
        assert len(reader.read_state("data")["text"]) == 100_000


def test_an_exception_while_writing_leaves_the_old_file_and_nothing_else(file):
    before = file.read_bytes()

    def fail():
        with create_checkpoint(file, Header()) as writer:
            writer.add(variable_item("x", KERNEL))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_after_an_interrupt_no_thread_writes_the_rest(file, monkeypatch):
    begun, written = threading.Event(), []

    def write_slowly(handle, offset, piece):
        begun.set()
        time.sleep(0.05)
        written.append(offset)

    def interrupt():
        with create_checkpoint(file, Header()) as writer:
            writer.add(variable_item("large", np.zeros(2**24, np.uint8)))
            begun.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr("mpistrat.checkpoint.writer.write_at", write_slowly)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    num_written = len(written)
    assert num_written < 16, "as good as all 32 parts"
    time.sleep(0.1)
    assert len(written) == num_written


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "run.h5"
    with create_checkpoint(path, Header()):
        assert not path.exists()
    assert path.exists()


@pytest.mark.parametrize("make", ["file_in_the_way", "folder_in_the_way"])
def test_what_cannot_be_written_is_named(tmp_path, make):
    if make == "file_in_the_way":
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "run.h5"
    else:
        path = tmp_path / "run.h5"
        path.mkdir()
    with (
        pytest.raises(CheckpointError, match=r"run\.h5 cannot be written"),
        create_checkpoint(path, Header()),
    ):
        pass
