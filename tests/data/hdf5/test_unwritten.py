"""Elements that were never written: what h5py gives, whatever the memory held before."""

import itertools

import h5py
import numpy as np
import pytest

import mpistrat as ms

Dataset, Field = ms.data.Dataset, ms.data.Field

EVENT = np.dtype([("t", "f8"), ("pair", "i2", (2,)), ("name", "S3")])
TYPES = {
    "i4": np.dtype("i4"),
    "big_endian": np.dtype(">f8"),
    "compound": EVENT,
    "text": h5py.string_dtype(),
    "bytes": np.dtype("S5"),
    "rows": h5py.vlen_dtype("f4"),
}
FILL_TIMES = {
    "never": h5py.h5d.FILL_TIME_NEVER,
    "ifset": h5py.h5d.FILL_TIME_IFSET,
    "alloc": h5py.h5d.FILL_TIME_ALLOC,
}
ALLOC_TIMES = {
    "early": h5py.h5d.ALLOC_TIME_EARLY,
    "late": h5py.h5d.ALLOC_TIME_LATE,
    "incr": h5py.h5d.ALLOC_TIME_INCR,  # chunk by chunk
}


@pytest.fixture
def _junk(monkeypatch):
    """Let new memory hold anything but zeros, as it does in a program that runs for a while."""
    empty = np.empty

    def with_junk(*args, **kwargs):
        array = empty(*args, **kwargs)
        if not array.dtype.hasobject and array.nbytes:
            array.reshape(-1).view(np.uint8).fill(0x77)
        return array

    monkeypatch.setattr(np, "empty", with_junk)
    monkeypatch.setattr(np, "empty_like", lambda a: with_junk(a.shape, a.dtype))


def create(file, name, dtype, shape, *, chunk=None, fill_time="never", alloc="incr", gzip=False):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(FILL_TIMES[fill_time])
    if chunk:
        properties.set_chunk(chunk)
    properties.set_alloc_time(ALLOC_TIMES[alloc])
    if gzip:
        properties.set_deflate(1)
    h5type, space = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5type, space, properties))


def value_of(dtype, number):
    if dtype.names:
        return (number + 0.5, (number, -number), f"e{number % 10}")
    if h5py.check_string_dtype(dtype) is not None:
        return f"r{number}"
    if h5py.check_vlen_dtype(dtype) is not None:
        return np.arange(number % 3 + 1, dtype="f4")
    return number


def same(ours, theirs):
    if isinstance(ours, dict):
        return all(same(ours[name], theirs[name]) for name in ours)
    if np.asarray(ours).dtype.kind == "U":
        return str(ours) == (theirs.decode() if isinstance(theirs, bytes) else theirs or "")
    if not isinstance(theirs, np.ndarray) and np.ndim(ours) == 1:  # h5py has no array for it
        return len(ours) == 0 and theirs in (0, None)
    return np.array_equal(ours, theirs)


def check(dataset, expected, batch=3):
    for number, (ours, theirs) in enumerate(zip(dataset, expected, strict=True)):
        assert same(ours, theirs), f"example {number}: {ours!r} in place of {theirs!r}"
    for size in (1, batch):
        batches = dataset.enumerate().shuffle(1).ragged_batch(size)
        for numbers, values in batches:
            rows = values
            if isinstance(values, ms.data.Ragged):
                rows = np.split(values.values, values.row_splits[1:-1])
            elif isinstance(values, dict):
                rows = [{name: values[name][n] for name in values} for n in range(len(numbers))]
            for number, row in zip(numbers, rows, strict=True):
                assert same(row, expected[number])


@pytest.mark.usefixtures("_junk")
@pytest.mark.parametrize("kind", TYPES)
def test_rows(tmp_path, kind):
    path, dtype = tmp_path / "rows.h5", TYPES[kind]
    layouts = ((None, False), ((2,), False), ((2,), True))
    names = []
    with h5py.File(path, "w") as file:
        for fill_time, alloc, (chunk, gzip), write in itertools.product(
            FILL_TIMES, ALLOC_TIMES, layouts, (False, True)
        ):
            if fill_time == "never" and h5py.check_dtype(vlen=dtype) is not None:
                continue  # HDF5 refuses it
            name = f"{fill_time}-{alloc}-{chunk}-{gzip}-{write}"
            dataset = create(
                file, name, dtype, (9,), chunk=chunk, fill_time=fill_time, alloc=alloc, gzip=gzip
            )
            names.append(name)
            for number in (0, 1, 4, 5) if write else ():
                dataset[number] = value_of(dtype, number)
    for name in names:
        with h5py.File(path) as file:
            expected = file[name][()]
        check(Dataset.from_hdf5(path, name), expected)
        if dtype.names:
            for member in dtype.names:
                check(Dataset.from_hdf5(path, f"{name}/{member}"), expected[member])


@pytest.mark.usefixtures("_junk")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("chunk", [(1, 2), (2, 3), None])
def test_rows_along_an_axis(tmp_path, axis, chunk):
    path = tmp_path / "axis.h5"
    with h5py.File(path, "w") as file:
        dataset = create(file, "x", np.dtype("i4"), (5, 7), chunk=chunk)
        if chunk:
            dataset[:2, :2] = 3
    with h5py.File(path) as file:
        expected = np.moveaxis(file["x"][()], axis, 0)
    check(Dataset.from_hdf5(path, Field("x", axis=axis)), expected)


@pytest.mark.usefixtures("_junk", "streamed")
@pytest.mark.parametrize("dtype", ["f4", ">f4", EVENT])
def test_rows_of_a_mebibyte(tmp_path, dtype):
    path, dtype = tmp_path / "large.h5", np.dtype(dtype)
    length = 2**21 // dtype.itemsize
    with h5py.File(path, "w") as file:
        dataset = create(file, "x", dtype, (6, length), chunk=(1, length // 2))
        for number in (0, 3):
            row = np.zeros(length, dtype)
            row[:] = value_of(dtype, number + 1)
            dataset[number] = row
    with h5py.File(path) as file:
        expected = file["x"][()]
    check(Dataset.from_hdf5(path, "x"), expected)


@pytest.mark.usefixtures("_junk", "streamed")
def test_sources_of_a_virtual_dataset(tmp_path):
    path = tmp_path / "virtual.h5"
    length = 2**19  # rows of more than a mebibyte, and others
    for shape in ((6, length), (6, 4)):
        with h5py.File(path, "w") as file:
            dataset = create(file, "source", np.dtype("f4"), shape, chunk=(1, shape[1] // 2))
            dataset[2] = 5
            layout = h5py.VirtualLayout(shape, "f4")
            layout[:] = h5py.VirtualSource(file["source"])
            file.create_virtual_dataset("x", layout, fillvalue=-1)
        with h5py.File(path) as file:
            expected = file["x"][()]
        check(Dataset.from_hdf5(path, "x"), expected)


@pytest.mark.usefixtures("_junk")
@pytest.mark.parametrize("kind", TYPES)
def test_matches(tmp_path, kind):
    path, dtype = tmp_path / "matches.h5", TYPES[kind]
    is_vlen = h5py.check_dtype(vlen=dtype) is not None
    shape = () if is_vlen and kind == "rows" else (4,)
    with h5py.File(path, "w") as file:
        for number in range(8):
            fill_time = "ifset" if is_vlen else ("never", "alloc")[number % 2]
            chunk = (2,) if shape and number % 4 >= 2 else None
            made = create(file, f"run_{number}", dtype, shape, chunk=chunk, fill_time=fill_time)
            if number % 3 == 0:
                made[() if not shape else 1] = value_of(dtype, number)
    with h5py.File(path) as file:
        expected = [file[f"run_{number}"][()] for number in range(8)]
    for ours, theirs in zip(Dataset.from_hdf5(path, "run_*"), expected, strict=True):
        if kind == "text":
            assert [t.decode() for t in theirs.tolist()] == ours.tolist()
        else:
            assert same(ours, theirs)
