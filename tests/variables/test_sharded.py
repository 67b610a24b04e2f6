"""Sharded variables: rows, reads, lookups and writes, each as those of a mirrored one."""

import copy

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from mpistrat.partitioners import FixedShardsPartitioner, MaxSizePartitioner
from mpistrat.sharding import part_lengths
from tests.devices import array_equal, kind, placed, without_host_dtypes
from tests.helpers import as_bytes

Aggregation = ms.VariableAggregation
MERGING = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
DTYPES = ("?", "i1", "u8", "f2", "f4", "f8", "g", "c16")
SHAPES = [(13, 2), (2,), (1, 3), (5, 0), (6, 2, 2)]


@pytest.fixture
def cutting(strategy):
    """A strategy that cuts every variable into as many parts as it can."""
    made = ms.MPIStrategy(variable_partitioner=FixedShardsPartitioner(1000))
    yield made
    made.close()


def make(strategy, value, aggregation="SUM", **options):
    with strategy.scope():
        return ms.Variable(value, name="table", aggregation=Aggregation[aggregation], **options)


def numbers(shape, dtype="f8", seed=0):
    return np.random.default_rng(seed).integers(0, 50, shape).astype(dtype)


def own_rows(length, size, rank):
    stops = np.cumsum(part_lengths(length, max(1, min(length, size)))).tolist()
    starts = [0, *stops[:-1]]
    return range(starts[rank], stops[rank]) if rank < len(stops) else range(length, length)


@pytest.mark.thorough_product
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", without_host_dtypes(DTYPES))
def test_each_rank_holds_its_rows(cutting, rank, size, shape, dtype):
    whole = numbers(shape, dtype)
    table = make(cutting, whole)
    assert isinstance(table, ms.ShardedVariable if shape[0] > 1 else ms.Variable)
    if shape[0] == 1:
        assert not isinstance(table, ms.ShardedVariable)
        return
    assert (table.shape, table.dtype, table.size) == (shape, np.dtype(dtype), whole.size)
    assert table.row_range == own_rows(shape[0], size, rank)
    assert [len(rows) for rows in table.row_ranges] == part_lengths(shape[0], min(shape[0], size))
    assert len(table.devices) == len(table.row_ranges)
    assert array_equal(table.part, whole[table.row_range])
    assert kind() == "gpu" or not table.part.flags.writeable
    for value in (table.value(), table.numpy(), table.read_value(), np.asarray(table)):
        assert array_equal(value, whole)
        assert value.dtype == np.dtype(dtype)
    text = f"in {min(shape[0], size)} parts, rows {table.row_range.start}:{table.row_range.stop}"
    assert text in repr(table)
    assert (table.trainable, table.aggregation.name) == (True, "SUM")
    assert table.synchronization is ms.VariableSynchronization.ON_WRITE


def test_the_rows_of_rank_0_count(cutting, rank):
    table = make(cutting, np.full((7, 2), float(rank)))
    assert table.numpy().tolist() == [[0.0, 0.0]] * 7


class Rows:
    """An initial value that is made in parts."""

    def __init__(self):
        self.calls = []

    def __call__(self, partition_shape, partition_offset):
        self.calls.append((partition_shape, partition_offset))
        rows = np.arange(partition_shape[0]) + partition_offset[0]
        return np.broadcast_to(rows[:, None], partition_shape)


def test_an_initial_value_is_made_for_the_own_rows_alone(cutting, rank, size):
    rows = Rows()
    table = make(cutting, rows, shape=(5, 3), dtype="f4")
    own = own_rows(5, size, rank)
    assert rows.calls == [((len(own), 3), (own.start, 0))]
    assert table.numpy().tolist() == [[float(row)] * 3 for row in range(5)]
    few = Rows()
    narrow = make(cutting, few, shape=(2, 1), dtype="i8")
    assert len(few.calls) == (rank < 2)
    assert narrow.numpy().tolist() == [[0], [1]]


def test_an_initial_value_in_parts_is_whole_where_nothing_is_cut(strategy):
    for owner in (strategy, ms.get_strategy()):
        rows = Rows()
        table = make(owner, rows, shape=(4, 2), dtype="f4")
        assert rows.calls == [((4, 2), (0, 0))]
        assert table.numpy()[:, 0].tolist() == [0, 1, 2, 3]
        assert table.row_range == range(4)
        assert table.part.shape == (4, 2)
        assert table.lookup([[3, 0]])[..., 0].tolist() == [[3, 0]]


def one_row(partition_shape, partition_offset):
    return np.zeros(1)


def test_a_shape_must_be_that_of_the_value(cutting):
    with pytest.raises(ValueError, match=r"shape \(3, 2\), but \(4, 2\) was asked for"):
        make(cutting, np.zeros((3, 2)), shape=(4, 2))
    with pytest.raises(ValueError, match="was asked for"):
        make(
            cutting,
            lambda partition_shape, partition_offset: np.zeros(1),
            shape=(9, 2),
            dtype=float,
        )
    with pytest.raises(TypeError, match="dtype"):
        make(cutting, Rows(), shape=(9, 2))
    assert make(cutting, np.zeros((3, 2)), shape=(3, 2)).shape == (3, 2)


INDICES = [
    *[np.index_exp[0], np.index_exp[-1], np.index_exp[1:4], np.index_exp[::2], np.index_exp[::-1]],
    *[np.index_exp[4:0:-2], np.index_exp[5:], np.index_exp[9:2], np.index_exp[1:4, 1]],
    *[np.index_exp[..., 0], np.index_exp[None], np.index_exp[3, 1], np.index_exp[[4, 0, -3]]],
    *[np.index_exp[np.array([[1, 2], [0, 0]]), 1], np.index_exp[[1, 2], [0, 1]], ()],
    *[
        np.index_exp[np.arange(13) % 3 == 0],
        np.index_exp[np.zeros(0, int)],
        np.index_exp[5, ..., 0],
    ],
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indices_are_those_of_numpy(cutting, index):
    whole = numbers((13, 2))
    table = make(cutting, whole)
    given = index[0] if len(index) == 1 else index
    expected = whole[given]
    found = table[given]
    assert array_equal(found, expected)
    assert np.shape(found) == expected.shape
    there = tuple(map(placed, index))
    assert array_equal(table[there[0] if len(there) == 1 else there], expected)
    assert array_equal(table[whole > 20], whole[whole > 20])


def test_indices_that_do_not_exist(cutting):
    table = make(cutting, np.zeros((5, 2)))
    for index in (5, -6, [0, 7]):
        with pytest.raises(IndexError):
            table[index]
    with pytest.raises(ValueError, match="zero"):
        table[::0]
    assert table[4].tolist() == [0, 0]


def test_operators_work_on_the_whole(cutting):
    whole = numbers((6, 3))
    table = make(cutting, whole)
    assert array_equal(table + 1, whole + 1)
    assert array_equal(table * table, whole * whole)
    assert array_equal(table @ placed(np.ones(3)), whole.sum(1))
    assert len(table) == 6
    with pytest.raises(TypeError, match="copied shallowly"):
        copy.copy(table)


@pytest.mark.parametrize("dtype", [int, np.uint8, np.int32])
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)], ids=str)
def test_lookup_keeps_order_and_duplicates(cutting, rank, size, shape, dtype):
    whole = numbers((9, 2))
    table = make(cutting, whole)
    ids = np.random.default_rng(rank).integers(0, 9, shape).astype(dtype)
    in_replica_context = cutting.run(lambda: table.lookup(ids)).values[0]
    for found in (table.lookup(ids), in_replica_context):
        assert found.tolist() == whole[ids].tolist()
    table.lookup(ids)[...] = 0  # in memory of its own
    assert array_equal(table.value(), whole)


def test_some_ranks_may_ask_for_nothing(cutting, rank, size):
    whole = numbers((9, 2))
    table = make(cutting, whole)
    ids = [8, 0] if rank == size - 1 else []
    assert table.lookup(ids).tolist() == whole[np.array(ids, int)].tolist()


@pytest.mark.parametrize("ids", [[9], [-1], [0, 10**12]], ids=str)
def test_ids_that_do_not_exist_on_all_ranks(cutting, ids):
    table = make(cutting, numbers((9, 2)))
    with pytest.raises(IndexError, match="9 rows"):
        table.lookup(ids)
    with pytest.raises(TypeError, match="integers"):
        table.lookup(np.zeros(2))
    assert table.lookup([0]).shape == (1, 2)


def test_an_id_that_does_not_exist_on_one_rank(cutting, rank, size):
    if size == 1:
        pytest.skip("needs two ranks that can disagree")
    table = make(cutting, numbers((9, 2)))
    ids, error = ([9], IndexError) if rank == 1 else ([0], CollectiveMismatchError)
    with pytest.raises(error, match="9 rows" if rank == 1 else "rank 1"):
        table.lookup(ids)


def both(cutting, strategy, value, aggregation):
    return make(cutting, value, aggregation), make(strategy, value, aggregation)


@pytest.mark.parametrize("aggregation", MERGING)
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_dense_writes_equal_those_of_a_mirrored_variable(
    cutting, strategy, rank, aggregation, method
):
    tables = both(cutting, strategy, numbers((7, 3)), aggregation)
    given = np.random.default_rng(rank).random((7, 3))
    for table in tables:
        table.strategy.run(lambda t=table: getattr(t, method)(given))
        getattr(table, method)(np.ones((7, 3)), read_value=False)
    assert as_bytes(tables[0]) == as_bytes(tables[1])
    assert tables[0].assign(given * 0) is tables[0]
    assert tables[0].assign_add(given * 0, read_value=False) is None


SCATTERS = ["add", "sub", "mul", "div", "min", "max", "update"]


@pytest.mark.thorough_product
@pytest.mark.parametrize("aggregation", MERGING)
@pytest.mark.parametrize("method", SCATTERS)
def test_scatters_equal_those_of_a_mirrored_variable(
    cutting, strategy, rank, size, aggregation, method
):
    if method in ("min", "max", "update") and aggregation != "ONLY_FIRST_REPLICA":
        pytest.skip("refused by both")
    generator = np.random.default_rng(rank)
    tables = both(cutting, strategy, numbers((7, 3)) + 1.0, aggregation)
    ids = generator.integers(0, 7, 2 * rank)  # none on rank 0
    slices = ms.IndexedSlices(generator.random((ids.size, 3)), ids)
    equal = ms.IndexedSlices(np.full((3, 3), 0.7), [6, 0, 6])
    for table in tables:
        write = getattr(table, f"scatter_{method}")
        table.strategy.run(lambda write=write: write(slices))
        write(equal)
        table.strategy.run(lambda write=write: write(equal))
    assert as_bytes(tables[0]) == as_bytes(tables[1])


def test_batches_of_rows(cutting, strategy):
    tables = both(cutting, strategy, numbers((5, 4, 2)), "ONLY_FIRST_REPLICA")
    slices = ms.IndexedSlices(np.arange(20.0).reshape(5, 2, 2), np.arange(10).reshape(5, 2) % 4)
    for table in tables:
        table.batch_scatter_update(slices)
        table.strategy.run(lambda t=table: t.batch_scatter_update(slices))
    assert as_bytes(tables[0]) == as_bytes(tables[1])


@pytest.mark.parametrize("rows", [4, 6])
def test_a_value_of_another_length_is_refused(cutting, rows):
    table = make(cutting, numbers((5, 2)))
    before = table.numpy()
    for shape in ((rows, 2), (5, 3)):
        with pytest.raises(ValueError, match="the variable"):
            table.assign(np.zeros(shape))
    for index in (5, -1):
        with pytest.raises(IndexError, match="5 rows"):
            table.scatter_add(ms.IndexedSlices(np.zeros((1, 2)), [index]))
    assert as_bytes(table) == as_bytes(before)


def test_a_write_in_replica_context_needs_an_aggregation(cutting):
    table = make(cutting, np.zeros((5, 2)), "NONE")
    with pytest.raises(ValueError, match="sharded variable 'table' in replica context"):
        cutting.run(lambda: table.assign(np.zeros((5, 2))))
    with pytest.raises(ValueError, match="not a PerReplica"):
        table.assign(ms.PerReplica(np.zeros((5, 2))))


def test_update_is_called_on_every_rank_with_its_rows(cutting, rank, size):
    table = make(cutting, np.zeros((3, 2)))
    seen = []

    def fn(variable, whole):
        seen.append(variable.part.shape)
        variable.assign_add(np.full_like(variable.part, rank))
        variable.assign_add(whole)
        variable.scatter_add(ms.IndexedSlices(np.ones((1, 2)), [2]))

    cutting.extended.update(table, fn, args=(np.full((3, 2), 10.0),))
    assert seen == [(len(own_rows(3, size, rank)), 2)]
    expected = [[10.0 + owner] * 2 for owner in range(size) for _ in own_rows(3, size, owner)]
    expected[2] = [number + 1 for number in expected[2]]
    assert table.numpy().tolist() == expected


def test_the_whole_is_not_gathered_above_the_limit(cutting, monkeypatch):
    monkeypatch.setenv("MPISTRAT_GATHER_LIMIT", "79")
    table = make(cutting, numbers((5, 2)))
    for read in (table.value, table.numpy, lambda: table + 1, lambda: table[..., 0]):
        with pytest.raises(ValueError, match=r"MPISTRAT_GATHER_LIMIT(?s:.)*lookup(?s:.)*part"):
            read()
    assert table[1:3].shape == (2, 2)
    monkeypatch.setenv("MPISTRAT_GATHER_LIMIT", "80")
    assert table.value().shape == (5, 2)


def test_what_is_never_cut(cutting):
    assert not isinstance(make(cutting, 1.0), ms.ShardedVariable)
    on_read = make(cutting, np.zeros(5), synchronization=ms.VariableSynchronization.ON_READ)
    assert not isinstance(on_read, ms.ShardedVariable)
    none = make(cutting, np.zeros((0, 3)))
    assert none.numpy().shape == none.lookup([]).shape == (0, 3)


@pytest.mark.parametrize("answer", [None, [], [0, 1], [2, 2], [1, 2], 2, [2.0, 1]], ids=str)
def test_what_a_partitioner_may_not_answer(strategy, answer):
    odd = ms.MPIStrategy(variable_partitioner=lambda shape, dtype: answer)
    with pytest.raises((ValueError, TypeError), match="partitioner"):
        make(odd, np.zeros((4, 4)))
    assert odd.reduce("sum", 1) == odd.size
    odd.close()


@pytest.mark.parametrize("answer", [(2, 1), [100, 1]], ids=str)
def test_what_a_partitioner_may_answer(strategy, size, answer):
    fine = ms.MPIStrategy(variable_partitioner=lambda shape, dtype: answer)
    table = make(fine, np.zeros((4, 4)))
    assert len(table.row_ranges) == min(answer[0], 4, size)
    fine.close()


def test_a_partitioner_must_be_callable(strategy):
    with pytest.raises(TypeError, match='variable_partitioner must be "ranks" or a callable'):
        ms.MPIStrategy(variable_partitioner=4)


def test_ranks_whose_partitioners_differ(rank, size):
    if size == 1:
        pytest.skip("needs two ranks that can disagree")
    odd = ms.MPIStrategy(variable_partitioner=FixedShardsPartitioner(1 + rank % 2))
    with pytest.raises(CollectiveMismatchError, match="2 parts"):
        make(odd, np.zeros((4, 4)))


def test_a_partitioner_decides_by_size(strategy, size):
    by_size = ms.MPIStrategy(variable_partitioner=MaxSizePartitioner(8 * 12, max_shards=3))
    small, large = make(by_size, np.zeros((4, 3))), make(by_size, np.zeros((9, 3)))
    assert not isinstance(small, ms.ShardedVariable)
    assert len(large.row_ranges) == min(3, size)
    by_size.close()


def test_it_is_not_compared_for_drift(cutting):
    table, bias = make(cutting, numbers((5, 2))), make(cutting, 0.0)
    with cutting.scope():
        sgd = ms.optimizers.SGD(0.1, momentum=0.9)
    sgd.apply_gradients([(np.ones((5, 2)), table), (1.0, bias)])
    cutting.extended.assert_replicas_agree([sgd, bias])
    with pytest.raises(ValueError, match="nothing to compare"):
        cutting.extended.assert_replicas_agree(table)


OPTIMIZERS = {
    "adam": lambda: ms.optimizers.Adam(0.1, global_clipnorm=1.0, weight_decay=0.01),
    "momentum": lambda: ms.optimizers.SGD(0.1, momentum=0.9),
    "plain": lambda: ms.optimizers.SGD(0.1),
    "scaled": lambda: ms.optimizers.Adam(0.1, loss_scale=ms.optimizers.LossScale(8.0)),
}


@pytest.mark.filterwarnings("ignore:No gradient")
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_take_the_steps_of_mirrored_variables(
    cutting, strategy, rank, make_optimizer, dtype
):
    found = []
    for owner in (cutting, strategy):
        table = make(owner, numbers((7, 3), dtype))
        bias = make(owner, np.zeros(2), "NONE")
        with owner.scope():
            optimizer = make_optimizer()
        generator = np.random.default_rng(rank)
        for number in range(5):
            gradient = generator.random((7, 3)).astype(dtype)
            if number % 2:
                rows = generator.integers(0, 7, rank + 1)
                gradient = ms.IndexedSlices(gradient[rows], rows)
            given = [(gradient if number < 4 else None, table), (np.ones(2), bias)]
            owner.run(optimizer.apply_gradients, args=(given,))
        optimizer.apply_gradients([(np.ones((7, 3), dtype), table)])
        slots = [each.child for each in optimizer._checkpoint_dependents() if each.of is table]
        assert all(type(slot) is type(table) for slot in slots)
        found.append([as_bytes(each) for each in (table, bias, *slots)])
    assert found[0] == found[1]


def test_slots_take_as_much_memory_as_the_own_rows(cutting, rank, size):
    table = make(cutting, np.zeros((6, 4)))
    with cutting.scope():
        adam = ms.optimizers.Adam(0.1)
    cutting.run(adam.apply_gradients, args=([(np.ones((6, 4)), table)],))
    slots = [each.child for each in adam._checkpoint_dependents() if each.of is table]
    shape = (len(own_rows(6, size, rank)), 4)
    assert [slot.part.shape for slot in slots] == [shape] * 2


def test_partitioners_that_differ_are_found_where_the_parts_do_not(size, rank):
    if size == 1:
        pytest.skip("needs two ranks that can disagree")
    num_parts = size if rank == 0 else size + 1
    partitioner = FixedShardsPartitioner(num_parts)
    strategy = ms.MPIStrategy(device=kind(), variable_partitioner=partitioner)
    with (
        strategy.scope(),
        pytest.raises(CollectiveMismatchError, match=f"of {size + 1} wanted"),
    ):
        ms.Variable(np.zeros((3 * size, 2)), name="table")
    strategy.close()
