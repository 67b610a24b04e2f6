"""HDF5Writer on any number of ranks: steps, rows, resuming, errors; h5py reads the files."""

import errno
import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.hdf5_writer import chunk_store, direct_rows, root_file
from mpistrat.errors import CollectiveMismatchError, ContextError, DataError

FIELD = np.arange(8 * 9, dtype="f4").reshape(8, 9)


@pytest.fixture
def path(shared_tmp_path):
    return shared_tmp_path / "out.h5"


def part(strategy, whole):
    return np.array_split(whole, strategy.size)[strategy.rank]


def num_rows(step, rank):
    return (step + rank) % 3


def write_steps(strategy, path, num_steps, **options):
    with ms.data.HDF5Writer(path, "a", attrs={"title": "t"}, strategy=strategy, **options) as out:
        out.create_dataset(
            "u",
            (None, 8, 9),
            "f4",
            split_axis=1,
            compression="gzip",
            shuffle=True,
            chunks=(4, 3, 9),
        )
        out.create_dataset("axis/x", data=np.arange(9.0), attrs={"units": "m"})
        for step in range(out.steps, num_steps):
            rows = np.full((num_rows(step, strategy.rank), 2), 100 * step + strategy.rank, "i4")
            own = ms.PerReplica(part(strategy, FIELD + step))
            out.append({"u": own, "time": step / 2, "events": {"id": rows}})


def assert_steps(strategy, path, num_steps):
    with h5py.File(path, "r") as file:
        assert file.attrs["title"] == "t"
        assert file["axis/x"].attrs["units"] == "m"
        steps = np.arange(num_steps)
        assert np.array_equal(file["u"], FIELD + steps[:, None, None])
        assert np.array_equal(file["time"], steps / 2)
        ranks = range(strategy.size)
        expected = [[100 * s + r] * num_rows(s, r) for s in range(num_steps) for r in ranks]
        assert np.array_equal(file["events/id"][:, 0], np.concatenate(expected))


def test_steps_are_there_at_once_and_after_resuming(strategy, path):
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.append({"x": np.arange(3)})
        with h5py.File(path, "r") as file:
            assert len(file["x"]) == 3 * strategy.size
    strategy.barrier()
    if strategy.rank == 0:
        path.unlink()
    strategy.barrier()
    for num_steps in (2, 9, 9, 23):
        write_steps(strategy, path, num_steps)
        assert_steps(strategy, path, num_steps)
    assert os.path.getsize(path) < 2**21


def test_steps_per_commit(strategy, path):
    with ms.data.HDF5Writer(path, "a", steps_per_commit=3, strategy=strategy) as out:
        for step in range(5):
            out.append({"time": step})
            assert out.steps == out.rows.get("time", 0) == (step + 1) // 3 * 3
        out.flush()
        assert out.steps == 5
    with h5py.File(path, "r") as file:
        assert file["time"][:].tolist() == [0, 1, 2, 3, 4]


def test_any_number_of_ranks_stores_the_same_chunks(strategy, path):
    rows = np.random.default_rng(0).integers(9, size=(40, 30, 7)).astype("f8")
    options = {"compression": "gzip", "shuffle": True}
    with ms.data.HDF5Writer(path, strategy=strategy) as out:
        out.create_dataset("x", (None, 30, 7), "f8", chunks=(3, 16, 4), **options)
        out.append({"x": part(strategy, rows[:25])})
        out.append({"x": part(strategy, rows[25:])})
    alone = path.with_name(f"alone-{strategy.rank}.h5")
    solo = ms.OneDeviceStrategy("cpu:0")
    with ms.data.HDF5Writer(alone, strategy=solo) as out:
        out.create_dataset("x", (None, 30, 7), "f8", chunks=(3, 16, 4), **options)
        out.append({"x": rows})
    with h5py.File(path, "r") as one, h5py.File(alone, "r") as two:
        assert np.array_equal(one["x"], rows)
        for number in range(one["x"].id.get_num_chunks()):
            place = one["x"].id.get_chunk_info(number).chunk_offset
            first, second = (each["x"].id.read_direct_chunk(place) for each in (one, two))
            assert first == second


def test_write_in_any_order(strategy, path):
    rank, size = strategy.rank, strategy.size
    order = np.random.default_rng(0).permutation(1000)
    with ms.data.HDF5Writer(path, compression="gzip", strategy=strategy) as out:
        out.create_dataset("a", (1000, 30), "f8")
        out.create_dataset("b", (1000,), "i4", compression=None)
        out.create_dataset("box", (4 * size, 20), "f4", chunks=(3, 7))
        out.create_dataset("all", (1000, 3), "i8")
        out.create_dataset("one", (), "f4")
        for some in np.array_split(order, 7):
            own = part(strategy, some)
            rows = ms.PerReplica(own)
            out.write({"a": np.repeat(own[:, None], 30, 1) / 2, "b": own.astype("i4")}, at=rows)
        for columns in (slice(0, 5), slice(5, 20)):
            values = np.full((4, columns.stop - columns.start), rank, "f4")
            out.write({"box": values}, at=(slice(4 * rank, 4 * rank + 4), columns))
        out.write({"all": np.repeat(part(strategy, np.arange(1000))[:, None], 3, 1)})
        out.write({"one": np.float32(2.5)})
        assert not path.exists()
    with h5py.File(path, "r") as file:
        numbers = np.arange(1000)
        assert np.array_equal(file["a"], np.repeat(numbers[:, None], 30, 1) / 2)
        assert np.array_equal(file["b"], numbers)
        assert file["b"].chunks == (1000,)
        assert np.array_equal(file["box"][:, 0], np.repeat(np.arange(size), 4))
        assert np.array_equal(file["box"][:, 19], np.repeat(np.arange(size), 4))
        assert np.array_equal(file["all"][:, 2], numbers)
        assert file["one"][()] == 2.5
    strategy.barrier()
    assert os.listdir(path.parent) == [path.name]


def test_rows_written_twice_or_never(strategy, path):
    out = ms.data.HDF5Writer(path, strategy=strategy)
    out.create_dataset("x", (10,), "f8")
    rows = np.arange(4 if strategy.rank == 0 else 0)
    out.write({"x": rows.astype("f8")}, at=rows)
    with pytest.raises(DataError, match=r"row 2 of dataset 'x' was written twice"):
        out.write({"x": rows[:1].astype("f8")}, at=rows[:1] + 2)
    with pytest.raises(IndexError, match="row 10 is out of range"):
        out.write({"x": np.zeros(1)}, at=[10])
    with pytest.raises(DataError, match=r"row 4 of dataset 'x' was never written"):
        out.close()
    assert out.closed
    strategy.barrier()
    assert os.listdir(path.parent) == []


def test_bad_steps_leave_the_writer_usable(strategy, path):
    out = ms.data.HDF5Writer(path, "a", strategy=strategy)
    out.append({"x": np.ones((2, 3))})
    for step, error in [
        ({"x": np.ones((2, 4))}, DataError),
        ({"x": np.ones((2, 3), "f4")}, DataError),
        ({"y": 1.0}, DataError),
        ({}, DataError),
        ([1], TypeError),
        ({"x": object()}, TypeError),
        ({"x": np.array(["a"], object)}, DataError),
        ({"x": ms.data.Ragged.from_list([[1.0]])}, DataError),
    ]:
        with pytest.raises(error):
            out.append(step)
        assert out.steps == 1
    with pytest.raises(DataError, match="Create all datasets before"):
        out.create_dataset("z", (None,), "f4")
    with pytest.raises(ValueError, match='mode "w"'):
        out.write({"x": np.ones((2, 3))})
    out.append({"x": np.ones((0, 3))})
    out.append({"x": np.ones((1, 3))})
    out.close()
    out.close()
    with pytest.raises(ValueError, match="is closed"):
        out.append({"x": np.ones((1, 3))})
    with h5py.File(path, "r") as file:
        assert file["x"].shape == (3 * strategy.size, 3)
        assert file.attrs["mpistrat_steps"] == 3


@pytest.mark.mpi(min_size=2)
def test_a_difference_between_ranks_is_named(path):
    strategy = ms.MPIStrategy()
    with (
        pytest.raises(CollectiveMismatchError),
        ms.data.HDF5Writer(path, "a", strategy=strategy) as out,
    ):
        out.append({"x": float(strategy.rank)})
    strategy = ms.MPIStrategy()
    error = DataError if strategy.rank == 0 else CollectiveMismatchError
    with pytest.raises(error), ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.append({"x": np.ones((1, 3))})
        out.append({"x": np.ones((1, 4 if strategy.rank == 0 else 3))})
    with h5py.File(path, "r") as file:
        assert len(file["x"]) == strategy.size


def test_existing_datasets_are_checked(strategy, path):
    write_steps(strategy, path, 2)
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        for shape, dtype in (((None, 8, 8), "f4"), ((None, 8, 9), "f8"), ((3, 8, 9), "f4")):
            with pytest.raises(DataError, match="the file has 'u' with shape"):
                out.create_dataset("u", shape, dtype)
        with pytest.raises(DataError, match="the file has 'axis/x' with shape"):
            out.create_dataset("axis/x", data=np.arange(8.0))
        with pytest.raises(DataError, match="Missing: events/id, time"):
            out.append({"u": FIELD})
    assert_steps(strategy, path, 2)


def test_a_state_cuts_the_file_back(strategy, path):
    write_steps(strategy, path, 7)
    out = ms.data.HDF5Writer(path, "a", strategy=strategy)
    state = out.state_dict()
    assert state["steps"] == 7
    assert state["rows"]["u"] == 7
    out.close()
    write_steps(strategy, path, 30)
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        with pytest.raises(DataError, match="has 30 steps, but the state has 31"):
            out.load_state_dict(state | {"steps": 31})
        out.load_state_dict(state)
        assert out.state_dict() == state
    assert_steps(strategy, path, 7)
    write_steps(strategy, path, 12)
    assert_steps(strategy, path, 12)


def test_checkpoints_hold_the_step(strategy, path):
    checkpoint_path = path.with_name("checkpoint.h5")
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        checkpoint = ms.Checkpoint(out=out)
        for step in range(5):
            out.append({"time": step})
            if step == 2:
                checkpoint.write(checkpoint_path)
        checkpoint.restore(checkpoint_path).assert_consumed()
        assert out.steps == 3
        out.append({"time": 9})
    with h5py.File(path, "r") as file:
        assert file["time"][:].tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("num_replicas", [4, 5])
def test_several_replicas_on_a_rank(path, num_replicas):
    strategy = ms.MPIStrategy(num_replicas=num_replicas)

    def rows():
        number = ms.get_replica_context().replica_id_in_sync_group
        return np.full((number % 3, 2), number)

    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        for _ in range(3):
            out.append({"x": strategy.run(rows)})
        if num_replicas > strategy.size:
            with pytest.raises(ValueError, match="unclear which one"):
                out.append({"x": np.ones((1, 2), int)})
    expected = [[number] * (number % 3) for number in range(num_replicas)] * 3
    with h5py.File(path, "r") as file:
        assert np.array_equal(file["x"][:, 0], np.concatenate(expected))


@pytest.mark.mpi(min_size=2)
def test_the_ranks_of_a_replica_count_once(path):
    strategy = ms.MPIStrategy(ranks_per_replica=ms.MPIStrategy().size)
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.create_dataset("u", (None, 8, 9), "f4", split_axis=1)
        out.append({"x": np.arange(3), "u": part(strategy, FIELD)})
        out.append({"x": np.arange(2), "u": FIELD})
        with pytest.raises(DataError, match="belong to one replica"):
            out.append({"x": np.arange(2) + strategy.rank, "u": FIELD})
    with h5py.File(path, "r") as file:
        assert file["x"][:].tolist() == [0, 1, 2, 0, 1]
        assert np.array_equal(file["u"], [FIELD, FIELD])


DTYPES = ["?", "i1", "<u8", ">f4", "f2", "c8", "c16", "S5", [("a", "f4"), ("b", "i2", (2,))]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_kept(strategy, path, dtype):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(strategy.rank).integers(2, size=6 * dtype.itemsize, dtype=np.uint8)
    rows = raw.view(dtype)[::2]  # with strides
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.append({"x": rows})
    with h5py.File(path, "r") as file:
        found = file["x"][3 * strategy.rank :][:3]
        assert found.dtype == dtype
        assert found.tobytes() == rows.tobytes()


def test_attributes_and_groups(strategy, path):
    for number in range(2):
        with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
            out.create_group("run/inner", attrs={"n": number})
            out.append({"x": 1.0})
            out.set_attrs("x", {"units": ["m", "s"], "step": number})
            out.set_attrs("/", {"note": f"run {number}"})
            with pytest.raises(KeyError):
                out.set_attrs("y", {"n": 1})
            with pytest.raises(TypeError):
                out.set_attrs("x", {"n": object()})
    with h5py.File(path, "r") as file:
        assert file["run/inner"].attrs["n"] == 1
        assert file["x"].attrs["units"].tolist() == ["m", "s"]
        assert file["x"].attrs["step"] == 1
        assert file.attrs["note"] == "run 1"
        assert file["x"].shape == (2,)


@pytest.mark.parametrize("version", ["earliest", "v108", "v110", "latest"])
def test_files_of_h5py_are_resumed(strategy, path, version):
    if strategy.rank == 0:
        with h5py.File(path, "w", libver=version) as file:
            file.create_dataset("a", data=np.arange(7), maxshape=(None,), chunks=(3,))
            options = {"chunks": (2, 2), "compression": "gzip", "fletcher32": True}
            file.create_dataset("b", data=np.ones((5, 2)), maxshape=(None, 2), **options)
            file["same/a"], file["soft"] = file["a"], h5py.SoftLink("/fixed")
            file["fixed"], file["text"] = np.arange(4), np.array(["x", "yy"], object)
            file["a"].attrs["names"] = ["one", "two"]
    strategy.barrier()
    for _ in range(2):
        with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
            for step in range(35):
                out.append({"a": step, "b": np.full((1, 2), step / 2)})
    with h5py.File(path, "r") as file:
        expected = [*range(7), *range(35), *range(35)]
        assert file["a"][:].tolist() == file["same/a"][:].tolist() == expected
        assert file["b"][5 : 5 + strategy.size, 0].tolist() == [0] * strategy.size
        assert file["soft"][:].tolist() == [0, 1, 2, 3]
        assert file["text"][:].tolist() == [b"x", b"yy"]
        assert file["a"].attrs["names"].tolist() == ["one", "two"]
    strategy.barrier()
    if strategy.rank == 0:
        with h5py.File(path, "r+") as file:
            file["a"].resize(90, axis=0)
            file["a"][77:] = 5
            file["new"] = 3
    strategy.barrier()
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.append({"a": 8, "b": np.zeros((1, 2))})
    with h5py.File(path, "r") as file:
        assert file["a"][76:].tolist() == [34, *[5] * 13, 8]
        assert file["new"][()] == 3


def test_other_files_stay_unchanged(strategy, path):
    if strategy.rank == 0:
        path.write_bytes(b"no HDF5 file" * 100)
    strategy.barrier()
    with pytest.raises(DataError, match="not an HDF5 file"):
        ms.data.HDF5Writer(path, "a", strategy=strategy)
    assert path.read_bytes() == b"no HDF5 file" * 100
    for mode in ("a", "w"):
        with pytest.raises(OSError, match=f"is a folder.*{path.parent.name}"):
            ms.data.HDF5Writer(path.parent, mode, strategy=strategy)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_whose_writer_died_is_not_resumed(strategy, path):
    if strategy.rank == 0:
        with h5py.File(path, "w", libver="latest") as file:
            file["x"] = 1
        data = bytearray(path.read_bytes())
        data[11] = 5  # open for writing, with SWMR
        path.write_bytes(data)
    strategy.barrier()
    with pytest.raises(DataError, match="was not closed|h5clear"):
        ms.data.HDF5Writer(path, "a", strategy=strategy)


def test_one_writer_per_file(strategy, path):
    out = ms.data.HDF5Writer(path, "a", strategy=strategy)
    with pytest.raises(OSError, match=f"process {os.getpid()}|being written by process"):
        ms.data.HDF5Writer(path, "a", strategy=strategy)
    out.close()


@pytest.mark.parametrize("mode", ["a", "w"])
def test_an_exception_keeps_what_was_there(strategy, path, mode):
    write_steps(strategy, path, 3)
    with pytest.raises(ZeroDivisionError), ms.data.HDF5Writer(path, mode, strategy=strategy) as out:
        if mode == "w":
            out.append({"x": 1.0})
        raise ZeroDivisionError
    strategy.barrier()
    assert_steps(strategy, path, 3)
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_keeps_the_last_step(strategy, path, monkeypatch):
    write_steps(strategy, path, 3)
    written = root_file.write_all

    def full(handle, address, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.create_dataset("u", (None, 8, 9), "f4", split_axis=1)
        values = {"u": ms.PerReplica(part(strategy, FIELD + 3)), "time": 1.5}
        rows = np.full((num_rows(3, strategy.rank), 2), 300 + strategy.rank, "i4")
        if strategy.rank == 0:
            monkeypatch.setattr(root_file, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            out.append({**values, "events": {"id": rows}})
        assert out.steps == 3
        monkeypatch.setattr(root_file, "write_all", written)
        with h5py.File(path, "r") as file:
            assert len(file["time"]) == 3
        strategy.barrier()
        out.append({**values, "events": {"id": rows}})
    assert_steps(strategy, path, 4)


def test_a_full_disk_ends_a_new_file(strategy, path, monkeypatch):
    if strategy.rank == 0:
        path.write_bytes(b"old")

    def full(handle, address, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    out = ms.data.HDF5Writer(path, strategy=strategy)
    for _ in range(3):
        out.append({"x": np.ones((2000, 9))})
    with monkeypatch.context() as patch:
        patch.setattr(chunk_store, "write_all", full)
        patch.setattr(direct_rows, "write_all", full)
        with pytest.raises(OSError, match="No space left"):
            out.append({"x": np.ones((2000, 9))})
    # Rows of the first steps have left the memory, so no later call may seem to succeed.
    with pytest.raises(OSError, match=r"append: an earlier step could not be written.*out\.h5"):
        out.append({"x": np.ones((2000, 9))})
    with pytest.raises(OSError, match="close: an earlier step could not be written"):
        out.close()
    out.close()
    assert out.closed
    strategy.barrier()
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_context(strategy, path):
    with strategy.scope(), ms.data.HDF5Writer(path, "a") as out, pytest.raises(ContextError):
        strategy.run(lambda: out.append({"x": 1.0}))
    with pytest.raises(ValueError, match='mode must be "w"'):
        ms.data.HDF5Writer(path, "r", strategy=strategy)
    if strategy.size > 1:
        with pytest.raises(ContextError, match="outside of any strategy"):
            ms.data.HDF5Writer(path, "a")


def test_one_process_with_several_replicas_needs_no_scope(strategy, path):
    if strategy.size > 1:
        pytest.skip("needs one process")
    replicas = ms.MPIStrategy(num_replicas=2)
    with ms.data.HDF5Writer(path, "a") as out:
        out.append({"x": 1.0})
    replicas.close()
    with h5py.File(path) as file:
        assert file["x"][...] == [1.0]


def test_many_small_steps_need_little_space(strategy, path):
    num_steps = 3000 if strategy.size == 1 else 100
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        for step in range(num_steps):
            out.append({"loss": step})
    assert os.path.getsize(path) <= 24 * 2**20
    with h5py.File(path, "r") as file:
        assert np.array_equal(file["loss"], np.arange(num_steps))
