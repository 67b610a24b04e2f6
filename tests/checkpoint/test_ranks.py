"""Save and restore on any number of ranks."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch

ON_READ = ms.VariableSynchronization.ON_READ
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN
FIRST, NONE = ms.VariableAggregation.ONLY_FIRST_REPLICA, ms.VariableAggregation.NONE


@pytest.fixture
def strategy():
    return ms.MPIStrategy(device="cpu")


def world(strategy):
    return strategy.extended._collectives.rank, strategy.num_replicas_in_sync


def sync_on_read(name, aggregation, dtype=np.float64):
    return ms.Variable(
        np.zeros(2, dtype), name=name, synchronization=ON_READ, aggregation=aggregation
    )


def make_objects(strategy):
    with strategy.scope():
        return {
            "mirrored": ms.Variable(np.zeros(3, np.float32), name="mirrored", aggregation=MEAN),
            "sum": sync_on_read("sum", SUM),
            "count": sync_on_read("count", SUM, np.int64),
            "mean": sync_on_read("mean", MEAN),
            "first": sync_on_read("first", FIRST),
            "rng": np.random.default_rng(0),
        }


def fill(strategy, objects):
    """Give the components of each replica values of their own."""
    rank, _ = world(strategy)
    objects["mirrored"].assign(np.arange(3, dtype=np.float32))

    def step():
        for name in ("sum", "count", "mean", "first"):
            objects[name].assign(np.full(2, rank + 1, objects[name].dtype), read_value=False)

    strategy.run(step)


@pytest.mark.mpi
def test_values_are_aggregated_on_their_way_to_the_file(strategy, mpi_tmp_path):
    rank, size = world(strategy)
    objects = make_objects(strategy)
    fill(strategy, objects)
    path = ms.Checkpoint(**objects).write(mpi_tmp_path / "new" / "run.h5")
    assert path == str(mpi_tmp_path / "new" / "run.h5")
    total = size * (size + 1) / 2
    with h5py.File(path) as file:
        assert file.attrs["num_replicas"] == size
        assert file.attrs["mpi_library"] not in ("", "none")
        stored = {name: data[()].tolist() for name, data in file["variables"].items()}
        modes = {
            name: (
                data.attrs["synchronization"].decode(),
                data.attrs["aggregation"].decode(),
                data.attrs["trainable"],
            )
            for name, data in file["variables"].items()
        }
    assert stored == {
        "mirrored": [0, 1, 2],
        "sum": [total] * 2,
        "count": [total] * 2,
        "mean": [total / size] * 2,
        "first": [1, 1],
    }
    assert modes["sum"] == ("ON_READ", "SUM", False)
    assert modes["mirrored"][1:] == ("MEAN", True)
    if rank == 0:
        assert os.listdir(mpi_tmp_path / "new") == ["run.h5"]


@pytest.mark.mpi
def test_each_replica_gets_its_part_back(strategy, mpi_tmp_path):
    rank, size = world(strategy)
    objects = make_objects(strategy)
    fill(strategy, objects)
    path = ms.Checkpoint(**objects).write(mpi_tmp_path / "run.h5")
    new = {**make_objects(strategy), "rng": np.random.default_rng(rank + 5)}
    ms.Checkpoint(**new).restore(path).assert_consumed()
    total = size * (size + 1) // 2
    assert new["mirrored"].values[0].tolist() == [0, 1, 2]
    assert new["sum"].values[0] == pytest.approx([total / size] * 2)
    assert new["count"].values[0].tolist() == [total // size + (rank < total % size)] * 2
    assert new["mean"].values[0] == pytest.approx([total / size] * 2)
    assert new["first"].values[0].tolist() == [1, 1]
    assert new["count"].numpy().tolist() == [total] * 2
    assert new["rng"].random() == np.random.default_rng(0).random()


@pytest.mark.mpi
def test_a_file_of_any_other_size_is_read(strategy, mpi_tmp_path):
    """A plain program without MPI writes; the ranks read, into other kinds of variables."""
    rank, size = world(strategy)
    path = mpi_tmp_path / "run.h5"
    if rank == 0:
        names = ("mirrored", "sum", "mean", "first")
        values = {n: ms.Variable(np.full(3 if n == "mirrored" else 2, 6.0)) for n in names}
        values["mirrored"] = ms.Variable(np.full(3, 6, np.float32))
        ms.Checkpoint(**values).write(path)
    with strategy.scope():
        pass
    objects = make_objects(strategy)
    del objects["rng"], objects["count"]
    ms.Checkpoint(**objects).restore(path).assert_consumed()
    assert objects["sum"].values[0] == pytest.approx([6 / size] * 2)
    assert objects["mean"].values[0].tolist() == [6, 6]
    assert objects["mirrored"].values[0].tolist() == [6, 6, 6]


@pytest.mark.mpi
def test_slots_and_metrics_are_saved_and_come_back_later(strategy, mpi_tmp_path):
    rank, size = world(strategy)

    def make():
        with strategy.scope():
            weight = ms.Variable(np.ones(2), name="weight", aggregation=MEAN)
            optimizer = ms.optimizers.SGD(learning_rate=0.1, momentum=0.9)
            return weight, optimizer, ms.metrics.Mean(name="loss")

    def train(weight, optimizer, loss):
        def step():
            optimizer.apply_gradients([(np.full(2, rank + 1.0), weight)])
            loss.update_state(rank + 1.0)

        strategy.run(step)

    def checkpoint(weight, optimizer, loss):
        return ms.Checkpoint(weight=weight, optimizer=optimizer, metrics={"loss": loss})

    old = make()
    train(*old)
    path = checkpoint(*old).write(mpi_tmp_path / "run.h5")
    new = make()
    status = checkpoint(*new).restore(path)
    assert new[2].result() == pytest.approx((size + 1) / 2)
    train(*old)
    train(*new)
    status.assert_consumed()
    assert new[0].values[0].tolist() == old[0].values[0].tolist()
    assert new[1].iterations.numpy() == 2


@pytest.mark.mpi
def test_a_variable_that_cannot_be_aggregated_is_refused(strategy, mpi_tmp_path):
    with strategy.scope():
        good = ms.Variable(np.zeros(3), name="good")
        bad = sync_on_read("bad", NONE)
    with pytest.raises(ValueError, match="'bad' has aggregation NONE"):
        ms.Checkpoint(good=good, bad=bad).write(mpi_tmp_path / "run.h5")
    assert ms.Checkpoint(good=good).write(mpi_tmp_path / "run.h5")


@pytest.mark.mpi
def test_what_rank_0_cannot_write_is_an_error_on_every_rank(strategy, mpi_tmp_path):
    objects = make_objects(strategy)
    (mpi_tmp_path / "file").write_text("")
    with pytest.raises(ms.errors.CheckpointError, match="cannot be written"):
        ms.Checkpoint(**objects).write(mpi_tmp_path / "file" / "run.h5")
    assert ms.Checkpoint(**objects).write(mpi_tmp_path / "run.h5")


@pytest.mark.mpi
def test_what_rank_0_cannot_read_is_an_error_on_every_rank(strategy, mpi_tmp_path):
    rank, _ = world(strategy)
    objects = make_objects(strategy)
    checkpoint = ms.Checkpoint(**objects)
    with pytest.raises(ms.errors.CheckpointError, match="There is no file"):
        checkpoint.restore(mpi_tmp_path / "absent.h5")
    path = Path(checkpoint.write(mpi_tmp_path / "run.h5"))
    fill(strategy, objects)
    if rank == 0:
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ms.errors.CheckpointCorruptError, match="truncated"):
        checkpoint.restore(path)
    assert objects["mirrored"].values[0].tolist() == [0, 1, 2]


@pytest.mark.mpi
def test_shapes_that_differ_are_an_error_on_every_rank(strategy, mpi_tmp_path):
    path = ms.Checkpoint(**make_objects(strategy)).write(mpi_tmp_path / "run.h5")
    objects = make_objects(strategy)
    with strategy.scope():
        objects["mean"] = ms.Variable(np.zeros(5), name="mean")
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"mean: .*\(2,\).*\(5,\)"):
        ms.Checkpoint(**objects).restore(path)
    assert objects["rng"].random() == np.random.default_rng(0).random()


@pytest.mark.mpi
def test_an_object_that_refuses_on_one_rank_undoes_all(strategy, mpi_tmp_path):
    rank, size = world(strategy)

    class Position:
        def __init__(self, at, refuses):
            self.at, self.refuses = at, refuses

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]
            if self.refuses and self.at == 1:
                raise ValueError("not here")

    objects = make_objects(strategy)
    path = ms.Checkpoint(**objects, position=Position(1, False)).write(mpi_tmp_path / "run.h5")
    fill(strategy, objects)
    position = Position(2, refuses=rank == size - 1)
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"'position'.*not here"):
        ms.Checkpoint(**objects, position=position).restore(path)
    assert position.at == 2
    assert objects["mirrored"].values[0].tolist() == [0, 1, 2]


@pytest.mark.mpi
def test_ranks_with_other_objects_are_named(strategy, mpi_tmp_path):
    rank, size = world(strategy)
    objects = make_objects(strategy)
    if size > 1 and rank == size - 1:
        objects["extra"] = np.random.default_rng(0)
        with pytest.raises(ValueError, match=r"differ from those on rank 0: \['extra'\]"):
            ms.Checkpoint(**objects).write(mpi_tmp_path / "run.h5")
    elif size > 1:
        with pytest.raises(ValueError, match=rf"on rank {size - 1} of {size}"):
            ms.Checkpoint(**objects).write(mpi_tmp_path / "run.h5")


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["write", "restore", "latest", "manager", "save"])
def test_an_argument_that_is_bad_on_one_rank_is_an_error_on_all(strategy, mpi_tmp_path, what):
    rank, size = world(strategy)
    if size == 1:
        pytest.skip("needs another rank")
    checkpoint = ms.Checkpoint(**make_objects(strategy))
    manager = ms.CheckpointManager(checkpoint, mpi_tmp_path)
    bad = rank == 1
    path = None if bad else mpi_tmp_path / "run.h5"
    calls = {
        "write": lambda: checkpoint.write(path),
        "restore": lambda: checkpoint.restore(path),
        "latest": lambda: ms.latest_checkpoint(path),
        "manager": lambda: ms.CheckpointManager(checkpoint, path),
        "save": lambda: manager.save(step="one" if bad else 1),
    }
    error, words = (
        (TypeError, "not ") if bad else (ms.errors.CollectiveMismatchError, "rank 1.*Type")
    )
    with strategy.scope(), pytest.raises(error, match=f"(?s){words}"):
        calls[what]()


@pytest.mark.mpi
def test_old_files_are_gone_when_save_returns_on_any_rank(strategy, mpi_tmp_path, monkeypatch):
    def remove_slowly(path):
        time.sleep(0.2)
        os.remove(path)

    monkeypatch.setattr("mpistrat.checkpoint.manager._remove", remove_slowly)
    checkpoint = ms.Checkpoint(**make_objects(strategy))
    manager = ms.CheckpointManager(checkpoint, mpi_tmp_path, max_to_keep=1)
    for step in range(3):
        manager.save(step)
        assert os.listdir(mpi_tmp_path) == [f"checkpoint-{step}.h5"]
        strategy.extended._collectives.gather_json(None)


@pytest.mark.mpi
def test_saving_inside_run_is_refused(strategy, mpi_tmp_path):
    checkpoint = ms.Checkpoint(**make_objects(strategy))
    for call in (checkpoint.write, checkpoint.restore):
        with pytest.raises(ms.errors.ContextError, match="cross-replica context"):
            strategy.run(lambda call=call: call(mpi_tmp_path / "run.h5"))
    written = strategy.run(
        lambda: ms.get_replica_context().merge_call(
            lambda _: checkpoint.write(mpi_tmp_path / "run.h5")
        )
    )
    assert written == str(mpi_tmp_path / "run.h5")


@pytest.mark.mpi
def test_objects_without_a_strategy_use_the_one_in_scope(strategy, mpi_tmp_path):
    _, size = world(strategy)
    generator = np.random.default_rng(0)
    with strategy.scope():
        path = ms.Checkpoint(rng=generator).write(mpi_tmp_path / "run.h5")
        ms.Checkpoint(rng=generator).restore(path)
        assert ms.latest_checkpoint(mpi_tmp_path) is None
    assert generator.random() == np.random.default_rng(0).random()
    with h5py.File(path) as file:
        assert file.attrs["num_replicas"] == size


@pytest.mark.mpi
def test_a_manager_is_the_same_on_every_rank(strategy, mpi_tmp_path):
    rank, _ = world(strategy)
    objects = make_objects(strategy)
    manager = ms.CheckpointManager(ms.Checkpoint(**objects), mpi_tmp_path / "ckpt", max_to_keep=2)
    for _ in range(3):
        fill(strategy, objects)
        manager.save()
    names = [Path(path).name for path in manager.checkpoints]
    assert names == ["checkpoint-2.h5", "checkpoint-3.h5"]
    again = ms.CheckpointManager(ms.Checkpoint(**objects), mpi_tmp_path / "ckpt")
    assert again.checkpoints == manager.checkpoints
    if rank == 0:
        os.truncate(manager.checkpoints[1], 1000)
    with strategy.scope():
        assert ms.latest_checkpoint(mpi_tmp_path / "ckpt") == manager.checkpoints[0]
    assert again.restore_or_initialize() == manager.checkpoints[0]


MOVES = """
import sys
import numpy as np
import mpistrat as ms

how, path = sys.argv[1:]
strategy = ms.MPIStrategy(device="cpu")
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN
LARGE = 2**16 + 1
WRITERS, STEPS, BATCH, EXAMPLES = 3, 7, 10, 100

def on_read(name, dtype, aggregation):
    return ms.Variable(np.zeros(LARGE, dtype), name=name, aggregation=aggregation,
                       synchronization=ms.VariableSynchronization.ON_READ)

dataset = ms.data.Dataset.range(EXAMPLES).shuffle(seed=3).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    objects = {
        "weight": ms.Variable(np.zeros(LARGE, np.float32), name="weight"),
        "count": on_read("count", np.int64, SUM),
        "sum": on_read("sum", np.float64, SUM),
        "mean": on_read("mean", np.float64, MEAN),
    }
    seen = ms.metrics.Sum(name="seen")
    optimizer = ms.optimizers.Adam(0.1, loss_scale=ms.optimizers.LossScale(4.0, growth_interval=2))
checkpoint = ms.Checkpoint(**objects, batches=batches, seen=seen, optimizer=optimizer)

def train(batch):
    seen.update_state(batch)
    gradient = np.full(LARGE, (4.0 if how == "write" else 8.0) / size, np.float32)
    optimizer.loss_scale.value
    optimizer.apply_gradients([(gradient, objects["weight"])])

if how == "write":
    assert size == WRITERS

    def fill():
        for name in ("count", "sum", "mean"):
            values = np.full(LARGE, rank + 5, objects[name].dtype)
            objects[name].assign(values, read_value=False)

    strategy.run(fill)
    for step, batch in enumerate(batches, 1):
        strategy.run(train, args=(batch,))
        if step == STEPS:
            break
    checkpoint.write(path)
else:
    checkpoint.restore(path).assert_existing_objects_matched()
    total = sum(r + 5 for r in range(WRITERS))
    share = total // size + (rank < total % size)
    assert np.all(objects["count"].values[0] == share)
    assert np.allclose(objects["sum"].values[0], total / size)
    assert np.allclose(objects["mean"].values[0], total / WRITERS)
    weight = objects["weight"].values[0]
    assert weight[0] != 0 and np.all(weight == weight[0])
    assert optimizer.iterations.numpy() == STEPS
    scale = optimizer.loss_scale.value
    left = 0
    for batch in batches:
        left += 1
        strategy.run(train, args=(batch,))
    assert left == EXAMPLES // BATCH - STEPS
    assert optimizer.iterations.numpy() == EXAMPLES // BATCH
    assert float(seen.result()) == EXAMPLES * (EXAMPLES - 1) / 2  # each example once
    moment = strategy.extended._collectives.gather_json(
        [float(objects["weight"].values[0][0]), float(scale)])
    assert all(each == moment[0] for each in moment)
    if rank == 0:
        print("as", *moment[0])
"""


@pytest.mark.launches
def test_what_3_ranks_have_saved_goes_on_at_1_2_and_4(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MOVES)
    path = tmp_path / "run.h5"
    done = launch.run([program, "write", path], ranks=3)
    assert done.returncode == 0, done.stderr
    printed = set()
    for readers in (1, 2, 4):
        done = launch.run([program, "read", path], ranks=readers)
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1


@pytest.mark.launches
def test_one_process_needs_no_mpi(tmp_path):
    program = textwrap.dedent("""
        import sys
        sys.modules["mpi4py"] = None
        import numpy as np
        import mpistrat as ms
        assert "h5py" not in sys.modules
        checkpoint = ms.Checkpoint(x=ms.Variable(np.ones(3)))
        manager = ms.CheckpointManager(checkpoint, sys.argv[1])
        manager.save()
        assert ms.latest_checkpoint(sys.argv[1]) == manager.restore_or_initialize()
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
