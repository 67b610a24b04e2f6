"""Rows that ranks write themselves: any number of ranks stores what a plain model stores."""

import errno
import os

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.data.hdf5_writer import chunk_store, direct_rows
from mpistrat.data.hdf5_writer.coverage import Box, Coverage
from mpistrat.data.hdf5_writer.dataset_spec import make_dataset
from mpistrat.errors import DataError


@pytest.fixture
def path(shared_tmp_path):
    return shared_tmp_path / "out.h5"


def part(strategy, whole):
    return np.array_split(whole, strategy.size)[strategy.rank]


SPANS = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)


@given(st.lists(st.tuples(SPANS, SPANS), max_size=8))
def test_coverage_is_that_of_an_array(boxes):
    coverage, array = Coverage(), np.zeros((6, 6), bool)
    for (start, stop), (left, right) in boxes:
        seen = array[start:stop, left:right].any(axis=1)
        found = coverage.add(Box(start, stop, (left,), (right - left,)))
        assert found == (start + int(np.argmax(seen)) if seen.any() else None)
        if found is None:
            array[start:stop, left:right] = True
        missing = ~array.all(axis=1)
        expected = int(np.argmax(missing)) if missing.any() else None
        assert coverage.first_missing(6, (6,)) == expected


@given(st.data())
def test_pieces_lie_in_the_file_as_in_an_array(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    spans = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    dataset = make_dataset("x", shape, "i2", chunks=shape)
    values = np.random.default_rng(0).integers(1000, size=[b - a for a, b in spans], dtype="i2")
    rows = range(*spans[0])
    if data.draw(st.booleans()):
        rows = np.random.default_rng(1).permutation(rows).astype(np.int64)
    starts = [a for a, _ in spans[1:]]
    expected = np.zeros(dataset.geometry.chunk, "i2")
    expected[(np.asarray(rows, int), *(slice(*each) for each in spans[1:]))] = values
    with open(tmp_path_factory.mktemp("piece") / "x", "wb+") as file:
        os.ftruncate(file.fileno(), 16 + expected.nbytes)
        for piece in dataset.geometry.pieces(rows, starts, values.shape[1:]):
            own = values[(piece.source_rows, *piece.source)]
            direct_rows._write_piece(file.fileno(), 16, dataset, piece, own)
        found = np.frombuffer(os.pread(file.fileno(), expected.nbytes, 16), "i2")
    assert np.array_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("chunks", [None, (7, 512), (9, 600)])
@pytest.mark.parametrize("fillvalue", [None, 5])
def test_fixed_sizes(strategy, path, chunks, fillvalue):
    rank, size = strategy.rank, strategy.size
    numbers = np.arange(40 * size)
    whole = numbers[:, None] + np.arange(1024) / 1024
    with ms.data.HDF5Writer(path, strategy=strategy) as out:
        options = {"chunks": chunks, "fillvalue": fillvalue}
        out.create_dataset("rows", whole.shape, "f8", **options)
        out.create_dataset("columns", whole.shape, "f8", **options)
        out.create_dataset("all", whole.shape, "f8", **options)
        # Ranges decide that rows are written directly. Then any rows may follow, and one that is
        # the same on all ranks.
        first = slice(20 * rank, 20 * rank + 20)
        out.write({"rows": whole[first]}, at=first)
        out.write({"rows": ms.Mirrored(whole[20 * size])}, at=slice(20 * size, 20 * size + 1))
        order = np.random.default_rng(0).permutation(numbers[20 * size + 1 :])
        own = part(strategy, order)
        out.write({"rows": whole[own]}, at=ms.PerReplica(own))
        half = numbers[: 20 * size]
        for rows in (slice(0, len(half)), slice(len(half), None)):
            for columns in (slice(0, 512), slice(512, 1024)):
                box = part(strategy, np.arange(columns.start, columns.stop))
                at = rows, slice(int(box[0]), int(box[-1]) + 1)
                out.write({"columns": whole[at]}, at=at)
        out.write({"all": part(strategy, whole)})
    with h5py.File(path, "r") as file:
        for name in ("rows", "columns", "all"):
            assert np.array_equal(file[name][:], whole)
            assert file[name].chunks == chunks


def test_ranges_written_twice_or_never(strategy, path):
    size = strategy.size
    out = ms.data.HDF5Writer(path, strategy=strategy)
    out.create_dataset("x", (30 * size, 1024), "f8")
    own = slice(10 * strategy.rank, 10 * strategy.rank + 10)
    values = np.full((10, 1024), float(strategy.rank))
    out.write({"x": values}, at=own)
    with pytest.raises(DataError, match="row 0 of dataset 'x' was written twice"):
        out.write({"x": values}, at=own)
    rows = np.arange(2) + 10 * size - 1
    with pytest.raises(DataError, match=f"row {10 * size - 1} of dataset 'x' was written"):
        out.write({"x": np.zeros((2 * (not strategy.rank), 1024))}, at=_own(strategy, rows))
    out.write({"x": values}, at=slice(own.start + 10 * size, own.stop + 10 * size))
    with pytest.raises(DataError, match=f"row {20 * size} of dataset 'x' was never written"):
        out.close()
    strategy.barrier()
    assert os.listdir(path.parent) == []


def _own(strategy, rows):
    return ms.PerReplica(rows if strategy.rank == 0 else rows[:0])


def steps_of(strategy, step, number):
    """Return the parts of a step: a row that is divided, rows, and a number."""
    field = step + np.arange(24.0).reshape(4, 6) / 100
    rows = np.arange(number * step, number * (step + 1)) if number else np.arange(0)
    return {
        "field": np.array_split(field, strategy.size)[strategy.rank],
        "rows": part(strategy, np.repeat(rows[:, None], 2, 1)),
        "time": step / 2,
    }


def open_writer(strategy, path, **options):
    out = ms.data.HDF5Writer(path, "a", strategy=strategy, **options)
    out.create_dataset("field", (None, 4, 6), "f8", chunks=(5, 4, 6), split_axis=1, fillvalue=-1)
    out.create_dataset("rows", (None, 2), "i8", chunks=(7, 1), fillvalue=-1)
    out.create_dataset("time", (None,), "f8", fillvalue=-1)
    return out


def assert_steps(strategy, path, num_steps, num_rows, more=0):
    strategy.barrier()
    if strategy.rank == 0:
        with h5py.File(path, "r+" if more else "r") as file:
            if more:
                for name in file:
                    file[name].resize(len(file[name]) + more, axis=0)
            numbers = np.arange(num_steps)
            field = numbers[:, None, None] + np.arange(24.0).reshape(4, 6) / 100
            expected = {"field": field, "time": numbers / 2}
            expected["rows"] = np.repeat(np.arange(num_rows)[:, None], 2, 1)
            for name, values in expected.items():
                assert np.array_equal(file[name][: len(values)], values)
                assert len(file[name]) == len(values) + more
                assert (file[name][len(values) :] == -1).all()
    strategy.barrier()


@pytest.mark.parametrize("per_commit", [1, 3])
def test_steps_of_the_same_size(strategy, path, per_commit):
    for last in (4, 11, 30):
        with open_writer(strategy, path, steps_per_commit=per_commit) as out:
            for step in range(out.steps, last):
                out.append(steps_of(strategy, step, 3))
                if per_commit == 1:
                    assert_steps(strategy, path, step + 1, 3 * step + 3)
        assert_steps(strategy, path, last, 3 * last)
    assert_steps(strategy, path, 30, 90, more=20)


def test_a_rank_that_brings_more_rows_than_before(strategy, path):
    total = 0
    with open_writer(strategy, path) as out:
        for step in range(12):
            more = int(step % 4 == 3)  # on the last rank
            number = 2 + more * (strategy.rank == strategy.size - 1)
            start = total + 2 * strategy.rank
            values = steps_of(strategy, step, 1)
            values["rows"] = np.repeat(np.arange(start, start + number)[:, None], 2, 1)
            out.append(values)
            total += 2 * strategy.size + more
            assert_steps(strategy, path, step + 1, total)
    assert_steps(strategy, path, 12, total, more=20)


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("failing", [0, -1])
def test_a_step_that_cannot_be_written(strategy, path, monkeypatch, step, failing):
    out = open_writer(strategy, path)
    for number in range(step):
        out.append(steps_of(strategy, number, 3))
    written = direct_rows.write_all

    def full(handle, address, data):
        # The other ranks write, and so does this one in part.
        written(handle, address, np.zeros(8, np.uint8))
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    # Without fast paths, the owners of chunks write, and not every rank is one in this step.
    if strategy.rank == failing % strategy.size or not out._session.direct.is_possible:
        for module in (direct_rows, chunk_store):
            monkeypatch.setattr(module, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        out.append(steps_of(strategy, step, 3))
    for module in (direct_rows, chunk_store):
        monkeypatch.setattr(module, "write_all", written)
    assert out.steps == step
    assert_steps(strategy, path, step, 3 * step)
    out.append(steps_of(strategy, step, 3))
    out.close()
    assert_steps(strategy, path, step + 1, 3 * step + 3, more=20)
