"""Every kind of variable: the same writes give the same values, and the same file.

What comes out is computed here with NumPy, for all replicas at once. All numbers are small and
whole, so that sums are exact in any order.
"""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests import devices
from tests.replica_groups import DIVISORS, NUM_RANKS, RANK

Aggregation = ms.VariableAggregation
SHAPE = (5, 3)


class Kind(NamedTuple):
    """A strategy, and what its variables are made with."""

    open: Callable[[], ms.Strategy]
    options: Mapping[str, object] = MappingProxyType({})
    is_on_read: bool = False


def mpi(**options):
    return lambda: ms.MPIStrategy(device=devices.kind(), **options)


ON_READ = {"synchronization": ms.VariableSynchronization.ON_READ}
partitioner = ms.partitioners.FixedShardsPartitioner(NUM_RANKS)
KINDS = {
    "mirrored": Kind(mpi()),
    "of one replica": Kind(lambda: ms.OneDeviceStrategy(f"{devices.kind()}:{devices.index(RANK)}")),
    "of several replicas": Kind(mpi(num_replicas=NUM_RANKS + 1)),
    "central": Kind(ms.CentralStorageStrategy),
    "sharded": Kind(mpi(variable_partitioner=partitioner)),
    "split": Kind(mpi(ranks_per_replica=DIVISORS[-1]), {"split_axis": 1}),
    "split and mirrored": Kind(
        mpi(ranks_per_replica=DIVISORS[len(DIVISORS) // 2]), {"split_axis": 0}
    ),
    "on read": Kind(mpi(), ON_READ, is_on_read=True),
    "on read of several replicas": Kind(mpi(num_replicas=NUM_RANKS + 1), ON_READ, is_on_read=True),
    "split and on read": Kind(
        mpi(ranks_per_replica=DIVISORS[-1]), ON_READ | {"split_axis": 0}, is_on_read=True
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def strategy(kind):
    opened = kind.open()
    yield opened
    opened.close()


def make(strategy, kind, value, aggregation=Aggregation.SUM):
    with strategy.scope():
        return ms.Variable(value, name="w", aggregation=aggregation, **kind.options)


def start():
    return np.arange(15, dtype=np.float32).reshape(SHAPE) - 7


def given_by(replica):
    """What a replica writes, of the whole shape."""
    return (start() % 4 + replica).astype(np.float32)


def part(variable, whole):
    """Return what of the whole a call in this process is to give."""
    axis = variable.split_axis
    if axis is None:
        return whole
    layout = variable.strategy.extended._layout
    return np.array_split(whole, layout.ranks_per_replica, axis)[layout.shard]


def whole(strategy, variable):
    """Return the whole value on every rank. **Collective**."""
    value = variable.numpy()
    if variable.split_axis is None:
        return value
    shards = strategy.run(
        lambda: ms.get_replica_context().shards.all_gather(value, variable.split_axis)
    )
    (found,) = strategy.experimental_local_results(shards)
    return devices.on_host(found)


def merged(aggregation, values):
    """Return what the values of all replicas amount to."""
    if aggregation is Aggregation.ONLY_FIRST_REPLICA:
        return values[0]
    total = np.sum(values, axis=0, dtype=np.float64)
    return total if aggregation is Aggregation.SUM else total / len(values)


def test_a_snapshot_is_new_memory(strategy, kind):
    variable = make(strategy, kind, start())
    before = variable.numpy()
    snapshot = variable.read_value()
    snapshot += 1
    np.testing.assert_array_equal(variable.numpy(), before)


WRITES = {
    "assign": lambda old, new: new,
    "assign_add": np.add,
    "assign_sub": np.subtract,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "aggregation", [Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA], ids=str
)
def test_writes_of_replicas(strategy, kind, write, aggregation):
    num = strategy.num_replicas_in_sync
    if kind.is_on_read and aggregation is not Aggregation.SUM and num & (num - 1):
        pytest.skip("a mean of so many components is not exact")
    variable = make(strategy, kind, start(), aggregation)

    def step():
        replica = ms.get_replica_context().replica_id_in_sync_group
        value = part(variable, given_by(replica) * num)
        getattr(variable, write)(value, read_value=False)

    expected = start()
    of_replicas = [given_by(replica) * num for replica in range(num)]
    components = [start() / (num if aggregation is Aggregation.SUM else 1)] * num
    if kind.is_on_read:
        # Each has the whole at the start, as a program has made it.
        components = [start()] * num
    for _ in range(3):  # of which later ones may be prepared
        strategy.run(step)
        components = [WRITES[write](*pair) for pair in zip(components, of_replicas, strict=True)]
        expected = WRITES[write](expected, merged(aggregation, of_replicas))
        if kind.is_on_read:
            expected = merged(aggregation, components)
        np.testing.assert_array_equal(whole(strategy, variable), expected)


@pytest.mark.parametrize("write", WRITES)
def test_writes_of_all(strategy, kind, write):
    aggregation = Aggregation.MEAN if kind.is_on_read else Aggregation.SUM
    variable = make(strategy, kind, start(), aggregation)
    with strategy.scope():
        for _ in range(2):
            getattr(variable, write)(part(variable, given_by(2)), read_value=False)
    expected = WRITES[write](WRITES[write](start(), given_by(2)), given_by(2))
    np.testing.assert_array_equal(whole(strategy, variable), expected)


def test_copies_are_apart(strategy, kind):
    aggregation = Aggregation.MEAN if kind.is_on_read else Aggregation.SUM
    variable = make(strategy, kind, start(), aggregation)
    with strategy.scope():
        twin = copy.deepcopy(variable)
        variable.assign(part(variable, given_by(1)), read_value=False)
    assert type(twin) is type(variable)
    assert (twin.name, twin.strategy) == (variable.name, strategy)
    assert twin.full_shape == variable.full_shape == SHAPE
    np.testing.assert_array_equal(whole(strategy, twin), start())
    np.testing.assert_array_equal(whole(strategy, variable), given_by(1))


@pytest.mark.thorough_product
@pytest.mark.parametrize("other", KINDS)
def test_a_checkpoint_of_any_kind_restores_any_other(strategy, kind, other, mpi_tmp_path):
    if NUM_RANKS > 1 and KINDS["of one replica"] in (kind, KINDS[other]):
        pytest.skip("each rank has a file of its own there")
    aggregation = Aggregation.MEAN
    saved = make(strategy, kind, given_by(3), aggregation)
    path = ms.Checkpoint(model=[saved]).write(mpi_tmp_path / "run.h5")
    with h5py.File(path) as file:
        (found,) = file["variables/model"].values()
        np.testing.assert_array_equal(found[...], given_by(3))
        assert found.dtype == np.float32
    strategy.barrier()
    second = KINDS[other].open()
    restored = make(second, KINDS[other], np.zeros(SHAPE, np.float32), aggregation)
    ms.Checkpoint(model=[restored]).restore(path).assert_consumed()
    np.testing.assert_array_equal(whole(second, restored), given_by(3))
    second.close()


@pytest.mark.parametrize("how", ["parallel", "in the background", "before it is made"])
def test_a_checkpoint_written_or_restored_in_other_ways(strategy, kind, how, mpi_tmp_path):
    if NUM_RANKS > 1 and kind is KINDS["of one replica"]:
        pytest.skip("each rank has a file of its own there")
    saved = make(strategy, kind, given_by(3), Aggregation.MEAN)
    checkpoint = ms.Checkpoint(model=saved)
    if how == "in the background":
        with strategy.scope():
            manager = ms.CheckpointManager(checkpoint, mpi_tmp_path, asynchronous=True)
            path = manager.save()
            saved.assign(part(saved, start()), read_value=False)  # what is saved is a copy
            manager.wait()
    else:
        path = checkpoint.write(mpi_tmp_path / "run.h5", parallel=how == "parallel")
    late = ms.Checkpoint()
    with strategy.scope():
        status = late.restore(path) if how == "before it is made" else None
        late.model = make(strategy, kind, np.zeros(SHAPE, np.float32), Aggregation.MEAN)
    (status or late.restore(path)).assert_consumed()
    np.testing.assert_array_equal(whole(strategy, late.model), given_by(3))
    longer = make(strategy, kind, np.zeros((6, 3), np.float32), Aggregation.MEAN)
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"\(6, 3\).*\(5, 3\)|\(5, 3\)"):
        ms.Checkpoint(model=longer).restore(path)
