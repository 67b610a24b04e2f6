import copy
import operator
import pickle

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import pieces
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.comm import mpi_transport
from tests import devices
from tests.devices import assert_allclose, assert_array_equal, placed, shares_memory
from tests.helpers import triangle

Aggregation = ms.VariableAggregation
ON_READ = ms.VariableSynchronization.ON_READ


def make(strategy, aggregation, value=2.0, on_read=False, **options):
    if on_read:
        options["synchronization"] = ON_READ
    with strategy.scope():
        return ms.Variable(value, aggregation=aggregation, **options)


def test_rank_0_s_initial_value_reaches_all(strategy, rank):
    variable = make(strategy, Aggregation.NONE, lambda: np.full(3, rank, np.float32), name="w")
    assert variable.numpy().tolist() == [0, 0, 0]
    assert (variable.name, variable.shape, variable.dtype) == ("w", (3,), np.float32)
    assert variable.trainable
    assert not make(strategy, Aggregation.SUM, on_read=True).trainable
    assert variable.strategy is strategy
    assert isinstance(variable, ms.Variable)


def test_a_function_for_the_initial_value_may_make_collectives(strategy, rank, size):
    inner = make(strategy, Aggregation.NONE, lambda: strategy.reduce("sum", rank))
    assert inner.numpy() == triangle(size)
    nested = make(strategy, Aggregation.NONE, lambda: inner + make(strategy, Aggregation.NONE))
    assert nested.numpy() == triangle(size) + 2
    on_read = make(strategy, Aggregation.SUM, 1.0, on_read=True)
    assert make(strategy, Aggregation.NONE, on_read).numpy() == size


def test_a_function_for_the_initial_value_that_fails_on_one_rank(strategy, others):
    def fail():
        raise OSError("no such model")

    expected = ms.errors.CollectiveMismatchError if others else OSError
    with pytest.raises(expected, match="no such model"):
        make(strategy, Aggregation.NONE, 1.0 if others else fail, name="w")


def test_default_names_are_unique_and_equal_on_all_ranks(strategy):
    first, second = make(strategy, Aggregation.NONE), make(strategy, Aggregation.NONE)
    assert first.name != second.name
    names = strategy.extended._collectives.gather_json([first.name, second.name])
    assert all(each == names[0] for each in names)


def test_default_names_leave_out_those_that_were_given(strategy):
    names = [make(strategy, Aggregation.NONE, name=name).name for name in ("Variable_1", None)]
    names += [make(strategy, Aggregation.NONE).name for _ in range(3)]
    assert names == ["Variable_1", "Variable", "Variable_2", "Variable_3", "Variable_4"]
    plain = [ms.Variable(0.0).name for _ in range(2)]
    following = f"Variable_{int(plain[1].rpartition('_')[2]) + 1}"
    ms.Variable(0.0, name=following)
    assert ms.Variable(0.0).name not in (*plain, following)


def test_ranks_must_agree_when_they_make_a_variable(strategy, others, size):
    with pytest.raises(ms.errors.CollectiveMismatchError, match="Variable of 'w'"):
        make(strategy, Aggregation.NONE, np.zeros(2 if others else 3), name="w")


@pytest.mark.parametrize(
    "options",
    [
        {"name": "v"},
        {"dtype": np.float32},
        {"aggregation": Aggregation.SUM},
        {"synchronization": ON_READ},
        {"trainable": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ranks_must_agree_on_all_that_a_variable_is(strategy, others, options):
    usual = {"name": "w", "dtype": np.float64, "aggregation": Aggregation.NONE, "trainable": True}
    with (
        strategy.scope(),
        pytest.raises(ms.errors.CollectiveMismatchError, match="Variable of 'w'"),
    ):
        ms.Variable(np.zeros(2), **usual | (options if others else {}))


def test_a_variable_on_one_rank_alone_is_an_error_on_all(strategy, others):
    with pytest.raises(ms.errors.CollectiveMismatchError, match="Variable of 'w'"):
        if others:
            make(strategy, Aggregation.NONE, name="w")
        else:
            strategy.reduce("sum", 1)


def test_a_bad_initial_value_on_one_rank_is_an_error_on_all(strategy, others):
    with pytest.raises(ms.errors.CollectiveMismatchError if others else ValueError, match="dtype"):
        make(strategy, Aggregation.NONE, 1.0 if others else "text", name="w")


@pytest.mark.parametrize("in_run", [False, True], ids=["cross_replica", "replica"])
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_a_bad_value_on_one_rank_changes_nothing_on_any(strategy, others, method, in_run):
    variable = make(strategy, Aggregation.SUM, np.zeros(2), name="w")
    value = np.ones(2 if others else 3)

    def write():
        getattr(variable, method)(value)

    error = ms.errors.CollectiveMismatchError if others else ValueError
    with pytest.raises(error, match=f"{method}.*'w'"):
        strategy.run(write) if in_run else write()
    assert variable.values[0].tolist() == [0, 0]


def test_sync_on_read_sum(strategy, rank, size):
    variable = make(strategy, Aggregation.SUM, 2, on_read=True)
    assert variable.numpy() == 2 * size, "the initial value is not divided"
    for total in (7, -5, 0):
        assert variable.assign(total) == total
        own = total // size + (rank < total % size)
        assert strategy.experimental_local_results(variable)[0] == own
    with pytest.raises(ValueError, match="SUM has no meaning"):
        variable.assign_add(1)
    with pytest.raises(ValueError, match="PerReplica"):
        variable.assign(ms.PerReplica(1))
    halves = make(strategy, Aggregation.SUM, 1.0, on_read=True)
    assert float(halves.assign(3.0)) == pytest.approx(3.0)


@pytest.mark.host_memory
def test_views_and_snapshots(strategy):
    variable = make(strategy, Aggregation.NONE, np.zeros(2))
    view, array, snapshot, host = (
        variable.value(),
        np.asarray(variable),
        variable.read_value(),
        variable.numpy(),
    )
    variable.assign(np.ones(2))
    assert view.tolist() == array.tolist() == [1, 1]
    assert snapshot.tolist() == host.tolist() == [0, 0]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 3
    given = np.full(2, 7.0)
    variable.assign(given)
    given[:] = 0
    assert variable.numpy().tolist() == [7, 7]


UNARY = [operator.neg, operator.pos, operator.abs]
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    divmod,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]


def assert_same(variable, result, expected):
    """Equal in value, dtype and shape, and in separate memory that may be written to."""
    if isinstance(expected, tuple):
        for pair in zip(result, expected, strict=True):
            assert_same(variable, *pair)
        return
    if devices.kind() == "gpu" and np.dtype(expected.dtype).kind in "fc":
        # A GPU's own functions, such as pow, may round the last bits otherwise.
        assert_allclose(result, expected, rtol=4 * np.finfo(expected.dtype).eps)
    else:
        assert_array_equal(result, expected)
    assert result.dtype == expected.dtype
    assert not shares_memory(result, variable.values[0])
    assert not isinstance(result, np.ndarray) or result.flags.writeable


@pytest.mark.parametrize("on_read", [False, True], ids=["mirrored", "sync_on_read"])
@pytest.mark.parametrize("dtype", ["f4", "i4", "c8", "u1"])
def test_operators_are_those_of_numpy(strategy, dtype, on_read):
    array = np.array([[1, 2], [3, 5]], dtype)
    variable = make(strategy, Aggregation.ONLY_FIRST_REPLICA, array, on_read)
    for unary in UNARY:
        assert_same(variable, unary(variable), unary(array))
    others = [2, np.float64(2.5), array[0], array.astype(np.result_type(array, "f8")), variable]
    for binary in BINARY:
        if dtype == "c8" and binary in (operator.floordiv, operator.mod, divmod):
            continue
        for other in others:
            there = array if other is variable else other
            operand = placed(other)
            assert_same(variable, binary(variable, operand), binary(array, there))
            assert_same(variable, binary(operand, variable), binary(there, array))
    if np.dtype(dtype).kind in "iu":
        assert_same(variable, ~variable, ~array)
        for bitwise in BITWISE:
            assert_same(variable, bitwise(variable, 1), bitwise(array, 1))
            assert_same(variable, bitwise(placed(array), variable), bitwise(array, array))
    assert_same(variable, variable @ variable, array @ array)
    assert_same(variable, placed(array[0]) @ variable, array[0] @ array)
    assert_same(variable, variable @ placed(array[0]), array @ array[0])
    xp = strategy.extended.xp
    for name in ("sqrt", "sum", "isfinite"):
        assert_same(variable, getattr(xp, name)(variable), getattr(np, name)(array))
    assert_same(variable, xp.where(variable > 2, variable, 0), np.where(array > 2, array, 0))
    if devices.kind() == "cpu":
        assert_same(variable, np.add.reduce(variable), np.add.reduce(array))


def test_a_sync_on_read_operand_is_aggregated_across_replicas(strategy, rank, size):
    variable = make(strategy, Aggregation.SUM, on_read=True)
    (local,) = strategy.run(lambda: variable.assign(float(rank)) * 2).values
    assert local == 2 * rank
    assert variable * 2 == 2 * triangle(size)
    assert (1 - variable) == 1 - triangle(size)


def test_what_a_variable_is_not(strategy):
    variable = make(strategy, Aggregation.NONE, np.array([1.0, 4.0], np.float32))
    assert variable[1] == 4
    assert len(variable) == 2
    for write in (
        lambda: operator.iadd(variable, 1),
        lambda: np.add(variable, 1, out=variable),
    ):
        with pytest.raises(TypeError, match="assign_add"):
            write()
    with pytest.raises(TypeError):
        variable[0] = 1
    with pytest.raises(TypeError, match="not iterable"):
        iter(variable)
    with pytest.raises(TypeError):
        hash(variable)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(variable)
    with pytest.raises(TypeError, match="0-d"):
        len(make(strategy, Aggregation.NONE, 3))
    assert variable.numpy().tolist() == [1, 4]


def test_0_d_variables_are_numbers(strategy):
    scalar = make(strategy, Aggregation.NONE, 3)
    assert (float(scalar), int(scalar), complex(scalar), bool(scalar)) == (3.0, 3, 3 + 0j, True)
    assert list(range(scalar)) == [0, 1, 2]
    with pytest.raises(TypeError):
        range(make(strategy, Aggregation.NONE, 3.0))


@pytest.mark.parametrize("on_read", [False, True], ids=["mirrored", "sync_on_read"])
@pytest.mark.host_memory
def test_what_is_read_is_no_view_but_where_it_says_so(strategy, on_read):
    variable = make(strategy, Aggregation.ONLY_FIRST_REPLICA, np.zeros((2, 3)), on_read)

    def check():
        snapshots = (
            variable.numpy(),
            variable.read_value(),
            variable[0],
            variable[:, 1:],
            variable[...],
            variable[np.array([1])],
            np.array(variable),
        )
        for each in snapshots:
            assert not np.shares_memory(each, variable.values[0])
            each[...] = 7
        assert not variable.value().any()
        for view in (variable.values[0], variable.assign(np.zeros((2, 3)))):
            if np.shares_memory(view, variable.values[0]):
                with pytest.raises(ValueError, match="read-only"):
                    view[...] = 7

    check()
    strategy.run(check)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (5, 7)])
@pytest.mark.parametrize("bytes_per_piece", [1, 8, 24, 10**9])
def test_pieces_cover_an_array(shape, bytes_per_piece):
    array = np.zeros(shape)
    for number, piece in enumerate(pieces(array, bytes_per_piece)):
        assert 8 <= piece.nbytes <= max(8, bytes_per_piece)
        piece += number + 1
    flat = array.reshape(-1)
    assert flat.all(), "each element is in a piece"
    assert (np.diff(flat) >= 0).all()
    assert array.size == 0 or flat[-1] == number + 1


@pytest.mark.parametrize("dtype", ["?", "f2", ">f8", "c16", "u1"])
def test_initial_values_travel_in_pieces(strategy, rank, size, dtype, monkeypatch):
    monkeypatch.setattr(mpi_transport, "_PART_BYTES", 16)
    root = size - 1
    array = (np.arange(35).reshape(5, 7) % 2 + (rank == root)).astype(dtype)
    with strategy.extended._collectives.call("test") as call:
        result = broadcast(call, array, root=root)
    expected = (np.arange(35).reshape(5, 7) % 2 + 1).astype(dtype)
    assert_array_equal(result, expected)
    assert result.dtype == np.dtype(dtype).newbyteorder("=")
    assert not np.shares_memory(result, array)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"synchronization": ms.VariableSynchronization.NONE}, "NONE"),
        ({"synchronization": "auto"}, "VariableSynchronization"),
        ({"aggregation": "sum"}, "VariableAggregation"),
        ({"initial_value": 1, "aggregation": Aggregation.MEAN}, "floating"),
        ({"initial_value": "text"}, "dtype"),
        ({"initial_value": [object()]}, "dtype"),
    ],
)
def test_bad_variables_are_refused_by_name(strategy, size, arguments, text):
    with strategy.scope(), pytest.raises(ValueError, match=f"'odd'.*{text}"):
        ms.Variable(**{"initial_value": 1.0, "name": "odd"} | arguments)
    assert strategy.reduce("sum", 1) == size


@pytest.mark.parametrize("value", [np.ones(3), np.ones((1, 2)), 1.0])
def test_shapes_are_not_broadcast(strategy, value):
    variable = make(strategy, Aggregation.SUM, np.zeros(2), name="w")
    with pytest.raises(ValueError, match="'w'.*not broadcast"):
        variable.assign(value)
    with pytest.raises(ValueError, match="not broadcast"):
        strategy.run(lambda: variable.assign(value))
    with pytest.raises(TypeError, match="Cast it first"):
        make(strategy, Aggregation.SUM, np.zeros(2, int)).assign(np.full(2, 0.5))


@pytest.mark.parametrize("on_read", [False, True], ids=["mirrored", "sync_on_read"])
def test_values_that_would_lose_something_are_refused(strategy, size, on_read):
    variable = make(strategy, Aggregation.ONLY_FIRST_REPLICA, np.zeros(2), on_read, name="w")
    flags = make(strategy, Aggregation.ONLY_FIRST_REPLICA, np.zeros(2, bool), on_read, name="w")

    def check(*_):
        for value, text in (
            (np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
            (ms.IndexedSlices([1.0, 2.0], [0, 1]), "IndexedSlices"),
            (np.ones(2, complex), "Cast it first"),
            (["a", "b"], "does not fit"),
            ([None, None], "does not fit"),
        ):
            with pytest.raises(TypeError, match=f"'w'.*{text}"):
                variable.assign(value)
        for arithmetic in (flags.assign_add, flags.assign_sub):
            with pytest.raises(TypeError, match="'w'.*no arithmetic"):
                arithmetic(np.ones(2, bool))

    check()
    strategy.run(check)
    strategy.extended.update(variable, check)
    assert not variable.numpy().any()
    assert strategy.reduce("sum", 1) == size


@pytest.mark.parametrize(
    ("given", "mirrored", "plain"),
    [("AUTO", "ON_WRITE", "AUTO"), ("ON_WRITE",) * 3, ("ON_READ",) * 3],
)
def test_synchronization_says_what_the_strategy_chose(strategy, given, mirrored, plain):
    mode = ms.VariableSynchronization[given]
    for each in (strategy, ms.OneDeviceStrategy()):
        with each.scope():
            variable = ms.Variable(1.0, synchronization=mode)
        assert variable.synchronization.name == mirrored
        assert copy.deepcopy(variable).synchronization.name == mirrored
    assert ms.Variable(1.0, synchronization=mode).synchronization.name == plain


def test_another_strategy_s_scope_is_refused(strategy):
    variable = make(strategy, Aggregation.SUM, name="w")
    with ms.OneDeviceStrategy().scope(), pytest.raises(ms.errors.ContextError, match="'w'"):
        variable.assign(1.0)


def test_repr_is_local(strategy, rank):
    variable = make(strategy, Aggregation.SUM, on_read=True, name="w")
    if rank == 0:
        assert "'w'" in repr(variable)
        assert (variable.shape, variable.dtype, variable.ndim) == ((), np.float64, 0)


def test_copies_in_a_scope_keep_their_kind(strategy, size):
    on_read = make(strategy, Aggregation.SUM, on_read=True)
    plain = ms.Variable(1.0)
    with strategy.scope():
        twin, plain_twin = copy.deepcopy(on_read), copy.deepcopy(plain)
        with pytest.raises(TypeError, match="deepcopy"):
            copy.copy(on_read)
        with pytest.raises(TypeError, match="Checkpoint"):
            pickle.dumps(on_read)
    assert twin.numpy() == 2 * size
    assert plain_twin.assign(3.0) == 3.0


@pytest.mark.parametrize("dtype", ["u1", "i4", "u8", "f2", "f4", "c8", "?"])
def test_python_numbers_fit_if_their_kind_and_range_do(strategy, dtype):
    variable = make(strategy, Aggregation.NONE, np.zeros(2), dtype=dtype, name="w")
    variable.assign([True, False])
    assert variable.dtype == np.dtype(dtype)
    if dtype == "?":
        with pytest.raises(TypeError, match="'w'"):
            variable.assign([2, 1])
        return
    variable.assign([1, 2])
    variable.assign_add([1, 1])
    assert variable.numpy().tolist() == [2, 3]
    if variable.dtype.kind in "iu":
        for bad in ([0.5, 1], [-(2**63) if dtype == "i4" else -1, 0], [2**40, 2**70]):
            with pytest.raises((TypeError, OverflowError)):
                variable.assign(bad)


def test_python_integers_of_64_bits_stay_exact(strategy):
    numbers = [3, 2**64 - 1]
    variable = make(strategy, Aggregation.NONE, numbers, dtype=np.uint64)
    assert variable.numpy().tolist() == numbers
    assert variable.assign(numbers[::-1]).tolist() == numbers[::-1]
    for bad in ([0, 2**64], [-1, 2**63], [0.0, 2**64 - 1]):
        with pytest.raises(TypeError, match="does not fit"):
            variable.assign(bad)


@pytest.mark.host_memory
def test_conversions_follow_numpy_s_protocol(strategy):
    variable = make(strategy, Aggregation.NONE, np.ones(2))
    assert not np.shares_memory(np.asarray(variable, copy=True), variable.value())
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(variable, dtype="f4", copy=False)
    with strategy.scope(), pytest.raises(ValueError, match="complex"):
        ms.Variable(1 + 2j, dtype="f4")
    with strategy.scope(), pytest.raises(TypeError, match="string"):
        ms.Variable(1.0, name=3)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(300, "u1"), ([-1], "u1"), (2**31, "i4"), (1.5, "i8"), (np.ma.array([1.0], mask=[1]), None)],
)
def test_initial_values_that_would_lose_something_are_refused(strategy, size, value, dtype):
    with strategy.scope(), pytest.raises(ValueError, match="'odd'.*cannot hold"):
        ms.Variable(value, name="odd", dtype=dtype)
    assert strategy.reduce("sum", 1) == size


def test_initial_arrays_are_cast_as_asked(strategy):
    with strategy.scope():
        assert ms.Variable(np.array([1.5]), dtype="i4").numpy().tolist() == [1]
        assert ms.Variable([True, False], dtype="f4").numpy().tolist() == [1, 0]


def test_floats_of_8_bits_are_refused(strategy):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with strategy.scope(), pytest.raises(ValueError, match="'odd'.*float8_e5m2"):
        ms.Variable(np.ones(2, ml_dtypes.float8_e5m2), name="odd")
