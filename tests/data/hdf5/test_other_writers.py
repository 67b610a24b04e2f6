"""Files as other programs write them, and files that change during a pass."""

import os

import h5py
import numpy as np
import pytest

from mpistrat.cli import main
from mpistrat.data import Dataset, Field
from mpistrat.data.hdf5 import open_files
from mpistrat.errors import DataError


def null_terminated(length):
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(length)
    return kind


def test_a_table_of_pytables(tmp_path):
    # Its strings end with a zero, which those of h5py need not, and so its rows are not NumPy's.
    rows = np.zeros(50, [("id", "i8"), ("name", "S8"), ("energy", "f4")])
    rows["id"], rows["energy"] = np.arange(50), np.arange(50) / 2
    rows["name"] = [f"p{n}".encode() for n in range(50)]
    kind = h5py.h5t.create(h5py.h5t.COMPOUND, rows.itemsize)
    for name, member in (
        ("id", h5py.h5t.NATIVE_INT64),
        ("name", null_terminated(8)),
        ("energy", h5py.h5t.NATIVE_FLOAT),
    ):
        kind.insert(name.encode(), rows.dtype.fields[name][1], member)
    with h5py.File(tmp_path / "table.h5", "w") as file:
        group = file.create_group("detector")
        group.attrs["CLASS"] = np.bytes_("GROUP")
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((16,))
        properties.set_deflate(4)
        space = h5py.h5s.create_simple((50,), (h5py.h5s.UNLIMITED,))
        table = h5py.h5d.create(group.id, b"readout", kind, space, properties)
        table.write(h5py.h5s.ALL, h5py.h5s.ALL, rows)
    source = Dataset.from_hdf5(tmp_path / "table.h5", "detector/readout").shuffle(0)
    seen = []
    for batch in source.batch(8):
        assert (batch["energy"] == batch["id"] / 2).all()
        assert batch["name"].tolist() == [f"p{n}".encode() for n in batch["id"]]
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(50))


def test_a_file_of_matlab(tmp_path, capsys):
    path = tmp_path / "data.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["X"] = np.arange(60.0).reshape(3, 20)  # 20 x 3 there: columns come first
        file["X"].attrs["MATLAB_class"] = np.bytes_("double")
        for number in range(3):
            file[f"#refs#/{number}"] = np.full(number + 1, number)
            file[f"#refs#/{number}"].attrs["MATLAB_class"] = np.bytes_("double")
        file["C"] = np.array([[file[f"#refs#/{n}"].ref] for n in range(3)], h5py.ref_dtype)
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(512) + path.read_bytes()[512:])
    assert [x.tolist() for x in Dataset.from_hdf5(path, Field("X", axis=1))][3] == [3, 23, 43]
    with pytest.warns(UserWarning, match="'C' of .*cannot be read"):
        assert list(Dataset.from_hdf5(path).element_spec) == ["X"]
    cells = Dataset.from_hdf5(path, ("#refs#/*", Field("#refs#/*", attribute="MATLAB_class")))
    assert [(x.tolist(), name) for x, name in cells][2] == ([2, 2, 2], b"double")
    with pytest.raises(DataError, match="'C' of .*references.*'#refs#/0'"):
        Dataset.from_hdf5(path, "C").cardinality()
    assert main(["inspect", str(path)]) == 0
    assert "references" in capsys.readouterr().out


def test_dimension_scales_of_netcdf(tmp_path):
    with h5py.File(tmp_path / "data.nc", "w") as file:
        file["time"], file["x"] = np.arange(10.0), np.arange(4.0)
        file["t2m"] = np.arange(40.0).reshape(10, 4)
        for axis, name in enumerate(("time", "x")):
            file[name].make_scale(name)
            file["t2m"].dims[axis].attach_scale(file[name])
    fields = {"t2m": "t2m", "time": "time"}
    for example in Dataset.from_hdf5(tmp_path / "data.nc", fields):
        assert example["t2m"][0] == 4 * example["time"]
    with pytest.raises(DataError, match="one length, but 't2m' has 10, 'time' has 10, 'x' has 4"):
        Dataset.from_hdf5(tmp_path / "data.nc").cardinality()


def test_groups_of_pandas(tmp_path):
    with h5py.File(tmp_path / "frame.h5", "w") as file:
        group = file.create_group("df")
        group.attrs["pandas_type"] = np.bytes_("frame")
        group["axis0"], group["axis1"] = np.array([b"a", b"b"]), np.arange(6)
        group["block0_values"] = np.arange(12.0).reshape(6, 2)
        pickled = group.create_dataset("block1_values", (1,), h5py.vlen_dtype("u1"))
        pickled[0] = np.arange(5)
    fields = ("df/axis1", "df/block0_values")
    assert [(int(i), x.tolist()) for i, x in Dataset.from_hdf5(tmp_path / "frame.h5", fields)][
        5
    ] == (
        5,
        [10.0, 11.0],
    )


@pytest.mark.parametrize("layout", ["placed", "chunked", "of any length", "attribute"])
@pytest.mark.parametrize("happens", ["truncated", "replaced"])
def test_a_file_that_changes_during_a_pass(tmp_path, monkeypatch, layout, happens):
    monkeypatch.setattr(open_files, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        for number in range(300):
            length = number % 5 + 1 if layout == "of any length" else 4
            chunks = (2,) if layout == "chunked" else None
            file.create_dataset(f"g/{number}", data=np.full(length, number), chunks=chunks)
            file[f"g/{number}"].attrs["label"] = number
    field = Field("g/*", attribute="label") if layout == "attribute" else "g/*"
    iterator = iter(Dataset.from_hdf5(path, field).shuffle(0))
    next(iterator)
    if happens == "truncated":
        os.truncate(path, 5000)
    else:
        (tmp_path / "new.h5").write_bytes(path.read_bytes())
        os.replace(tmp_path / "new.h5", path)
    # The copy of the next rows may have begun before.
    with pytest.raises(DataError, match=r"data\.h5 (has changed since|cannot be read)"):
        list(iterator)


def test_a_match_that_becomes_shorter_unnoticed_is_an_error_and_no_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(open_files, "_CHECK_INTERVAL_S", 1e9)
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        for number in range(50):
            file[f"g/{number}"] = np.full(1000, number)
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    iterator = iter(Dataset.from_hdf5(path, "g/*").batch(5))
    next(iterator)
    os.truncate(path, 50_000)
    with pytest.raises(DataError, match=r"'g/\d+' to 'g/\d+' of the field 'g/\*' of .*data\.h5"):
        list(iterator)


def test_a_table_with_a_type_that_numpy_lacks(tmp_path, capsys):
    # Times of PyTables; h5py raises for such a member, and so for all of its data set.
    stored = h5py.h5t.create(h5py.h5t.COMPOUND, 24)
    for name, offset, member in (
        ("id", 0, h5py.h5t.NATIVE_INT64),
        ("time", 8, h5py.h5t.UNIX_D64LE),
        ("energy", 16, h5py.h5t.NATIVE_DOUBLE),
    ):
        stored.insert(name.encode(), offset, member)
    rows = np.zeros((30, 3))
    rows.view(np.int64)[:, 0], rows[:, 2] = np.arange(30), np.arange(30) / 2
    path = tmp_path / "table.h5"
    with h5py.File(path, "w") as file:
        for name, shape in (("rows", (30,)), ("plane", (2, 15))):
            space = h5py.h5s.create_simple(shape)
            table = h5py.h5d.create(file.id, name.encode(), stored, space)
            table.write(h5py.h5s.ALL, h5py.h5s.ALL, rows, stored)
        file["plain"] = np.arange(30)
    members = {"id": "rows/id", "energy": "rows/energy"}
    for batch in Dataset.from_hdf5(path, members).shuffle(0).batch(7):
        assert (batch["energy"] == batch["id"] / 2).all()
    columns = list(Dataset.from_hdf5(path, Field("plane/id", axis=1)))
    assert [column.tolist() for column in columns] == [[k, 15 + k] for k in range(15)]
    with pytest.raises(DataError, match="unknown to NumPy, in the member 'time'.*'rows/id'"):
        Dataset.from_hdf5(path, "rows").cardinality()
    with h5py.File(path, "a") as file:
        del file["plane"]
    with pytest.warns(UserWarning, match="'rows/time' of .*cannot be read"):
        assert list(Dataset.from_hdf5(path).element_spec["rows"]) == ["id", "energy"]
    assert main(["inspect", str(path)]) == 0
    assert "rows cannot be read as examples" in capsys.readouterr().out
