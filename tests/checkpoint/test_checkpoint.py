"""Save and restore in one process."""

import functools
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.trackable import Trackable
from tests.devices import array_equal


class History:
    """An object of a user's own, with arrays and JSON values."""

    def __init__(self, losses=(), epoch=0):
        self.losses = np.asarray(losses, np.float32)
        self.epoch = epoch

    def state_dict(self):
        return {"losses": self.losses, "epoch": self.epoch, "best": float("inf")}

    def load_state_dict(self, state):
        self.losses, self.epoch = state["losses"], state["epoch"]


def objects(fill):
    return {
        "weight": ms.Variable(np.full((2, 3), fill, np.float32)),
        "layers": [{"bias": ms.Variable(np.full(3, fill))}, {"bias": ms.Variable(fill)}],
        "rng": np.random.default_rng(int(fill)),
        "history": History([fill] * int(fill), int(fill)),
    }


@pytest.fixture
def file(tmp_path):
    return ms.Checkpoint(**objects(3.0)).write(tmp_path / "run.h5")


def test_write_returns_the_path_exactly_as_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = ms.Checkpoint(x=ms.Variable(1))
    for path in ("./run.h5", "sub//../run.h5", f"{tmp_path}/./run.h5"):
        assert checkpoint.write(path) == path
        checkpoint.restore(path)
    manager = ms.CheckpointManager(checkpoint, "./folder")
    assert manager.save(1) == "./folder/checkpoint-1.h5"
    assert manager.directory == "./folder"
    assert ms.CheckpointManager(checkpoint, "./folder").checkpoints == manager.checkpoints


def test_write_returns_the_path_as_a_string(tmp_path):
    path = tmp_path / "new" / "run.h5"
    assert ms.Checkpoint(x=ms.Variable(1)).write(path) == str(path)
    with h5py.File(path) as found:
        assert found.attrs["step"] == -1
        assert found.attrs["num_replicas"] == 1
        assert found.attrs["mpi_library"] == b"none"


def test_everything_comes_back(file):
    new = objects(5.0)
    ms.Checkpoint(**new).restore(file).assert_consumed()
    assert np.all(new["weight"].value() == 3)
    assert np.all(new["layers"][0]["bias"].value() == 3)
    assert new["layers"][1]["bias"].value() == 3
    assert new["rng"].random(4).tolist() == np.random.default_rng(3).random(4).tolist()
    assert new["history"].losses.tolist() == [3, 3, 3]
    assert new["history"].losses.dtype == np.float32
    assert new["history"].epoch == 3


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_bit_generator_goes_on_where_it_was(tmp_path, name):
    kind = getattr(np.random, name)
    generator, other = np.random.Generator(kind(1)), np.random.Generator(kind(2))
    generator.integers(10, dtype=np.uint32)  # leaves half a word behind
    path = ms.Checkpoint(rng=generator).write(tmp_path / "run.h5")
    ms.Checkpoint(rng=other).restore(path)
    assert array_equal(generator.integers(2**31, size=9), other.integers(2**31, size=9))


def test_nothing_is_assigned_when_shapes_or_dtypes_differ(file):
    new = objects(5.0)
    new["weight"] = ms.Variable(np.full((3, 2), 5, np.float32))
    new["layers"][1]["bias"] = ms.Variable(np.float32(5))
    with pytest.raises(ms.errors.CheckpointMismatchError) as caught:
        ms.Checkpoint(**new).restore(file)
    text = str(caught.value)
    assert "weight: float32 of shape (2, 3) in the file, float32 of shape (3, 2) in" in text
    assert "layers/1/bias: float64 of shape () in the file, float32 of shape () in" in text
    assert file in text
    assert np.all(new["layers"][0]["bias"].value() == 5)
    assert new["history"].epoch == 5
    assert new["rng"].random() == np.random.default_rng(5).random()


def test_nothing_is_assigned_when_an_object_refuses_its_state(file):
    class Stubborn(History):
        def load_state_dict(self, state):
            self.epoch = state["epoch"]
            if self.epoch == 3:
                raise KeyError("no such thing")

    new = objects(5.0)
    new["history"] = Stubborn([], 5)
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"'history' does not .*KeyError"):
        ms.Checkpoint(**new).restore(file)
    assert np.all(new["weight"].value() == 5)
    assert new["rng"].random() == np.random.default_rng(5).random()
    assert new["history"].epoch == 5


def test_nothing_is_assigned_from_a_damaged_file(file):
    data = bytearray(Path(file).read_bytes())
    data[data.find(np.full((2, 3), 3, np.float32).tobytes())] ^= 1
    Path(file).write_bytes(data)
    new = objects(5.0)
    with pytest.raises(ms.errors.CheckpointCorruptError, match="weight"):
        ms.Checkpoint(**new).restore(file)
    assert new["history"].epoch == 5
    assert np.all(new["layers"][0]["bias"].value() == 5)


def test_objects_attached_later_are_filled_when_they_come(file):
    checkpoint = ms.Checkpoint()
    status = checkpoint.restore(file)
    new = objects(5.0)
    checkpoint.weight = new["weight"]
    assert np.all(new["weight"].value() == 3)
    with pytest.raises(AssertionError, match="layers/0/bias"):
        status.assert_consumed()
    for name in ("layers", "rng", "history"):
        setattr(checkpoint, name, new[name])
    status.assert_consumed()
    assert new["history"].epoch == 3
    assert new["layers"][1]["bias"].value() == 3
    assert new["rng"].random() == np.random.default_rng(3).random()


def test_a_child_made_later_deep_in_the_tree_is_filled(tmp_path):
    def optimizer(slot):
        outer, inner = Trackable(), Trackable()
        outer._attach_child("inner", inner)
        if slot is not None:
            inner._attach_child("momentum/weight", ms.Variable(slot))
        return outer, inner

    path = ms.Checkpoint(optimizer=optimizer(3.0)[0]).write(tmp_path / "run.h5")
    outer, inner = optimizer(None)
    status = ms.Checkpoint(optimizer=outer).restore(path)
    slot = ms.Variable(0.0)
    inner._attach_child("momentum/weight", slot)
    assert slot.value() == 3
    status.assert_consumed()


def test_an_object_that_comes_later_with_another_shape_is_refused(file):
    checkpoint = ms.Checkpoint()
    checkpoint.restore(file).expect_partial()
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"weight: .*\(2, 3\).*\(4,\)"):
        checkpoint.weight = ms.Variable(np.zeros(4))


def dependent_slot(variable, value):
    optimizer = Trackable()
    optimizer._attach_child("momentum", ms.Variable(value), of=variable)
    return optimizer


def test_a_dependent_child_made_later_is_filled(tmp_path):
    weight = ms.Variable(1.0, name="one")
    trained = ms.Checkpoint(model=[weight], optimizer=dependent_slot(weight, 3.0))
    path = trained.write(tmp_path / "run.h5")
    weight, optimizer, slot = ms.Variable(0.0, name="another"), Trackable(), ms.Variable(0.0)
    status = ms.Checkpoint(model=[weight], optimizer=optimizer).restore(path)
    with pytest.raises(AssertionError, match="optimizer/momentum/model/0"):
        status.assert_consumed()
    optimizer._attach_child("momentum", slot, of=weight)
    assert slot.value() == 3
    status.assert_consumed()


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_dependents_and_their_variables_may_come_later_in_any_order(tmp_path, order):
    def make(value):
        pair = [ms.Variable(value), ms.Variable(value + 1)]
        optimizer = Trackable()
        for variable in pair:
            slot = ms.Variable(variable.numpy() + 10)
            optimizer._attach_child("momentum", slot, of=variable)
        return {"model": pair, "optimizer": optimizer}

    path = ms.Checkpoint(**make(1.0)).write(tmp_path / "run.h5")
    new, checkpoint = make(50.0), ms.Checkpoint()
    status = checkpoint.restore(path)
    for name in order:
        setattr(checkpoint, name, new[name])
    assert [each.child.value() for each in new["optimizer"]._checkpoint_dependents()] == [11, 12]
    status.assert_consumed()


def test_a_child_that_the_file_does_not_fit_is_not_attached(file):
    checkpoint = ms.Checkpoint(rng=np.random.default_rng(0))
    checkpoint.restore(file).expect_partial()
    with pytest.raises(ms.errors.CheckpointMismatchError):
        checkpoint.weight = ms.Variable(np.zeros(4))
    assert repr(checkpoint) == "Checkpoint(rng)"
    checkpoint.weight = ms.Variable(np.zeros((2, 3), np.float32))
    assert np.all(checkpoint.weight.value() == 3)


@pytest.mark.parametrize(
    ("own", "fits"),
    [
        (np.zeros((7, 2), np.float32), True),
        (np.zeros((0, 9)), True),
        (None, True),
        (np.zeros((4, 3), np.float32), False),
        (np.zeros((4, 2)), False),
        (np.zeros(2, np.float32), False),
        (np.float32(0), False),
    ],
)
def test_arrays_of_a_state_must_fit_but_for_their_length(tmp_path, own, fits):
    class Log:
        def __init__(self, rows, epoch):
            self.rows, self.epoch = rows, epoch

        def state_dict(self):
            return {"epoch": self.epoch} | ({} if self.rows is None else {"rows": self.rows})

        def load_state_dict(self, state):
            self.rows, self.epoch = state["rows"], state["epoch"]

    rows = np.ones((4, 2), np.float32)
    path = ms.Checkpoint(deep={"log": Log(rows, 3)}).write(tmp_path / "run.h5")
    log = Log(own, 0)
    if fits:
        ms.Checkpoint(deep={"log": log}).restore(path).assert_consumed()
        assert array_equal(log.rows, rows)
        assert log.epoch == 3
        return
    late = ms.Checkpoint()
    late.restore(path).expect_partial()
    words = r"deep/log/rows: float32 of shape \(4, 2\) in the file, float"
    for restore in (
        lambda: ms.Checkpoint(deep={"log": log}).restore(path),
        lambda: setattr(late, "deep", {"log": log}),
    ):
        with pytest.raises(ms.errors.CheckpointMismatchError, match=words):
            restore()
        assert log.epoch == 0


def test_optimizer_slots_are_filled_when_they_are_made(tmp_path):
    def training():
        weight = ms.Variable(np.float32([1, 2]), name="weight")
        return weight, ms.optimizers.SGD(learning_rate=0.5, momentum=0.9)

    def step(weight, optimizer):
        optimizer.apply_gradients([(np.float32([1, 1]), weight)])

    weight, optimizer = training()
    step(weight, optimizer)
    checkpoint = ms.Checkpoint(weight=weight, optimizer=optimizer)
    path = checkpoint.write(tmp_path / "run.h5")
    step(weight, optimizer)

    weight_2, optimizer_2 = training()
    status = ms.Checkpoint(weight=weight_2, optimizer=optimizer_2).restore(path)
    step(weight_2, optimizer_2)
    status.assert_consumed()
    assert weight_2.value().tolist() == weight.value().tolist()
    assert optimizer_2.iterations.value() == 2


def test_checkpoints_can_hold_checkpoints(tmp_path):
    inner = ms.Checkpoint(x=ms.Variable(3.0))
    path = ms.Checkpoint(inner=inner).write(tmp_path / "run.h5")
    late = ms.Checkpoint()
    status = ms.Checkpoint(inner=late).restore(path)
    late.x = ms.Variable(0.0)
    assert late.x.value() == 3
    status.assert_consumed()


def test_objects_are_attributes():
    weight = ms.Variable(1.0)
    checkpoint = ms.Checkpoint(weight=weight)
    assert checkpoint.weight is weight
    assert repr(checkpoint) == "Checkpoint(weight)"
    del checkpoint.weight
    with pytest.raises(AttributeError, match="no object 'weight'"):
        checkpoint.weight  # noqa: B018
    with pytest.raises(ValueError, match="'write' is a method"):
        checkpoint.write = weight
    with pytest.raises(ValueError, match="'_children' cannot name"):
        ms.Checkpoint(_children=weight)
    with pytest.raises(TypeError, match="cannot save 'step', a int"):
        checkpoint.step = 3


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (None, TypeError, "path as a string or pathlib.Path, not None"),
        (3, TypeError, "not 3"),
        (b"run.h5", TypeError, "not b'run.h5'"),
        ("", ValueError, "'' is none"),
        ("a\0b", ValueError, "is none"),
    ],
)
def test_paths_that_are_none_are_refused(path, error, words):
    checkpoint = ms.Checkpoint(x=ms.Variable(1))
    for function in (
        checkpoint.write,
        checkpoint.restore,
        ms.latest_checkpoint,
        functools.partial(ms.CheckpointManager, checkpoint),
    ):
        with pytest.raises(error, match=words):
            function(path)


def test_what_is_no_regular_file_is_neither_replaced_nor_read(tmp_path):
    checkpoint = ms.Checkpoint(x=ms.Variable(1))
    pipe = tmp_path / "pipe.h5"
    os.mkfifo(pipe)
    with pytest.raises(ms.errors.CheckpointError, match="pipe, but a file is to be written"):
        checkpoint.write(pipe)
    with pytest.raises(ms.errors.CheckpointError, match="pipe, but an HDF5 file was expected"):
        checkpoint.restore(pipe)
    assert pipe.is_fifo()
    (tmp_path / "null").symlink_to(os.devnull)
    with pytest.raises(ms.errors.CheckpointError, match="device"):
        checkpoint.write(tmp_path / "null")
    assert sorted(os.listdir(tmp_path)) == ["null", "pipe.h5"]


def test_a_link_stays_and_the_file_takes_its_place(tmp_path):
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link.h5", tmp_path / "far" / "run.h5"
    link.symlink_to("far/run.h5")
    for value in (1, 2):
        path = ms.Checkpoint(x=ms.Variable(value)).write(link)
        assert path == str(link)
        assert link.is_symlink()
        with h5py.File(target) as found:
            assert found["variables/x"][()] == value


def test_a_file_name_may_be_as_long_as_the_system_allows(tmp_path):
    checkpoint = ms.Checkpoint(x=ms.Variable(1))
    for name in ("x" * 252 + ".h5", "é" * 126 + ".h5"):
        assert Path(checkpoint.write(tmp_path / name)).name == name
        checkpoint.restore(tmp_path / name)
    with pytest.raises(ms.errors.CheckpointError, match="cannot be written: File name too long"):
        checkpoint.write(tmp_path / ("x" * 256))
    with pytest.raises(ms.errors.CheckpointError, match="There is no file"):
        checkpoint.restore(tmp_path / ("x" * 256))


def test_a_variable_that_hdf5_has_no_type_for_is_named(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    weight = ms.Variable(np.zeros(3, ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="'weight'.*bfloat16.* float32"):
        ms.Checkpoint(weight=weight).write(tmp_path / "run.h5")


def test_objects_with_nothing_to_save_are_refused(tmp_path):
    class Tokenizer:
        def __init__(self):
            self.words = ["a"]

    with pytest.raises(TypeError, match="nothing to save in 'tokenizer'"):
        ms.Checkpoint(tokenizer=Tokenizer()).write(tmp_path / "run.h5")
    assert not list(tmp_path.iterdir())


def test_writing_over_a_file_replaces_it_whole(file):
    ms.Checkpoint(x=ms.Variable(1.0)).write(file)
    with h5py.File(file) as found:
        assert list(found["variables"]) == ["x"]


@pytest.mark.parametrize("num_levels", [97, 98])
def test_a_deep_nest_is_saved_only_where_it_can_be_read_again(tmp_path, num_levels):
    nest = ms.Variable(1.0)
    for _ in range(num_levels):
        nest = {"a": nest}
    checkpoint = ms.Checkpoint(nest=nest, last=ms.Variable(2.0))
    checkpoint.restore(checkpoint.write(tmp_path / "run.h5")).assert_consumed()
    deeper = ms.Checkpoint(nest=[[nest]])
    with pytest.raises(ValueError, match="10. parts, and the most that can be read is 99"):
        deeper.write(tmp_path / "deep.h5")
    assert not os.path.exists(tmp_path / "deep.h5")


def test_arrays_deep_in_a_state_are_saved_only_where_they_can_be_read_again(tmp_path):
    class Deep:
        def state_dict(self):
            state = np.ones(1)
            for _ in range(99):
                state = {"a": state}
            return state

        def load_state_dict(self, state):
            pass

    with pytest.raises(ValueError, match="100 parts"):
        ms.Checkpoint(deep=Deep()).write(tmp_path / "deep.h5")
