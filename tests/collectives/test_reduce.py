import numpy as np
import pytest

import mpistrat as ms
from tests import devices
from tests.devices import assert_allclose, assert_array_equal
from tests.helpers import triangle


def test_sum_and_mean_over_replicas(strategy, rank, size):
    value = ms.PerReplica(np.full((2, 3), rank, np.float32))
    total = strategy.reduce("SUM", value, axis=None)
    assert total.dtype == np.float32
    assert (total == triangle(size)).all()
    mean = strategy.reduce(ms.ReduceOp.MEAN, value)
    assert_allclose(mean, (size - 1) / 2)
    number = strategy.reduce("sum", rank)
    assert isinstance(number, np.ndarray | np.generic)
    assert number == triangle(size)


def test_min_max_prod_and_nests(strategy, rank, size):
    nest = {"a": rank + 1, "b": [np.array([rank, -rank])]}
    assert strategy.reduce("max", nest)["a"] == size
    assert strategy.reduce("Min", nest)["b"][0].tolist() == [0, 1 - size]
    factorial = int(np.prod(np.arange(1, size + 1)))
    assert strategy.reduce("PROD", nest)["a"] == factorial


def test_ranks_without_examples_count_as_zero(strategy, rank, size):
    local = np.ones((1, 4), np.float32) if rank == 0 else np.ones((0, 4), np.float32)
    for op in ("sum", "mean", "min", "max", "prod"):
        assert strategy.reduce(op, local, axis=0).tolist() == [1, 1, 1, 1]
    nothing = np.ones((0, 2), np.float32)
    assert np.isnan(strategy.reduce("mean", nothing, axis=0)).all()
    assert strategy.reduce("sum", nothing, axis=0).tolist() == [0, 0]
    for op in ("min", "max"):
        with pytest.raises(ValueError, match="no element"):
            strategy.reduce(op, nothing, axis=0)
    assert strategy.reduce("sum", 1) == size


def test_tuple_axis(strategy, size):
    value = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    total = strategy.reduce("sum", value, axis=(0, -1))
    assert total.dtype == np.int32
    assert total.tolist() == (value.sum((0, 2)) * size).tolist()


@pytest.mark.parametrize(
    "dtype", ["int8", "uint16", "int64", "float16", "float32", "complex64", ">f4"]
)
def test_dtypes_are_kept_and_integer_means_are_float64(strategy, rank, size, dtype):
    value = np.full(3, rank).astype(dtype)
    native = np.dtype(dtype).newbyteorder("=")
    for axis in (None, 0):
        assert strategy.reduce("sum", value, axis=axis).dtype == native
        mean = strategy.reduce("mean", value, axis=axis)
        assert mean.dtype == (np.float64 if native.kind in "iu" else native)
        assert_allclose(mean, (size - 1) / 2, rtol=1e-3)


def test_bool_sums_are_refused_and_extremes_work(strategy, rank, size):
    value = np.array([rank == 0, True, False])
    for op in ("sum", "mean", "prod"):
        with pytest.raises(TypeError, match="cast first"):
            strategy.reduce(op, value)
    assert strategy.reduce("max", value).tolist() == [True, True, False]
    assert strategy.reduce("min", value).tolist() == [size == 1, True, False]
    assert strategy.reduce("max", value).dtype == bool


def test_strided_read_only_and_fortran_arrays(strategy, size):
    base = np.arange(24.0).reshape(4, 6)
    frozen = base.copy()
    frozen.flags.writeable = False
    for value in (base[::2, ::-3], np.asfortranarray(base), frozen, base.T):
        before = value.copy()
        total = strategy.reduce("sum", value)
        assert (total == before * size).all()
        assert (value == before).all()
        assert total.flags.writeable
        assert not np.shares_memory(total, value)


def test_mirrored_values(strategy):
    with strategy.scope():
        variable = ms.Variable(np.array([0.1, 0.2], np.float32))
    for value in (variable, ms.Mirrored(variable.numpy())):
        assert strategy.reduce("mean", value).tobytes() == variable.numpy().tobytes()
        with pytest.raises(ValueError, match="mirrored on all replicas"):
            strategy.reduce("sum", value)


def test_sync_on_read_variables_reduce_as_per_replica_values(strategy, rank, size):
    with strategy.scope():
        variable = ms.Variable(
            0.0,
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    strategy.run(lambda: variable.assign(float(rank)))
    assert strategy.reduce("max", variable) == size - 1


def test_all_reduce_of_nests_and_slices(strategy, rank, size):
    slices = ms.IndexedSlices(np.full((rank + 1, 2), 1.0), np.full(rank + 1, rank), (9, 2))

    def fn():
        replica = ms.get_replica_context()
        nest = {"b": np.full(2, rank), "a": (1.5, slices)}
        total = replica.all_reduce("sum", nest)
        assert total["b"].tolist() == [triangle(size)] * 2
        assert total["a"][0] == 1.5 * size
        rows = total["a"][1]
        assert rows.indices.tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert rows.dense_shape == (9, 2)
        mean = replica.all_reduce("mean", slices)
        assert_allclose(mean.values, 1 / size)
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            replica.all_reduce("max", slices)

    strategy.run(fn)


def test_slices_of_different_dense_shapes_are_refused(strategy, others):
    slices = ms.IndexedSlices(np.ones((1, 2)), [0], (8 + others, 2))
    with pytest.raises(ms.errors.CollectiveMismatchError, match=r"\(9, 2\)"):
        strategy.run(lambda: ms.get_replica_context().all_reduce("sum", slices))


def test_small_packs_give_the_same_bits(strategy, rank):
    arrays = [np.linspace(rank, 1, 7 + k).astype(np.float32) for k in range(20)]
    options = ms.CommunicationOptions(bytes_per_pack=64)

    def fn():
        replica = ms.get_replica_context()
        return replica.all_reduce("sum", arrays), replica.all_reduce("sum", arrays, options)

    one, many = strategy.run(fn)
    for a, b in zip(one, many, strict=True):
        assert_allclose(a.values[0], b.values[0], rtol=1e-6)


def test_reductions_under_way_may_end_in_any_order(strategy, rank, size):
    def fn():
        replica = ms.get_replica_context()
        given = np.full(3, rank, np.float32)
        first = replica.start_all_reduce("sum", {"a": given, "b": 2})
        given[:] = 77
        second = replica.start_all_reduce("mean", np.arange(5.0) * rank)
        assert replica.all_reduce("max", rank) == size - 1
        assert_allclose(second.wait(), np.arange(5.0) * (size - 1) / 2)
        assert first.wait()["a"].tolist() == [triangle(size)] * 3
        assert first.wait() is first.wait()
        with pytest.raises(TypeError):
            replica.start_all_reduce("sum", "text")

    strategy.run(fn)


def test_a_wait_that_was_broken_off_raises_the_same_error_again(strategy):
    def fn():
        handle = ms.get_replica_context().start_all_reduce("sum", 1)

        def interrupted():
            end()
            raise TimeoutError("alarm")

        end = handle._end
        handle._end = interrupted
        for _ in range(2):
            with pytest.raises(TimeoutError, match="alarm"):
                handle.wait()

    strategy.run(fn)


def test_distributed_values_that_hold_nests(strategy, rank, size):
    value = ms.PerReplica({"a": rank, "b": (1.5, ms.PerReplica(2))})
    total = strategy.reduce("sum", [value])
    assert total == [{"a": triangle(size), "b": (1.5 * size, 2 * size)}]
    pairs = strategy.experimental_distribute_values_from_function(lambda context: (1, 2))
    assert strategy.reduce("sum", pairs) == (size, 2 * size)
    assert strategy.reduce("sum", ms.PerReplica(())) == ()
    mirrored = ms.Mirrored({"x": np.arange(2.0)})
    assert strategy.reduce("mean", mirrored)["x"].tolist() == [0, 1]
    reduced = strategy.extended.reduce_to("sum", {"x": np.ones(2)}, "cpu:0")
    assert reduced["x"].tolist() == [size] * 2


def test_means_of_mirrored_integers_and_bools(strategy, size):
    assert strategy.reduce("mean", ms.Mirrored(np.arange(3))).dtype == np.float64
    assert strategy.reduce("max", ms.Mirrored(np.arange(3))).dtype == np.int64
    with pytest.raises(TypeError, match="cast first"):
        strategy.reduce("mean", ms.Mirrored(np.array([True])))
    assert strategy.reduce("sum", 1) == size


def test_results_share_nothing_with_variables(strategy):
    with strategy.scope():
        variable = ms.Variable(np.ones(2))
    for destination in (variable, "cpu:0"):
        result = strategy.extended.reduce_to("mean", variable, destination)
        array = result.values[0] if isinstance(result, ms.Mirrored) else result
        array[...] = 7
        assert variable.numpy().tolist() == [1, 1]


def test_masked_and_object_arrays_are_refused(strategy, size):
    with pytest.raises(TypeError, match="masked"):
        strategy.reduce("mean", np.ma.array([1, 2], mask=[0, 1]), axis=0)
    with pytest.raises(TypeError, match="object"):
        strategy.gather(np.array([{}]), 0)
    assert strategy.reduce("sum", 1) == size


def test_strings_are_no_numbers(strategy):
    assert strategy.run(lambda: np.str_("text")) == "text"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("axis", [None, 0])
def test_extremes_follow_numpy_where_there_is_nan(strategy, rank, size, op, dtype, axis):
    def row(r):
        values = np.array([np.nan if r == 0 else 1, r, -np.inf, np.nan if r == size - 1 else 2, -r])
        return values.astype(dtype)[None]

    fold = np.min if op == "min" else np.max
    expected = fold(np.concatenate([row(r) for r in range(size)]), axis=0)
    result = strategy.reduce(op, row(rank), axis=axis)
    assert_array_equal(result, expected[None] if axis is None else expected)


EXTREMES = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0**-70]


@pytest.mark.thorough_product
@pytest.mark.parametrize("implementation", ["AUTO", "MPI"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("length", [1, pytest.param(90, marks=pytest.mark.thorough), 40_000])
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["f2", "f4", pytest.param("f8", marks=pytest.mark.thorough), "g"])
def test_extremes_propagate_nan_and_are_equal_to_the_bit(
    strategy, rank, size, dtype, op, length, deterministic, implementation
):
    options = ms.CommunicationOptions(
        implementation=devices.implementation(implementation), deterministic=deterministic
    )

    def values_of(rank):
        with np.errstate(under="ignore"):
            return np.random.default_rng(rank).choice(EXTREMES, length).astype(dtype)

    rows = np.stack([values_of(each) for each in range(size)])
    reduced = []

    def step():
        context = ms.get_replica_context()
        reduced.append(context.all_reduce(op, rows[rank], options))
        reduced.append(context.start_all_reduce(op, rows[rank], options).wait())

    strategy.run(step)
    own = strategy.extended.reduce_to(op, rows[rank], f"/task:{size - 1}/cpu:0", options)
    if rank == size - 1:
        reduced.append(own)
    expected = (np.min if op == "min" else np.max)(rows, axis=0)
    # Zeros have an order here, which NumPy leaves open: -0.0 is the smaller one.
    of_zeros = np.signbit(rows).any(0) if op == "min" else np.signbit(rows).all(0)
    is_negative = np.where(expected == 0, of_zeros & (expected == 0), np.signbit(expected))
    for result in reduced:
        assert_array_equal(result, expected)
        signs = np.signbit(result) & ~np.isnan(result)
        zeros_of_both = (rows == 0).any(0) & (expected == 0)
        same = ~zeros_of_both | (np.abs(rows) == 0).all(0)
        assert_array_equal(signs[same], (is_negative & ~np.isnan(expected))[same])
    digests = strategy.extended._collectives.gather_json(reduced[0].tobytes().hex())
    assert len(set(digests)) == 1


CALLS_WITH_A_HOLE = {
    "reduce": lambda s, c, nest: s.reduce("sum", nest),
    "reduce over an axis": lambda s, c, nest: s.reduce("mean", nest, axis=0),
    "gather": lambda s, c, nest: s.gather(nest, 0),
    "reduce_to": lambda s, c, nest: s.extended.reduce_to("sum", nest, "/task:0/cpu:0"),
    "all_reduce": lambda s, c, nest: c.all_reduce("sum", nest),
    "start_all_reduce": lambda s, c, nest: c.start_all_reduce("sum", nest),
    "all_gather": lambda s, c, nest: c.all_gather(nest, 0),
}


def call_with(strategy, name, nest):
    """Make a call of `CALLS_WITH_A_HOLE` in the context that it needs."""
    call = CALLS_WITH_A_HOLE[name]
    if name in ("all_reduce", "start_all_reduce", "all_gather"):
        return strategy.run(lambda: call(strategy, ms.get_replica_context(), nest))
    return call(strategy, None, nest)


@pytest.mark.parametrize("name", CALLS_WITH_A_HOLE)
def test_a_leaf_that_is_none_is_named(strategy, rank, size, name):
    for nest, path in (
        ({"w": np.ones(2), "b": [np.ones(3), None]}, "the leaf 'b/1'"),
        (None, "the value"),
    ):
        with pytest.raises(TypeError, match=f"{path} is None on rank {rank} of {size}.*zeros_like"):
            call_with(strategy, name, nest)
    assert strategy.reduce("sum", 1) == size, "the strategy stays usable"


@pytest.mark.parametrize("name", CALLS_WITH_A_HOLE)
def test_a_leaf_that_is_none_on_one_rank_is_named_on_all(rank, size, name):
    if size == 1:
        pytest.skip("needs two ranks that can differ")
    strategy = ms.MPIStrategy()
    nest = {"w": np.ones(2), "b": None if rank == size - 1 else np.ones(3)}
    with pytest.raises((TypeError, ms.errors.CollectiveMismatchError)) as caught:
        call_with(strategy, name, nest)
    assert f"the leaf 'b' is None on rank {size - 1} of {size}" in str(caught.value)
    assert isinstance(caught.value, TypeError) == (rank == size - 1)
