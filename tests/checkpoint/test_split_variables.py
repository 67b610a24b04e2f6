"""Checkpoints of split variables: whole in the file, for any number of ranks of a replica."""

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.variables.placement import BYTES_PER_PIECE
from tests.replica_groups import DIVISORS, NUM_RANKS

SMALL = (7, 3)
LARGE = (1013, BYTES_PER_PIECE // 4000)
"""More than one piece, as float32."""
ON_READ = ms.VariableSynchronization.ON_READ


@pytest.fixture
def owners(strategy):
    """Strategies with replicas of each possible number of ranks, and one that takes no part."""
    wide = [ms.MPIStrategy(device="cpu", ranks_per_replica=each) for each in DIVISORS]
    yield [*wide, ms.OneDeviceStrategy() if NUM_RANKS == 1 else strategy]
    for each in wide:
        each.close()


def numbers(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def make(owner, shape, axis, initial):
    with owner.scope():
        table = ms.Variable(initial, split_axis=axis, name="table")
        total = ms.Variable(
            initial[0],
            split_axis=0,
            synchronization=ON_READ,
            name="total",
            aggregation=ms.VariableAggregation.SUM,
        )
        adam = ms.optimizers.Adam(0.5)
    return table, total, adam, ms.Checkpoint(table=table, total=total, adam=adam)


def step(owner, table, adam):
    gradient = np.ones(table.shape, np.float32) / owner.num_replicas_in_sync
    owner.run(adam.apply_gradients, args=([(gradient, table)],))


def own_part(owner, whole, axis):
    layout = owner.extended._layout
    return np.array_split(whole, layout.ranks_per_replica, axis)[layout.shard]


@pytest.mark.parametrize(
    ("shape", "axis", "parallel"),
    [
        (SMALL, 0, False),
        (SMALL, 1, True),
        (LARGE, 0, True),
        pytest.param(LARGE, 1, False, marks=pytest.mark.thorough),
        pytest.param(LARGE, 0, False, marks=pytest.mark.thorough),
        pytest.param(LARGE, 1, True, marks=pytest.mark.thorough),
    ],
)
def test_any_replicas_write_and_read_the_same_file(
    owners, shared_tmp_path, rank, shape, axis, parallel
):
    whole = numbers(shape)
    for number, writer in enumerate(owners):
        table, total, adam, checkpoint = make(writer, shape, axis, whole)
        step(writer, table, adam)
        path = str(shared_tmp_path / f"{number}.h5")
        checkpoint.write(path, parallel=parallel)
        if rank == 0:
            with open_checkpoint(path) as reader:
                reader.verify()
            with h5py.File(path) as file:
                stored = file["variables/table"][()]
                assert np.allclose(stored, whole - 0.5)
                assert (
                    file["variables/total"][()].tolist()
                    == (whole[0] * writer.num_replicas_in_sync).tolist()
                )
                slot = file["variables/adam/first_moment/table"][()]
                assert slot.shape == shape
                assert np.allclose(slot, 0.1)
                assert file.attrs["num_replicas"] == writer.num_replicas_in_sync
        for reader_of in owners:
            table, total, adam, checkpoint = make(reader_of, shape, axis, 0 * whole)
            checkpoint.restore(path).assert_consumed()
            assert np.allclose(table.numpy(), own_part(reader_of, whole - 0.5, axis))
            expected = own_part(reader_of, whole[0] * writer.num_replicas_in_sync, 0)
            assert np.allclose(total.numpy(), expected)
            slot = adam.slot(table, "first_moment")
            assert slot.shape == table.shape
            assert np.allclose(slot.numpy(), 0.1)


def test_state_is_saved_once_for_each_replica(owners, shared_tmp_path, rank):
    path = str(shared_tmp_path / "run.h5")
    for owner in owners:
        replica = owner.extended._layout.replica_id
        generator = np.random.default_rng(replica)
        checkpoint = ms.Checkpoint(generator=ms.PerReplicaState(generator))
        with owner.scope():
            checkpoint.write(path)
            expected = generator.integers(2**60)
            checkpoint.restore(path)
        assert generator.integers(2**60) == expected
