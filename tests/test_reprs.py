"""What the objects of a program say of themselves: one line, without a collective or a read."""

import html.parser

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.mpi.world import library_version
from mpistrat.system.text import brief, html_table, small_values

ON_READ = ms.VariableSynchronization.ON_READ
SUM = ms.VariableAggregation.SUM
HOSTILE = "</table><script>alert(1)</script>\n\x1b[31m"


@pytest.fixture(scope="module")
def strategy():
    return ms.MPIStrategy()


@pytest.fixture
def objects(strategy, tmp_path, rank):
    """Each kind of object that users hold, by a name."""
    file = tmp_path / "digits.h5"
    with h5py.File(file, "w") as f:
        f["image"], f["label"] = np.zeros((100, 8, 8), "f4"), np.arange(100)
    with strategy.scope():
        large = ms.Variable(np.zeros((100, 3), "f4"), name="large")
        small = ms.Variable(np.arange(3.0), name="small")
        total = ms.Variable(
            np.float64(rank), name="total", synchronization=ON_READ, aggregation=SUM
        )
        adam = ms.optimizers.Adam(0.1, weight_decay=0.01)
        sgd = ms.optimizers.SGD(lambda step: 0.1, momentum=0.9, nesterov=True)
        matrix = ms.metrics.ConfusionMatrix(3)
        mean = ms.metrics.MeanSquaredError()
        norm = ms.layers.BatchNorm(3)
        accumulator = ms.optimizers.GradientAccumulator([large, small])
    checkpoint = ms.Checkpoint(weight=large, optimizer=adam)
    # Each rank has its own file, but names of folders are compared.
    manager = ms.CheckpointManager(checkpoint, strategy.broadcast_object(str(tmp_path)))
    manager.save()
    handler = ms.PreemptionCheckpointHandler(manager)
    read = ms.data.Dataset.from_hdf5(str(file), ("image", "label")).shuffle(1).batch(32)
    opened = ms.data.Dataset.from_hdf5(str(file), ("image", "label")).batch(32)
    distributed = strategy.experimental_distribute_dataset(opened)
    started = strategy.experimental_distribute_dataset(ms.data.Dataset.range(10).batch(4))
    own = strategy.distribute_datasets_from_function(lambda _: ms.data.Dataset.range(6).batch(2))
    iterator = iter(started)
    next(iterator)
    pending = strategy.run(_pending)
    found = {
        "default": ms.get_strategy(),
        "mpi": strategy,
        "one": ms.OneDeviceStrategy(),
        "extended": strategy.extended,
        "scope": strategy.scope(),
        "large": large,
        "small": small,
        "total": total,
        "plain": ms.Variable(np.zeros((2, 2)), name=HOSTILE),
        "adam": adam,
        "sgd": sgd,
        "accumulator": accumulator,
        "average": ms.optimizers.ExponentialMovingAverage(0.99),
        "matrix": matrix,
        "unused": mean,
        "accuracy": ms.metrics.Accuracy(),
        "norm": norm,
        "checkpoint": checkpoint,
        "manager": manager,
        "status": checkpoint.restore(manager.latest_checkpoint),
        "handler": handler,
        "per replica state": ms.PerReplicaState(np.random.default_rng(1)),
        "unread": read,
        "range": ms.data.Dataset.range(10).take(4).repeat(),
        "mapped": ms.data.Dataset.from_arrays((np.zeros((5, 3)), np.zeros(5))).map(_double),
        "generator": ms.data.Dataset.from_generator(_numbers, ms.data.ArraySpec((), "int64")),
        "distributed": distributed,
        "own": own,
        "iterator": iterator,
        "values": ms.PerReplica(np.zeros((64, 8))),
        "few values": ms.PerReplica(np.arange(4).reshape(2, 2)),
        "slices": ms.IndexedSlices(np.zeros((50, 3)), np.arange(50), (90, 3)),
        "pending": pending,
        "options": ms.CommunicationOptions(),
    }
    yield found
    handler.close()
    pending.wait()


def _pending():
    return ms.get_replica_context().start_all_reduce("sum", np.ones(3))


def _double(x, y):
    return 2 * x, y


def _numbers():
    return iter(range(3))


EXPECTED = {
    "mpi": "<MPIStrategy rank {rank} of {size} on cpu:0, 1 node, {library}>",
    "large": "<MirroredVariable 'large' shape=(100, 3) dtype=float32 aggregation=NONE on cpu:0>",
    "small": "on cpu:0, local component [0., 1., 2.]>",
    "total": "<SyncOnReadVariable 'total' shape=() dtype=float64 aggregation=SUM on cpu:0, "
    "local component {rank}.>",
    "adam": "<Adam learning_rate=0.1 beta_1=0.9 beta_2=0.999 epsilon=1e-08 weight_decay=0.01 "
    "iterations=0>",
    "sgd": "momentum=0.9 nesterov=True iterations=0>",
    "accumulator": "for 2 variables, num_added=0",
    "matrix": "<ConfusionMatrix 'confusionmatrix' from sums matrix (3, 3)>",
    "unused": "<MeanSquaredError 'meansquarederror'",
    "checkpoint": "Checkpoint(weight, optimizer)",
    "manager": ": 1 checkpoints, newest checkpoint-1.h5>",
    "status": "2 restored, 0 still waiting>",
    "handler": "for SIGTERM, SIGUSR1: nothing noticed>",
    "per replica state": "PerReplicaState(Generator(PCG64))",
    "unread": "fields=('image', 'label')).shuffle(seed=1).batch(batch_size=32)>",
    "range": "<Dataset range(10).take(count=4).repeat(count=None), endless>",
    "mapped": "<Dataset from_arrays(float64 (5, 3), float64 (5,)).map(fn=_double), 5 examples>",
    "generator": "<Dataset from_generator(_numbers), unknown length>",
    "distributed": ".batch(batch_size=32), 4 batches, for rank {rank} of {size}>",
    "own": "<DistributedDataset range(6).batch(batch_size=2), 3 batches, one of {size} pipelines>",
    "iterator": "<ElementIterator of <DistributedDataset range(10).batch(batch_size=4), 3 batches, "
    "for rank {rank} of {size}, at element 1 of pass 0>>",
    "values": "PerReplica(float64 (64, 8))",
    "few values": "PerReplica(array([[0, 1], [2, 3]]))",
    "slices": "IndexedSlices(float64 (50, 3), indices=int64 (50,), dense_shape=(90, 3))",
    "pending": "<PendingReduction under way: call wait()>",
}


def test_each_says_what_it_is_in_one_line_without_a_collective(objects, strategy, rank, size):
    sequence = strategy.extended._collectives.channel.ledger.sequence
    library = " ".join(library_version().partition(",")[0].replace(" Version:", "").split())
    # Rank 0 alone asks, so a collective would not return.
    shown = {name: repr(each) for name, each in objects.items()} if rank == 0 else {}
    assert strategy.extended._collectives.channel.ledger.sequence == sequence
    for name, text in shown.items():
        assert "\n" not in text, name
        assert len(text) < 250, name
        assert " object at 0x" not in text, name
        assert EXPECTED.get(name, "").format(rank=rank, size=size, library=library) in text
    strategy.barrier()


def test_a_data_set_that_was_not_read_opens_no_file_to_say_so(tmp_path):
    dataset = ms.data.Dataset.from_hdf5([tmp_path / "a.h5", tmp_path / "b.h5"]).batch(4)
    assert "a.h5' and 1 more).batch(batch_size=4)>" in repr(dataset)


def test_a_closed_strategy_and_its_objects_say_what_they_are(rank, size):
    strategy = ms.MPIStrategy()
    with strategy.scope():
        variable = ms.Variable(np.zeros(2))
    strategy.close()
    assert f"rank {rank} of {size}" in repr(strategy)
    assert "[0., 0.]" in repr(variable)


class Elsewhere:
    """An array whose elements cannot be read without a wait, as on a GPU."""

    dtype, shape = np.dtype("float32"), (2,)

    def __array__(self, *args, **kwargs):
        raise AssertionError("its elements were read")

    __repr__ = __str__ = __array__


def test_elements_of_other_libraries_are_not_read():
    assert small_values(Elsewhere()) is None
    assert brief(Elsewhere()).endswith("float32 (2,)")


class _Table(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("name", ["large", "small", "total", "plain", "checkpoint", "manager"])
def test_notebooks_get_a_table_with_escaped_names(objects, strategy, name, rank):
    table = _Table(objects[name]._repr_html_() if rank == 0 else "<table>")
    assert set(table.tags) <= {"table", "caption", "b", "tr", "th", "td"}
    if rank == 0:
        assert all(text in table.texts for text in SHOWN[name])
    strategy.barrier()


SHOWN = {
    "large": ["shape", "(100, 3)", "1.2 KiB", "cpu:0", "ON_WRITE"],
    "small": ["local component", "[0., 1., 2.]"],
    "total": ["SyncOnReadVariable 'total'", "ON_READ", "SUM"],
    "plain": ["Variable '</table><script>alert(1)</script>\\n\\x1b[31m'"],
    "checkpoint": ["weight", "float32", "MirroredVariable", "optimizer/iterations"],
    "manager": ["step", "1", "checkpoint-1.h5"],
}


def test_a_checkpoint_that_cannot_be_saved_says_so_in_its_table():
    checkpoint = ms.Checkpoint(states={1: ms.Variable(1.0), "1": ms.Variable(2.0)})
    assert "cannot be saved" in checkpoint._repr_html_()


def test_a_table_takes_the_colours_of_the_page():
    text = html_table("<title>", [("a & b", 1)])
    assert "&lt;title&gt;" in text
    assert "a &amp; b" in text
    assert "color: inherit" in text
