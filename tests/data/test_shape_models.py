"""Padded and ragged batches of any shapes, compared with NumPy, at any number of ranks."""

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset
from mpistrat.errors import CollectiveError, DataError
from mpistrat.sharding import slice_of_rank
from tests.devices import assert_array_equal

DTYPES = ("u1", "i4", "f4", "c16", "?")

FEW = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

shapes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=14)


def elements_of(shapes, dtype):
    """Return an array for each shape, and its number."""
    rng = np.random.default_rng(len(shapes))
    arrays = [rng.integers(0, 100, shape).astype(dtype) for shape in shapes]
    return [(array, np.int64(number)) for number, array in enumerate(arrays)]


def dataset_of(elements, kind):
    """Return a data set of the elements, read from a generator or made by a map."""
    if kind == "map":
        return Dataset.range(len(elements)).map(lambda n: elements[int(n)])
    specs = ArraySpec((None, None), elements[0][0].dtype), ArraySpec((), np.int64)
    return Dataset.from_generator(lambda: elements, specs)


def parts_of(elements, batch_size, drop_remainder, rank, size):
    """Return this rank's elements of each batch."""
    starts = range(0, len(elements), batch_size)
    batches = [elements[start : start + batch_size] for start in starts]
    if drop_remainder and len(batches[-1]) < batch_size:
        batches.pop()
    return [batch[slice_of_rank(len(batch), size, rank)] for batch in batches]


def padded(arrays, shape, value, dtype):
    """Return what `padded_batch` makes of some arrays, by NumPy."""
    lengths = [
        max((each.shape[axis] for each in arrays), default=0) if length is None else length
        for axis, length in enumerate(shape)
    ]
    widths = [[(0, n - m) for n, m in zip(lengths, a.shape, strict=True)] for a in arrays]
    filled = [
        np.pad(array, width, constant_values=value)
        for array, width in zip(arrays, widths, strict=True)
    ]
    return np.stack(filled) if filled else np.empty((0, *lengths), dtype)


@pytest.mark.parametrize("kind", ["generator", "map"])
@given(
    shapes,
    st.sampled_from(DTYPES),
    st.integers(1, 16),
    st.tuples(*[st.sampled_from((None, 5, 6))] * 2),
    st.integers(0, 1),
    st.booleans(),
)
@FEW
def test_padded_batches_are_those_of_numpy(
    strategy, rank, size, kind, shapes, dtype, batch_size, shape, value, drop
):
    elements = elements_of(shapes, dtype)
    values = value if value == 0 else (np.dtype(dtype).type(value), 0)
    dataset = dataset_of(elements, kind).padded_batch(batch_size, (shape, ()), values, drop)
    batches = list(strategy.experimental_distribute_dataset(dataset))
    parts = parts_of(elements, batch_size, drop, rank, size)
    assert len(batches) == len(parts)
    for (rows, numbers), part in zip(batches, parts, strict=True):
        expected = padded([each for each, _ in part], shape, value, dtype)
        found = rows.values[0]
        assert found.dtype == expected.dtype
        if not len(part):  # lengths of nothing are not known
            expected = expected.reshape(found.shape)
        assert_array_equal(found, expected)
        assert numbers.values[0].tolist() == [number for _, number in part]


@pytest.mark.parametrize("kind", ["generator", "map"])
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=14),
    st.sampled_from(DTYPES),
    st.integers(1, 16),
    st.integers(0, 2),
    st.booleans(),
)
@FEW
def test_ragged_batches_are_those_of_numpy(
    strategy, rank, size, kind, lengths, dtype, batch_size, width, drop
):
    elements = elements_of([(length, width) for length in lengths], dtype)
    specs = ArraySpec((None, width), dtype), ArraySpec((), np.int64)
    if kind == "map":
        dataset = dataset_of(elements, kind)
    else:
        dataset = Dataset.from_generator(lambda: elements, specs)
    batches = strategy.experimental_distribute_dataset(dataset.ragged_batch(batch_size, drop))
    parts = parts_of(elements, batch_size, drop, rank, size)
    for (rows, numbers), part in zip(batches, parts, strict=True):
        ragged = rows.values[0]
        arrays = [each for each, _ in part]
        joined = np.concatenate([np.empty((0, width), dtype), *arrays])
        assert_array_equal(ragged.values, joined)
        assert ragged.values.dtype == joined.dtype
        assert ragged.row_splits.dtype == np.int64
        assert ragged.row_splits.tolist() == [0, *np.cumsum([len(a) for a in arrays]).tolist()]
        assert numbers.values[0].tolist() == [number for _, number in part]


@given(shapes, st.integers(1, 16), st.integers(0, 4))
@FEW
def test_what_is_longer_than_its_padded_shape_is_refused(size, shapes, batch_size, most):
    strategy = ms.MPIStrategy(device="cpu")  # one that ranks disagree on cannot be used again
    elements = elements_of(shapes, "i4")
    dataset = dataset_of(elements, "generator").padded_batch(batch_size, ((most, None), ()))
    batches = strategy.experimental_distribute_dataset(dataset)
    if max(length for length, _ in shapes) <= most:
        assert sum(strategy.reduce("sum", len(n.values[0])) for _, n in batches) == len(shapes)
        return
    with pytest.raises(DataError if size == 1 else (DataError, CollectiveError)):
        for _, numbers in batches:
            strategy.gather(numbers, axis=0)


@pytest.fixture
def vlen_file(strategy, rank, mpi_tmp_path):
    """Return a file of rows of any length, with texts, and what is in it."""
    path = mpi_tmp_path / "rows.h5"
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 255, n).astype(np.uint8) for n in rng.integers(0, 9, 41)]
    texts = ["é" * (n % 5) + str(n) for n in range(41)]
    if rank == 0:
        with h5py.File(path, "w") as file:
            data = file.create_dataset("row", (41,), h5py.vlen_dtype(np.uint8))
            for number, row in enumerate(rows):
                data[number] = row
            file["text"] = texts
            file["number"] = np.arange(41)
    strategy.barrier()
    return path, rows, texts


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("batch_size", [1, 6, 50])
def test_rows_of_files_are_batched_as_lists_are(strategy, vlen_file, batch_size, is_cached):
    path, rows, texts = vlen_file
    dataset = Dataset.from_hdf5(path, {"row": "row", "text": "text", "number": "number"})
    dataset = dataset.cache("1 MiB").shuffle(5) if is_cached else dataset.shuffle(5)
    alone = ms.OneDeviceStrategy("cpu:0")
    orders = []
    for batched in (
        dataset.ragged_batch(batch_size),
        dataset.padded_batch(batch_size, {"row": (9,), "text": (), "number": ()}),
    ):
        order = []
        for batch in strategy.experimental_distribute_dataset(batched):
            numbers = batch["number"].values[0].tolist()
            assert batch["text"].values[0].tolist() == [texts[n] for n in numbers]
            found = batch["row"].values[0]
            if isinstance(found, ms.data.Ragged):
                assert found.to_list() == [rows[n].tolist() for n in numbers]
            else:
                expected = padded([rows[n] for n in numbers], (9,), 0, np.uint8)
                assert_array_equal(found, expected)
            order.append(strategy.gather(batch["number"], axis=0).tolist())
        orders.append(order)
        once = alone.experimental_distribute_dataset(batched)
        assert order == [batch["number"].values[0].tolist() for batch in once]
    assert orders[0] == orders[1]
    assert sorted(n for batch in orders[0] for n in batch) == list(range(41))
