"""Fields of all forms, distributed: one listing for all ranks, the batches of a plain model."""

import contextlib
import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.hdf5 import locate
from mpistrat.errors import DataError
from tests.helpers import as_nobody

NUM = 37


def write(path, names=range(NUM)):
    row = np.dtype([("t", "f8"), ("n", "i4"), ("s", "S4")])
    rows = np.zeros(NUM, row)
    rows["t"], rows["n"] = np.arange(NUM) / 2, np.arange(NUM)
    with h5py.File(path, "w") as file:
        for number in names:
            group = file.create_group(f"data/demo_{number}")
            group["x"] = np.full((4, 2), number, np.float32)
            group.attrs["label"] = number
        file.create_dataset("rows", data=rows, chunks=(5,), compression="gzip")
        file["trials"] = np.arange(3 * NUM).reshape(3, NUM)


FIELDS = {
    "x": "data/demo_*/x",
    "label": ms.data.Field("data/demo_*", attribute="label"),
    "t": "rows/t",
    "trial": ms.data.Field("trials", axis=-1),
}


@pytest.fixture
def path(strategy, rank, mpi_tmp_path):
    if rank == 0:
        write(mpi_tmp_path / "data.h5")
    strategy.gather(np.zeros(1), axis=0)  # the file is there
    return mpi_tmp_path / "data.h5"


@pytest.fixture
def listed(monkeypatch):
    """Return a list that grows with each listing that this rank makes."""
    calls = []
    list_matches = locate.list_matches

    def noting(*args):
        calls.append(args)
        return list_matches(*args)

    monkeypatch.setattr(locate, "list_matches", noting)
    return calls


def global_batches(strategy, dataset):
    for element in strategy.experimental_distribute_dataset(dataset):
        yield {key: strategy.gather(value, axis=0) for key, value in element.items()}


def test_rank_0_lists_for_all_and_batches_are_those_of_one_rank(strategy, rank, path, listed):
    dataset = ms.data.Dataset.from_hdf5(path, FIELDS).shuffle(2).batch(8)
    batches = list(global_batches(strategy, dataset))
    assert len(listed) == (2 if rank == 0 else 0)
    labels = np.concatenate([batch["label"] for batch in batches])
    assert sorted(labels) == list(range(NUM))
    for batch in batches:
        label = batch["label"]
        assert (batch["x"] == label[:, None, None]).all()
        assert (batch["t"] == label / 2).all()
        assert (batch["trial"] == label[:, None] + NUM * np.arange(3)).all()
    alone = ms.data.Dataset.from_hdf5(path, FIELDS).shuffle(2).batch(8)
    expected = [batch["label"].tolist() for batch in alone]
    assert [batch["label"].tolist() for batch in batches] == expected


def test_a_listing_that_is_there_is_compared(strategy, rank, size, path, listed):
    dataset = ms.data.Dataset.from_hdf5(path, "data/demo_*/x").batch(8)
    assert dataset.cardinality() == 5
    strategy.experimental_distribute_dataset(dataset)
    assert len(listed) == 1
    # Rank 0 has seen other names than those that have looked for themselves.
    other = path.with_name(f"own-{rank}")
    other.mkdir()
    write(other / "data.h5", names=[*range(NUM - 1), NUM + (rank == 0)])
    dataset = ms.data.Dataset.from_hdf5(other / "data.h5", "data/demo_*/x").batch(8)
    dataset.cardinality()
    if size == 1:
        strategy.experimental_distribute_dataset(dataset)
        return
    with pytest.raises(DataError, match="the matches .* of 'data/demo_"):
        strategy.experimental_distribute_dataset(dataset)


def test_a_listing_that_fails_fails_on_all_ranks(strategy, path):
    dataset = ms.data.Dataset.from_hdf5(path, "data/demo_*/y").batch(8)
    with pytest.raises(DataError, match=r"'data/demo_\*/y' of .* matches nothing"):
        strategy.experimental_distribute_dataset(dataset)


def test_copies_of_the_file_are_read_where_their_data_lie(strategy, rank, path):
    own = path.with_name(f"copy-{rank}")
    own.mkdir()
    names = list(range(NUM))
    write(own / "data.h5", names if rank == 0 else names[::-1])
    dataset = ms.data.Dataset.from_hdf5(own / "data.h5", ("data/demo_*/x", "rows/n")).batch(8)
    for element in strategy.experimental_distribute_dataset(dataset):
        x, n = (each.values[0] for each in element)
        assert (x == n[:, None, None]).all()


def test_each_rank_makes_a_data_set_of_the_same_file(strategy, rank, size, path, listed):
    def of_rank(context):
        data = ms.data.Dataset.from_hdf5(path, FIELDS["label"])
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)

    found = []
    for element in strategy.distribute_datasets_from_function(of_rank):
        found += strategy.gather(element, axis=0).tolist()
    assert sorted(found) == list(range(NUM))
    assert len(listed) == (rank == 0)


def test_a_position_within_a_pass_is_restored(strategy, path):
    dataset = ms.data.Dataset.from_hdf5(path, FIELDS).shuffle(5).batch(6)
    whole = [batch["label"].tolist() for batch in global_batches(strategy, dataset)]
    batches = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(batches)
    next(iterator)
    next(iterator)
    again = strategy.experimental_distribute_dataset(dataset)
    again.load_state_dict(batches.state_dict())
    rest = [strategy.gather(element["label"], axis=0).tolist() for element in again]
    assert rest == whole[2:]


def test_a_file_that_is_being_written(strategy, rank, mpi_tmp_path):
    path = mpi_tmp_path / "live.h5"
    writer = None
    if rank == 0:
        writer = h5py.File(path, "w", libver="latest")
        data = writer.create_dataset("x", (0, 2), "i8", maxshape=(None, 2), chunks=(4, 2))
        writer.swmr_mode = True
        append(data, 10)
    strategy.gather(np.zeros(1), axis=0)
    if rank > 0:  # a process that writes has its own handle
        dataset = ms.data.Dataset.from_hdf5(path, "x", swmr=True)
        assert dataset.cardinality() == 10
        assert [int(x[0]) for x in dataset] == list(range(10))
    strategy.gather(np.zeros(1), axis=0)
    if rank == 0:
        append(data, 7)
    strategy.gather(np.zeros(1), axis=0)
    if rank > 0:
        assert dataset.cardinality() == 10
        again = ms.data.Dataset.from_hdf5(path, "x", swmr=True)
        assert sorted(int(x[0]) for x in again.shuffle(0)) == list(range(17))
        with pytest.raises(DataError, match="swmr=True"):
            ms.data.Dataset.from_hdf5(path, "x").cardinality()
    strategy.gather(np.zeros(1), axis=0)
    if writer is not None:
        writer.close()
    strategy.gather(np.zeros(1), axis=0)
    live = ms.data.Dataset.from_hdf5(path, "x", swmr=True).batch(5)
    values = [
        strategy.gather(each, axis=0)[:, 0]
        for each in strategy.experimental_distribute_dataset(live)
    ]
    assert np.concatenate(values).tolist() == list(range(17))


def test_fields_that_are_being_written_are_as_long_as_the_shortest(strategy, rank, mpi_tmp_path):
    path = mpi_tmp_path / "live.h5"
    if rank == 0:
        with h5py.File(path, "w", libver="latest") as file:
            x = file.create_dataset("x", (0, 2), "i8", maxshape=(None, 2), chunks=(4, 2))
            y = file.create_dataset("y", (0, 2), "i8", maxshape=(None, 2), chunks=(3, 2))
            file.swmr_mode = True
            append(x, 10)
            append(y, 7)
    strategy.barrier()
    live = ms.data.Dataset.from_hdf5(path, ("x", "y"), swmr=True)
    batches = strategy.experimental_distribute_dataset(live.shuffle(0).batch(4))
    seen = [[strategy.gather(each, axis=0)[:, 0].tolist() for each in b] for b in batches]
    assert all(x == y for x, y in seen)
    assert sorted(n for x, _ in seen for n in x) == list(range(7))
    with pytest.raises(DataError, match="'x' has 10, 'y' has 7 rows"):
        ms.data.Dataset.from_hdf5(path, ("x", "y")).cardinality()


def append(data, count):
    length = len(data)
    data.resize(length + count, axis=0)
    data[length:] = np.arange(length, length + count)[:, None]
    data.flush()


def test_one_rank_with_another_field_of_the_same_shape(strategy, path, rank, size):
    if size == 1:
        pytest.skip("needs two ranks that differ")
    if rank == 0:
        with h5py.File(path, "a") as file:
            file["one"], file["two"] = np.arange(NUM), np.arange(NUM)
    strategy.barrier()
    rows = ms.data.Dataset.from_hdf5(path, "one" if rank < size - 1 else "two")
    with pytest.raises(DataError, match="from_hdf5 of 'one', .* has from_hdf5 of 'two'"):
        strategy.experimental_distribute_dataset(rows.batch(4))


@pytest.mark.parametrize("is_zipped", [False, True])
def test_ranks_that_saw_other_lengths_agree(strategy, rank, size, mpi_tmp_path, is_zipped):
    path = mpi_tmp_path / "live.h5"

    def write(count):
        if rank == 0:
            with h5py.File(path, "a", libver="latest") as file:
                if count == 10:
                    file.create_dataset("x", (0, 2), "i8", maxshape=(None, 2), chunks=(4, 2))
                file.swmr_mode = True
                append(file["x"], count)
        strategy.barrier()

    rows = ms.data.Dataset.from_hdf5(path, "x", swmr=True)
    dataset = ms.data.Dataset.zip((rows, rows.map(lambda x: x + 1))) if is_zipped else rows
    write(10)
    if rank == size - 1:
        assert rows.cardinality() == 10  # this rank alone has looked
    strategy.barrier()
    write(7)
    batches = strategy.experimental_distribute_dataset(dataset.shuffle(0).batch(4))
    write(9)
    expected = 10 if is_zipped else 17
    assert batches.cardinality() == -(-expected // 4)
    for _ in range(2):
        parts = [batch[0] if is_zipped else batch for batch in batches]
        found = [strategy.gather(part, axis=0)[:, 0] for part in parts]
        assert sorted(np.concatenate(found)) == list(range(expected))


@pytest.mark.parametrize("field", ["trials", "data/demo_*/x"])
def test_a_file_that_one_rank_may_not_read_is_an_error_of_all(strategy, path, rank, size, field):
    rows = ms.data.Dataset.from_hdf5(path, field).batch(2)
    strategy.experimental_distribute_dataset(rows)  # no module is loaded for the first time below
    with pytest.raises(DataError, match="There is no file"):
        absent = ms.data.Dataset.from_hdf5("nothing.h5", "x").batch(2)
        strategy.experimental_distribute_dataset(absent)
    rows = ms.data.Dataset.from_hdf5(path, field).batch(2)
    if rank == 0:
        os.chmod(path, 0)
    strategy.barrier()
    last = size - 1
    where = "" if rank == last else rf" \(on rank {last} of {size}\)"
    with (
        as_nobody() if rank == last else contextlib.nullcontext(),
        pytest.raises(
            DataError, match=rf"data\.h5 cannot be read: permission denied.*user.*{where}"
        ),
    ):
        strategy.experimental_distribute_dataset(rows)


def test_a_file_that_may_no_longer_be_read_is_named_in_the_pass(strategy, path):
    rows = ms.data.Dataset.from_hdf5(path, "trials")
    local = list(rows.batch(3))
    assert len(local) == 1
    os.chmod(path, 0)
    with as_nobody(), pytest.raises(DataError, match=r"data\.h5 cannot be read: permission denied"):
        list(rows.batch(3))


@pytest.mark.parametrize("kind", ["gzip", "plain", "text", "own"])
def test_many_files_are_opened_by_rank_0_for_all(
    strategy, rank, size, mpi_tmp_path, tmp_path, monkeypatch, kind
):
    folder = tmp_path if kind == "own" else mpi_tmp_path  # each rank its own copies, or one
    if kind == "own" or rank == 0:
        for number in range(12):
            with h5py.File(folder / f"part-{number:02}.h5", "w") as file:
                rows = np.arange(number + 1) + 100.0 * number
                if kind == "text":
                    file["x"] = [str(int(row)) for row in rows]
                else:
                    gzip = {"chunks": (4,), "compression": "gzip", "maxshape": (None,)}
                    options = {} if kind == "plain" else gzip
                    file.create_dataset("x", data=rows, **options)
    strategy.gather(np.zeros(1), axis=0)  # the files are there
    opened = []
    begin = h5py.File.__init__

    def noting(self, name, *args, **kwargs):
        opened.extend([name] if isinstance(name, str | os.PathLike) else [])
        begin(self, name, *args, **kwargs)

    monkeypatch.setattr(h5py.File, "__init__", noting)
    dataset = ms.data.Dataset.from_hdf5(str(folder / "part-*.h5"), "x")
    batches = strategy.experimental_distribute_dataset(dataset.shuffle(0).batch(5))
    assert len(opened) == (12 if rank == 0 or kind == "own" else 1)
    seen = [int(x) for batch in batches for x in np.asarray(batch)]
    expected = sorted(100 * n + k for n in range(12) for k in range(n + 1))
    gathered = strategy.gather(ms.PerReplica(np.array(seen, np.int64)), axis=0)
    assert sorted(np.asarray(gathered).tolist()) == expected


@pytest.mark.parametrize("is_mapped", [False, True])
def test_rows_of_matches(strategy, rank, size, mpi_tmp_path, is_mapped):
    lengths = [3, 0, 4, 1, 6, 2, 5]
    path = mpi_tmp_path / "frames.h5"
    if rank == 0:
        with h5py.File(path, "w") as file:
            first = 0
            for number, length in enumerate(lengths):
                file[f"run_{number}/x"] = np.arange(first, first + length)
                first += length
    strategy.gather(np.zeros(1), axis=0)  # the file is there
    calls = []

    def noting(x):
        calls.append(len(x))
        return x

    rows = ms.data.Dataset.from_hdf5(path, "run_*/x")
    rows = (rows.map(noting) if is_mapped else rows).unbatch()
    batches = strategy.experimental_distribute_dataset(rows.shuffle(1).batch(4))
    assert batches.cardinality() == -(-sum(lengths) // 4)
    share = -(-len(lengths) // size)
    assert len(calls) <= (share + 2 if is_mapped else 0)  # and one for the spec
    alone = [batch.tolist() for batch in rows.shuffle(1).batch(4)]
    for mine, whole in zip(batches, alone, strict=True):
        assert strategy.gather(mine, axis=0).tolist() == whole
    assert sorted(x for batch in alone for x in batch) == list(range(sum(lengths)))
    if size > 1:  # maps that count differently are told apart
        other = ms.data.Dataset.range(2).map(lambda n: np.zeros(1 + (rank == 0))).unbatch()
        distributed = strategy.experimental_distribute_dataset(other.batch(2))
        with pytest.raises((DataError, ms.errors.CollectiveError)):
            list(distributed)
