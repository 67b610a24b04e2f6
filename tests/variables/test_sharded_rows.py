"""Sharded variables as objects of a program: what they are beside arrays, and who is asked."""

import copy

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.partitioners import FixedShardsPartitioner, MinSizePartitioner
from mpistrat.variables.row_exchange import Partition
from tests.devices import array_equal, assert_allclose
from tests.helpers import as_bytes

SUM = ms.VariableAggregation.SUM


def cutting_by(partitioner):
    return ms.MPIStrategy(variable_partitioner=partitioner)


@pytest.fixture
def cutting(strategy):
    made = cutting_by(FixedShardsPartitioner(1000))
    yield made
    made.close()


@pytest.fixture
def table(cutting):
    with cutting.scope():
        return ms.Variable(np.arange(10.0).reshape(5, 2), name="table", aggregation=SUM)


class Asking:
    """A partitioner that notes what it is asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, shape, dtype):
        self.asked.append((tuple(shape), np.dtype(dtype).name))
        return [2, *[1] * (len(shape) - 1)]


PARTS = [  # shape, partitioner, rows of the parts where there are ranks enough
    ((3, 2), FixedShardsPartitioner(4), [1, 1, 1]),
    ((4,), MinSizePartitioner(1 << 10, 100), [4]),
    ((13, 7), MinSizePartitioner(100, 5), [3, 3, 3, 2, 2]),
    ((5, 2), FixedShardsPartitioner(1), [5]),
]


@pytest.mark.parametrize(("shape", "partitioner", "rows"), PARTS, ids=str)
def test_rows_of_parts(strategy, size, shape, partitioner, rows):
    owner = cutting_by(partitioner)
    with owner.scope():
        made = ms.Variable(np.zeros(shape))
    is_sharded = isinstance(made, ms.ShardedVariable)
    assert is_sharded == (len(rows) > 1)
    if is_sharded:
        found = [len(each) for each in made.row_ranges]
        assert found == (rows if len(rows) <= size else found)
        assert len(found) == min(len(rows), size)
        assert sum(found) == shape[0]
        assert max(found) - min(found) <= 1
        assert found == sorted(found, reverse=True)
    owner.close()


def test_who_is_asked(strategy, size):
    asking = Asking()
    owner = cutting_by(asking)
    on_read = ms.VariableSynchronization.ON_READ
    with owner.scope():
        table = ms.Variable(np.zeros((5, 3), "f4"))
        made = ms.Variable(
            lambda partition_shape, partition_offset: np.zeros(partition_shape),
            shape=(4, 1, 2),
            dtype="i2",
        )
        ms.Variable(1.0)
        ms.Variable(lambda: np.float32(2))
        ms.Variable(np.zeros(3), synchronization=on_read)
        adam = ms.optimizers.Adam(0.1)
        ms.metrics.Mean()
    owner.run(adam.apply_gradients, args=([(np.ones((5, 3), "f4"), table)],))
    assert asking.asked == [((5, 3), "float32"), ((4, 1, 2), "int16")]
    assert isinstance(made, ms.ShardedVariable)
    slot = adam.slot(table, "first_moment")
    assert slot.row_ranges == table.row_ranges  # also at one rank, where the class is the same
    assert isinstance(slot, ms.ShardedVariable)
    owner.close()


def test_it_is_a_variable_with_all_that_others_have(table, strategy, cutting, rank, size):
    assert isinstance(table, ms.Variable)
    assert (table.trainable, table.aggregation, table.name) == (True, SUM, "table")
    assert table.strategy is cutting
    devices = cutting.extended.worker_devices
    assert table.device == devices[rank]
    assert table.devices == devices[: min(5, size)]
    with strategy.scope():
        mirrored = ms.Variable(np.zeros(3))
    assert mirrored.device == devices[rank]
    assert ms.Variable(0.0).device == "/job:worker/replica:0/task:0/device:CPU:0"
    with pytest.raises(TypeError, match="hashable"):
        hash(table)
    with pytest.raises(TypeError, match="not iterable"):
        iter(table)
    for parts in (np.zeros((5, 2)), [np.zeros((2, 2)), np.zeros((3, 2))]):
        with pytest.raises(TypeError, match=r"Call ms\.Variable"), cutting.scope():
            ms.ShardedVariable(parts)


def test_it_is_one_variable_of_a_model_as_argument_and_as_result(table, cutting, shared_tmp_path):
    assert cutting.run(lambda v: v, args=(table,)) is table
    (inside,) = cutting.run(lambda nest: nest, args=([table],))
    assert inside is table

    def merge(strategy, variable):
        assert variable is table
        return variable.assign_add(np.ones((5, 2)))

    assert cutting.run(lambda: ms.get_replica_context().merge_call(merge, args=(table,))) is table
    path = ms.Checkpoint(model={"table": table, "list": [table]}).write(shared_tmp_path / "m.h5")
    twin = copy.deepcopy(table)
    twin.assign(np.zeros((5, 2)))
    ms.Checkpoint(model={"table": twin}).restore(path).expect_partial()
    assert as_bytes(twin) == as_bytes(table)


def test_reductions_take_it_as_one_mirrored_value(table, cutting, size):
    whole = table.numpy()
    for op in ("mean", "MIN", ms.ReduceOp.MAX):
        assert array_equal(cutting.reduce(op, table), whole)
    nest = cutting.reduce("mean", {"table": table, "one": [1.0]})
    assert array_equal(nest["table"], whole)
    assert nest["one"] == [1.0]
    assert_allclose(cutting.reduce("mean", table, axis=0), whole.mean(axis=0))
    mirrored = cutting.extended.reduce_to("mean", table, "cpu:0")
    assert array_equal(mirrored, whole)
    with cutting.scope():
        assert array_equal(cutting.extended.read_var(table), whole)
    for op in ("sum", "prod"):
        with pytest.raises(ValueError, match="once per replica"):
            cutting.reduce(op, table)
    assert cutting.reduce("sum", 1.0) == size


def test_other_collectives_ask_which_rows_are_meant(table, cutting, size):
    calls = [
        lambda: cutting.gather(table, 0),
        lambda: cutting.run(lambda: ms.get_replica_context().all_reduce("sum", table)),
        lambda: cutting.run(lambda: ms.get_replica_context().all_gather([table], 0)),
        lambda: cutting.run(lambda: ms.get_replica_context().shift(table)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"value\(\)(.|\n)*part"):
            call()
    gathered = cutting.gather(table.part, 0)
    assert array_equal(gathered, table.numpy())


def test_the_last_of_two_updates_of_a_row_wins(cutting):
    with cutting.scope():
        table = ms.Variable(np.zeros((5, 2)), name="table")
    rows = ms.IndexedSlices(np.array([[1.0, 1.0], [2.0, 2.0]]), [3, 3])
    assert table.scatter_update(rows) is table
    assert table[3].tolist() == [2.0, 2.0]


IDS = [[2**31], [-(2**31)], [2**63 - 1], np.array([2**64 - 1], np.uint64), [2**70], ["0"], [None]]


@pytest.mark.parametrize("ids", IDS, ids=str)
def test_ids_that_are_no_rows(table, ids):
    before = table.numpy()
    with pytest.raises((IndexError, TypeError)):
        table.lookup(ids)
    assert as_bytes(table) == as_bytes(before)


@pytest.mark.parametrize("dtype", ["i1", ">i4", "u2", ">u8"])
def test_ids_of_any_kind_of_integer(table, dtype):
    assert table.lookup(np.array([[4], [0]], dtype)).tolist() == [[[8, 9]], [[0, 1]]]


@pytest.mark.parametrize("dtype", [">f4", ">i8"])
def test_foreign_byte_orders_become_native(cutting, dtype):
    native = np.dtype(dtype).newbyteorder("=")

    def twos(partition_shape, partition_offset):
        return np.full(partition_shape, 2, dtype)

    with cutting.scope():
        made = [
            ms.Variable(np.full((2, 2), 2, dtype)),
            ms.Variable(twos, shape=(2, 2), dtype=dtype),  # some ranks hold none
        ]
    for variable in made:
        assert variable.dtype == variable.part.dtype == native
        variable.assign_add(np.ones((2, 2), dtype))
        assert variable.numpy().tolist() == [[3, 3], [3, 3]]


def test_after_close_the_own_rows_can_be_read(strategy, shared_tmp_path):
    owner = cutting_by(FixedShardsPartitioner(9))
    with owner.scope():
        table = ms.Variable(np.ones((5, 2)), name="table", aggregation=SUM)
        adam = ms.optimizers.Adam(0.1)
    gradient = np.ones((5, 2))
    owner.run(adam.apply_gradients, args=([(gradient, table)],))
    own = table.part.copy()
    checkpoint = ms.Checkpoint(table=table)
    owner.close()
    assert array_equal(table.part, own)
    assert "table" in repr(table)
    refused = [
        table.value,
        table.numpy,
        lambda: table[0],
        lambda: table + 1,
        lambda: table.lookup([0]),
        lambda: table.assign(gradient),
        lambda: table.scatter_add(ms.IndexedSlices(gradient, np.arange(5))),
        lambda: adam.apply_gradients([(gradient, table)]),
        lambda: checkpoint.write(shared_tmp_path / "closed.h5"),
        lambda: checkpoint.write(shared_tmp_path / "closed.h5", parallel=True),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(RuntimeError, match=r"MPIStrategy(.|\n)*close\(\)"):
            call()
            pytest.fail(f"number {number} was not refused")
    assert array_equal(table.part, own)
    assert not hasattr(owner, "__enter__")  # scope() is the context manager


MANY = 2**31 + 5
"""Rows, of which none has any bytes."""


def test_more_rows_than_an_int_counts(cutting, size):
    with cutting.scope():
        table = ms.Variable(np.zeros((MANY, 0)), name="many", aggregation=SUM)
    assert len(table) == MANY
    assert table.row_ranges[-1].stop == MANY
    ids = [MANY - 1, 0, 2**31, 2**31 - 1]
    assert table.lookup(ids).shape == (4, 0)
    assert table[MANY - 2 : MANY].shape == (2, 0)
    assert table[-1].shape == (0,)
    assert table.scatter_add(ms.IndexedSlices(np.zeros((4, 0)), ids)) is table
    cutting.run(lambda: table.scatter_add(ms.IndexedSlices(np.zeros((4, 0)), ids)))
    for row in (MANY, 2**32, -1):
        with pytest.raises(IndexError, match=str(MANY)):
            table.lookup([row])
        with pytest.raises(IndexError, match=str(MANY)):
            table.scatter_add(ms.IndexedSlices(np.zeros((1, 0)), [row]))


@pytest.mark.parametrize("num_rows", [1, 2**31 + 5, 2**40 + 1])
@pytest.mark.parametrize("num_parts", [1, 3, 4])
def test_owners_of_many_rows(num_rows, num_parts):
    partition = Partition(num_rows, min(num_parts, num_rows), 5)
    ids = np.unique([each.start for each in partition.ranges] + [num_rows - 1, num_rows // 2])
    ids = ids[ids < num_rows]
    for row, owner in zip(ids.tolist(), partition.owners(ids).tolist(), strict=True):
        assert row in partition.ranges[owner]
    assert sum(partition.counts(3)) == 3 * num_rows


def test_a_table_of_no_rows(cutting, strategy, shared_tmp_path, rank):
    made = []
    for owner in (cutting, strategy):
        with owner.scope():
            table = ms.Variable(np.zeros((0, 3), "f4"), name="table", aggregation=SUM)
            adam = ms.optimizers.Adam(0.1)
        rows = ms.IndexedSlices(np.zeros((0, 3), "f4"), np.zeros(0, int))
        owner.run(adam.apply_gradients, args=([(rows, table)],))
        owner.run(table.scatter_add, args=(rows,))
        table.assign(np.zeros((0, 3), "f4"))
        assert table.lookup(np.zeros((2, 0), int)).shape == (2, 0, 3)
        with pytest.raises(IndexError, match="0 rows"):
            table.lookup([0])
        made.append(ms.Checkpoint(table=table, adam=adam))
    for parallel in (False, True):
        path = made[0].write(shared_tmp_path / "none.h5", parallel=parallel)
        for each in made:
            each.restore(path).assert_consumed()
