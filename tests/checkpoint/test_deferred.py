"""A save between a restore and the moment when the program has made all of its objects."""

import h5py
import numpy as np
import pytest
import xxhash

import mpistrat as ms
from mpistrat.trackable import Trackable

pytestmark = pytest.mark.mpi

SUM = ms.VariableAggregation.SUM
ON_READ = ms.VariableSynchronization.ON_READ


class Program:
    """A model, an optimizer that makes its slots at the first step, and what goes with them."""

    def __init__(self, strategy, adam=False, saves_all=False):
        self.strategy = strategy
        with strategy.scope():
            self.weight = ms.Variable(np.ones((2, 3), np.float32), name="w")
            self.outside = ms.Variable(np.ones(2), name="not/saved")
            scale = ms.optimizers.LossScale(initial_scale=4.0)
            kind = ms.optimizers.Adam if adam else ms.optimizers.SGD
            options = {} if adam else {"momentum": 0.5}
            self.optimizer = kind(0.1, loss_scale=scale, **options)
            self.loss = ms.metrics.Mean(name="loss")
        # One optimizer may be found in two places.
        model = [self.weight, self.outside] if saves_all else [self.weight]
        objects = {"model": model, "optimizer": self.optimizer}
        self.checkpoint = ms.Checkpoint(**objects, again={"optimizer": self.optimizer})

    def step(self):
        def replica_step():
            rank = ms.get_replica_context().replica_id_in_sync_group
            scale = self.optimizer.loss_scale.value
            gradients = [(scale * (rank + 1) * np.ones(v.shape), v) for v in self.variables]
            self.optimizer.apply_gradients(gradients)

        self.strategy.run(replica_step)

    @property
    def variables(self):
        return self.weight, self.outside

    def values(self):
        slots = {
            (each.name, each.of.name): each.child.numpy().tolist()
            for each in self.optimizer._checkpoint_dependents()
        }
        return [each.numpy().tolist() for each in self.variables], slots


def content(path):
    """Everything in a file but the attributes of its root."""
    found = {}

    def take(name, node):
        value = node[()].tolist() if isinstance(node, h5py.Dataset) else None
        attributes = {key: np.asarray(each).tolist() for key, each in node.attrs.items()}
        found[name] = value, attributes

    with h5py.File(path) as file:
        file.visititems(take)
    return found


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_slots_outlive_a_save_before_the_first_step(strategy, mpi_tmp_path, adam, asynchronous):
    trained = Program(strategy, adam, saves_all=True)
    trained.step()
    first = trained.checkpoint.write(mpi_tmp_path / "first.h5")
    for number in (1, 2):  # each in a separate program
        program = Program(strategy, adam, saves_all=True)
        manager = ms.CheckpointManager(
            program.checkpoint, mpi_tmp_path / str(number), asynchronous=asynchronous
        )
        program.checkpoint.restore(first)
        saved = manager.save(number)
        manager.wait()
        assert content(saved) == content(first)
        first = saved
    manager.restore_or_initialize()
    program.step()
    trained.step()
    assert program.values() == trained.values()


def test_slots_of_variables_in_no_checkpoint_come_with_the_first_step(strategy, mpi_tmp_path):
    trained = Program(strategy)
    trained.step()
    first = trained.checkpoint.write(mpi_tmp_path / "first.h5")
    program = Program(strategy)
    program.checkpoint.restore(first)
    program.outside.assign(trained.outside.numpy())
    with pytest.raises(ms.errors.CheckpointError, match=r"  optimizer/momentum/not%2Fsaved "):
        program.checkpoint.write(mpi_tmp_path / "second.h5")
    for each in (program, trained):
        each.step()
    second = program.checkpoint.write(mpi_tmp_path / "second.h5")
    assert content(second) == content(trained.checkpoint.write(first))


def test_the_last_of_two_restores_counts(strategy, mpi_tmp_path):
    program = Program(strategy)
    before = program.checkpoint.write(mpi_tmp_path / "before.h5")
    start = content(before)
    program.step()
    after = program.checkpoint.write(mpi_tmp_path / "after.h5")
    end = content(after)
    assert len(end) > len(start)
    for first, last in ((before, after), (after, before), (after, after)):
        again = Program(strategy)
        again.checkpoint.restore(first)
        status = again.checkpoint.restore(last)
        status.assert_existing_objects_matched()
        expected = start if last == before else end
        if last == after:  # slots of what no checkpoint has come with the first step
            status.expect_partial()
            expected = {name: end[name] for name in end if "not%2Fsaved" not in name}
        found = content(again.checkpoint.write(mpi_tmp_path / "found.h5"))
        slots = found.keys() - expected.keys()
        assert {name: found[name] for name in expected} == expected
        assert not any(np.any(found[each][0]) for each in slots if found[each][0] is not None)
    # A program that has made steps goes back to the one that has not.
    fresh = Program(strategy)
    program.checkpoint.restore(before).assert_existing_objects_matched()
    program.outside.assign(np.ones(2))  # no checkpoint has it
    for each in (fresh, program):
        each.step()
    assert program.values() == fresh.values()


def test_a_slot_that_does_not_fit_is_refused_before_anything_changes(strategy, mpi_tmp_path):
    program = Program(strategy)
    program.step()
    path = program.checkpoint.write(mpi_tmp_path / "run.h5")
    if strategy.extended._collectives.rank == 0:
        with h5py.File(path, "r+") as file:
            slot = file["variables/optimizer/momentum/model/0"]
            attributes = dict(slot.attrs)
            del file["variables/optimizer/momentum/model/0"]
            slot = file.create_dataset("variables/optimizer/momentum/model/0", data=np.zeros(0))
            attributes["digest"] = f"xxh3-128:{xxhash.xxh3_128_hexdigest(b'')}"
            slot.attrs.update(attributes)
    again = Program(strategy)
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"momentum/model/0: float64 of"):
        again.checkpoint.restore(path)
    assert again.values() == Program(strategy).values()


class Log:
    def __init__(self, rows=()):
        self.rows = np.asarray(rows, np.float32)

    def state_dict(self):
        return {"rows": self.rows, "deep": [self.rows, 3]}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def late_objects(strategy, value):
    total = ms.Variable(value, synchronization=ON_READ, aggregation=SUM)
    loss = ms.metrics.Mean(name="loss")
    strategy.run(lambda: loss.update_state(value))
    norm = ms.layers.BatchNorm(2)
    norm.gamma.assign(np.full(2, value))
    model = {"kernel": ms.Variable(np.full(3, value)), "norm": norm}
    rng = np.random.default_rng(int(value))
    return {"model": model, "total": total, "loss": loss, "log": Log([value] * 3), "rng": rng}


@pytest.fixture
def scope(strategy):
    with strategy.scope():
        yield


WAYS = {
    "write": {},
    "parallel": {"parallel": True},
    "manager": {},
    "asynchronous": {"asynchronous": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_saved_while_values_wait_for_their_objects(strategy, scope, mpi_tmp_path, way):
    objects = late_objects(strategy, 4.0)
    first = ms.Checkpoint(**objects).write(mpi_tmp_path / "first.h5")
    checkpoint = ms.Checkpoint(step=ms.Variable(7))
    folder = mpi_tmp_path / "folder"
    manager = ms.CheckpointManager(checkpoint, folder, **(WAYS[way] if way != "parallel" else {}))

    def save():
        if way in ("write", "parallel"):
            return checkpoint.write(folder / "new.h5", **WAYS[way])
        path = manager.save(1)
        manager.wait()
        return path

    checkpoint.restore(first)
    waiting = [
        "model/kernel (float64 of shape (3,))",
        "model/norm/gamma (float32 of shape (2,))",
        "total (float64 of shape ())",
        "log/rows (float32 of shape (3,))",
        "log/deep/0 (float32 of shape (3,))",
        "log (state)",
        "rng (state)",
    ]
    with pytest.raises(ms.errors.CheckpointError) as caught:
        save()
    assert not folder.exists()
    assert all(f"  {each} from {first}\n" in str(caught.value) for each in waiting)
    assert "expect_partial()" in str(caught.value)

    new = late_objects(strategy, 1.0)
    for name in ("model", "total", "loss", "log"):
        setattr(checkpoint, name, new[name])
    with pytest.raises(ms.errors.CheckpointError) as caught:
        save()
    assert [each in str(caught.value) for each in waiting] == [False] * 6 + [True]
    checkpoint.rng = new["rng"]
    found = content(save())
    assert found.pop("variables/step")[0] == 7
    assert found == content(first)


def test_expected_and_replaced_values_do_not_prevent_a_save(strategy, scope, mpi_tmp_path):
    first = ms.Checkpoint(**late_objects(strategy, 4.0)).write(mpi_tmp_path / "first.h5")
    second = ms.Checkpoint(x=ms.Variable(1.0)).write(mpi_tmp_path / "second.h5")

    def saved(checkpoint):
        path = checkpoint.write(mpi_tmp_path / "saved.h5")
        return {
            name.partition("/")[2]
            for name, (value, _) in content(path).items()
            if value is not None
        }

    checkpoint = ms.Checkpoint()
    status = checkpoint.restore(first)
    outer = ms.Checkpoint(inner=checkpoint)
    with pytest.raises(ms.errors.CheckpointError, match="  inner/model/kernel "):
        saved(outer)
    checkpoint.total = {"deep": ms.Variable(1.0)}  # below the path of what waits
    with pytest.raises(ms.errors.CheckpointError, match="  total "):
        saved(checkpoint)
    if strategy.extended._collectives.rank == 0:
        status.expect_partial()
    assert saved(checkpoint) == {"total/deep"}
    checkpoint.model = late_objects(strategy, 1.0)["model"]
    assert checkpoint.model["kernel"].numpy().tolist() == [4, 4, 4]

    outer = ms.Checkpoint(inner=(inner := Trackable()))
    outer.restore(ms.Checkpoint(inner=ms.Checkpoint(y=ms.Variable(1.0))).write(first))
    with pytest.raises(ms.errors.CheckpointError, match="  inner/y "):
        saved(outer)
    ms.Checkpoint(inner=inner).restore(second).expect_partial()  # came later
    assert saved(outer) == set()


def test_ranks_may_name_their_objects_in_another_order(strategy, mpi_tmp_path):
    rank, size = strategy.extended._collectives.rank, strategy.num_replicas_in_sync
    with strategy.scope():
        pair = {name: ms.Variable(value, name=name) for name, value in (("a", 1.0), ("b", 2.0))}
    path = ms.Checkpoint(**pair).write(mpi_tmp_path / "run.h5")
    names = ("a", "b") if rank == 0 else ("b", "a")
    for variable in pair.values():
        variable.assign(0.0)
    ms.Checkpoint(**{name: pair[name] for name in names}).restore(path)
    assert [pair[name].values[0] for name in "ab"] == [1, 2]
    if size > 1:
        mine = pair if rank == 0 else {"a": pair["a"]}
        with pytest.raises(ms.errors.CollectiveMismatchError):
            ms.Checkpoint(**mine).restore(path)
