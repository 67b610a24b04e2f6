"""Collectives that move parts of arrays: each result is a function of rank and number of ranks."""

import itertools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from mpistrat.system.text import rank_list
from tests.devices import assert_allclose, assert_array_equal
from tests.helpers import as_bytes
from tests.random_arrays import DTYPES as DTYPES_OF_ALL
from tests.random_arrays import can_reduce

OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
DTYPES = ("i1", "u8", "i4", "f2", "f4", "f8", "c16")


def of_rank(rank, shape, dtype="f8"):
    """Return the array of a rank, with small whole numbers."""
    numbers = np.random.default_rng((7, rank)).integers(1, 4, shape)
    return numbers.astype(dtype)


def run(strategy, function):
    """Return what `function` gives of the replica context."""
    result = strategy.run(lambda: function(ms.get_replica_context()))
    return strategy.experimental_local_results(result)[0]


def parts(array, size, axis=0):
    return np.array_split(array, size, axis)


@pytest.mark.parametrize("shape", [(7,), (4, 3), (1, 5), (0, 2)])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("op", [*OPS, "mean"])
def test_reduce_scatter_gives_each_its_part_of_the_sum(strategy, rank, size, op, axis, shape):
    everyone = [of_rank(each, shape) for each in range(size)]
    found = run(strategy, lambda ctx: ctx.reduce_scatter(op, everyone[rank], axis))
    total = np.mean(everyone, 0) if op == "mean" else OPS[op].reduce(everyone)
    assert_allclose(found, parts(total, size, axis)[rank])
    assert found.flags.writeable


def test_reduce_scatter_of_integers_and_of_narrow_floats(strategy, rank, size):
    found = run(
        strategy,
        lambda ctx: ctx.reduce_scatter(
            "mean", {"i": np.full(5, rank), "h": np.full(4, rank, np.float16)}
        ),
    )
    mean = (size - 1) / 2
    assert (found["i"].dtype, found["h"].dtype) == (np.float64, np.float16)
    assert found["i"].tolist() == [mean] * len(parts(np.zeros(5), size)[rank])
    assert found["h"].tolist() == [mean] * len(parts(np.zeros(4), size)[rank])


def test_reduce_scatter_has_the_bits_of_the_deterministic_all_reduce(strategy, rank, size):
    options = ms.CommunicationOptions(deterministic=True)
    own = np.random.default_rng(rank).random((37, 3), np.float32)
    found, whole = run(
        strategy,
        lambda ctx: (
            ctx.reduce_scatter("sum", own, options=options),
            ctx.all_reduce("sum", own, options),
        ),
    )
    assert found.tobytes() == parts(whole, size)[rank].tobytes()


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (-1, -1), (2, 1)], ids=str)
def test_all_to_all_turns_parts_around(strategy, rank, size, split, concat):
    shapes = [[5, 4, 3] for _ in range(size)]
    for each, shape in enumerate(shapes):
        shape[concat] += each  # the lengths that may differ, one of them none
    shapes[-1][concat] = 0
    everyone = [of_rank(each, shape) for each, shape in enumerate(shapes)]
    found = run(strategy, lambda ctx: ctx.all_to_all(everyone[rank], split, concat))
    expected = [parts(each, size, split)[rank] for each in everyone]
    assert_array_equal(found, np.concatenate(expected, concat))


@pytest.mark.parametrize("gives", ["nothing", "a value"])
@pytest.mark.parametrize("dtype", [*DTYPES, "?", "S3", ">f4"])
def test_broadcast_and_scatter_bring_what_the_root_has(strategy, rank, size, gives, dtype):
    root = size - 1
    value = {"x": of_rank(root, (5, 2), dtype), "y": [of_rank(root, (1,)), of_rank(root, (0, 3))]}
    other = {"x": np.zeros((5, 2), dtype), "y": [np.zeros(1), np.zeros((0, 3))]}
    own = value if rank == root else None if gives == "nothing" else other
    everything, part = run(strategy, lambda ctx: (ctx.broadcast(own, root), ctx.scatter(own, root)))
    for found, expected in (
        (everything["x"], value["x"]),
        (everything["y"][0], value["y"][0]),
        (everything["y"][1], value["y"][1]),
        (part["x"], parts(value["x"], size)[rank]),
        (part["y"][0], parts(value["y"][0], size)[rank]),
        (part["y"][1], parts(value["y"][1], size)[rank]),
    ):
        assert_array_equal(found, expected)
        assert found.dtype == expected.dtype.newbyteorder("=")
        assert found.flags.writeable
        assert not np.shares_memory(found, value["x"])


def test_a_number_is_broadcast(strategy, rank, size):
    found = run(strategy, lambda ctx: ctx.broadcast(2.5 if rank == 0 else None))
    assert found == 2.5


@pytest.mark.parametrize("offset", [-5, -1, 0, 1, 2, 7])
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("dtype", ["i2", "f4"])
def test_shift_moves_as_numpy_roll(strategy, rank, size, offset, periodic, dtype):
    everyone = np.array([of_rank(each, (3, 2), dtype) for each in range(size)])
    found = run(strategy, lambda ctx: ctx.shift(everyone[rank], offset, periodic, fill=9))
    rolled = np.roll(everyone, offset, axis=0)
    if not periodic:
        come_from = np.arange(size) - offset
        rolled[(come_from < 0) | (come_from >= size)] = 9
    assert_array_equal(found, rolled[rank])
    assert found.dtype == np.dtype(dtype)
    assert found.flags.writeable


@pytest.mark.parametrize(
    ("fill", "dtype"),
    [(np.nan, "f4"), (-0.0, "f8"), (2.0, "i8"), (1j, "c8"), (True, "?"), (0, "S3")],
)
def test_where_nothing_comes_from_stands_the_fill(strategy, size, fill, dtype):
    found = run(strategy, lambda ctx: ctx.shift(np.ones(3, dtype), size, fill=fill))
    expected = np.zeros(3, dtype) if dtype == "S3" else np.full(3, fill, dtype)
    assert found.tobytes() == expected.tobytes()


def test_one_fill_of_another_type_is_the_same(strategy, rank):
    fill = (2, 2.0, np.float32(2), np.array(2))[rank % 4]
    assert run(strategy, lambda ctx: ctx.shift(np.ones(2), 99, fill=fill)).tolist() == [2, 2]


RECORD = [("a", "i4"), ("b", "f2", (2,)), ("c", "S3")]
MOVED = [*DTYPES, "?", "S3", "U2", "V5", ">f4", ">i8", "M8[s]", "bfloat16", RECORD]


@pytest.mark.thorough_product
@pytest.mark.parametrize("shape", [(5, 2), (1, 2), (0, 2), (3, 0)], ids=str)
@pytest.mark.parametrize("name", MOVED, ids=str)
def test_values_of_any_dtype_move(strategy, rank, size, name, shape):
    dtype = np.dtype(name if name != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16)

    def of(each):
        count = int(np.prod(shape)) * dtype.itemsize
        numbers = np.random.default_rng(each).integers(0, 2, count, dtype=np.uint8)
        return numbers.view(dtype).reshape(shape)

    root, everyone = size - 1, [of(each) for each in range(size)]
    given = everyone[rank] if rank == root else None
    found = run(
        strategy,
        lambda ctx: [
            ctx.broadcast(given, root),
            ctx.scatter(given, root),
            ctx.all_to_all(everyone[rank], 0, 1),
            ctx.shift(everyone[rank], -1, periodic=True),
        ],
    )
    expected = [
        everyone[root],
        parts(everyone[root], size)[rank],
        np.concatenate([parts(each, size)[rank] for each in everyone], 1),
        everyone[(rank + 1) % size],
    ]
    for got, wanted in zip(found, expected, strict=True):
        wanted = wanted.astype(dtype.newbyteorder("="))
        assert (got.dtype, got.shape, got.tobytes()) == (
            wanted.dtype,
            wanted.shape,
            wanted.tobytes(),
        )


def test_a_dtype_without_a_name_is_no_value_of_a_root(strategy, size):
    odd = np.zeros(2, [("x", pytest.importorskip("ml_dtypes").bfloat16)])
    for call in (lambda ctx: ctx.broadcast(odd), lambda ctx: ctx.scatter(odd)):
        with pytest.raises(TypeError, match="has no name"):
            run(strategy, call)
    assert run(strategy, lambda ctx: ctx.shift(odd, 0)).dtype == odd.dtype
    assert run(strategy, lambda ctx: ctx.all_reduce("sum", 1.0)) == size


@pytest.mark.thorough_product
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_scan_folds_in_the_order_of_ranks(strategy, rank, size, op, exclusive, dtype):
    if dtype == "c16" and op in ("min", "max"):
        pytest.skip("complex numbers have no order")
    everyone = [of_rank(each, (4, 2), dtype) for each in range(size)]
    found = run(strategy, lambda ctx: ctx.scan(op, everyone[rank], exclusive))
    folded = list(itertools.accumulate(everyone, OPS[op]))
    if not exclusive:
        expected = folded[rank]
    elif rank:
        expected = folded[rank - 1]
    else:
        extreme = np.inf if np.dtype(dtype).kind == "f" else None
        info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None
        first = {
            "sum": 0,
            "prod": 1,
            "min": extreme or (info and info.max),
            "max": -extreme if extreme else (info and info.min),
        }[op]
        expected = np.full((4, 2), first, dtype)
    assert_array_equal(found, expected)
    assert found.dtype == np.dtype(dtype)


def awkward(rank, dtype):
    """Return numbers of a rank with zeros of both signs, infinities, NaN and many digits."""
    rng = np.random.default_rng((5, rank))
    if dtype.kind in "biu":
        return rng.integers(0, 256, 41).astype(dtype)
    values = rng.normal(size=41) + (1j * rng.normal(size=41) if dtype.kind == "c" else 0)
    # MPI's own product of complex infinities is that of C, with its special cases.
    extremes = [] if dtype.kind == "c" else [np.inf, -np.inf, np.nan]
    values[:20] = rng.choice([0.0, -0.0, *extremes], 20)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES_OF_ALL, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_the_last_rank_of_a_scan_has_the_bits_of_all_reduce(strategy, rank, size, op, dtype):
    if not can_reduce(op, dtype):
        pytest.skip("all_reduce refuses it")
    if size > 2 and op in ("sum", "prod"):
        pytest.skip("all_reduce adds neighbours first, a scan one rank after another")
    own = awkward(rank, dtype)
    scanned, reduced = run(strategy, lambda ctx: (ctx.scan(op, own), ctx.all_reduce(op, own)))
    assert scanned.dtype == reduced.dtype
    if rank == size - 1:
        if dtype.char in "gG":  # what is between two numbers in memory is not part of them
            scanned, reduced = str(scanned.tolist()), str(reduced.tolist())
        assert as_bytes(scanned) == as_bytes(reduced)


def test_scan_of_bools_of_nan_and_of_long_arrays(strategy, rank, size):
    own = np.array([rank == 0, True])
    longer = np.full(300_001, float(rank + 1))
    nans = np.array([np.nan if rank == 0 else 1.0])
    most, least, first, total, nan = run(
        strategy,
        lambda ctx: (
            ctx.scan("max", own),
            ctx.scan("min", own),
            ctx.scan("max", own, exclusive=True),
            ctx.scan("sum", longer),
            ctx.scan("max", nans),
        ),
    )
    assert most.tolist() == [True, True]
    assert least.tolist() == [rank == 0, True]
    assert first.tolist() == ([True, True] if rank else [False, False])
    assert (total == (rank + 1) * (rank + 2) / 2).all()
    assert np.isnan(nan).all()


BAD = {
    "reduce_scatter of 0-d": (lambda ctx: ctx.reduce_scatter("sum", 1.0), ValueError, "0-d"),
    "its axis": (lambda ctx: ctx.reduce_scatter("sum", np.ones(3), 1), ValueError, "out of range"),
    "no integer": (lambda ctx: ctx.reduce_scatter("sum", np.ones(3), 1.0), TypeError, "integer"),
    "sum of bools": (lambda ctx: ctx.reduce_scatter("sum", np.ones(3, bool)), TypeError, "bool"),
    "all_to_all of 0-d": (lambda ctx: ctx.all_to_all(np.float32(1)), ValueError, "0-d"),
    "split_axis": (lambda ctx: ctx.all_to_all(np.ones(3), 2), ValueError, "split_axis 2"),
    "concat_axis": (lambda ctx: ctx.all_to_all(np.ones(3), 0, -2), ValueError, "concat_axis -2"),
    "root beyond": (lambda ctx: ctx.broadcast(np.ones(3), 99), ValueError, "at most"),
    "root below": (lambda ctx: ctx.scatter(np.ones(3), -1), ValueError, "at least"),
    "root no integer": (lambda ctx: ctx.scatter(np.ones(3), "0"), TypeError, "integer"),
    "scatter of 0-d": (lambda ctx: ctx.scatter(1.0), ValueError, "0-d"),
    "offset": (lambda ctx: ctx.shift(np.ones(3), 0.5), TypeError, "integer"),
    "periodic": (lambda ctx: ctx.shift(np.ones(3), 1, 1), TypeError, "True or False"),
    "fill": (lambda ctx: ctx.shift(np.ones(3), 1, fill=np.ones(3)), TypeError, "fill"),
    "fill of text": (lambda ctx: ctx.shift(np.ones(3), 1, fill="1"), TypeError, "a number"),
    "fill between integers": (
        lambda ctx: ctx.shift(np.ones(3, int), 1, fill=0.5),
        ValueError,
        "0.5",
    ),
    "fill too large": (lambda ctx: ctx.shift(np.ones(3, "u1"), 1, fill=300), ValueError, "uint8"),
    "fill below": (lambda ctx: ctx.shift(np.ones(3, "u1"), 1, fill=-1), ValueError, "uint8"),
    "no integer is NaN": (lambda ctx: ctx.shift(np.ones(3, int), fill=np.nan), ValueError, "nan"),
    "complex fill": (lambda ctx: ctx.shift(np.ones(3), 1, fill=1j), ValueError, "1j"),
    "fill of dates": (lambda ctx: ctx.shift(np.zeros(3, "M8[s]"), fill=1), ValueError, "datetime"),
    "mean": (lambda ctx: ctx.scan("mean", np.ones(3)), ValueError, "MEAN"),
    "scan of bools": (lambda ctx: ctx.scan("sum", np.ones(3, bool)), TypeError, "bool"),
    "objects": (lambda ctx: ctx.shift(np.array([None])), TypeError, "object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_on_every_rank_leave_the_strategy_usable(strategy, size, name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        run(strategy, call)
    assert run(strategy, lambda ctx: ctx.all_reduce("sum", 1.0)) == size


def test_indexed_slices_are_not_moved(strategy):
    slices = ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    for call in (
        lambda ctx: ctx.shift(slices),
        lambda ctx: ctx.broadcast(slices),
        lambda ctx: ctx.scan("sum", slices),
    ):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            run(strategy, call)


ONES = np.ones((3, 3))
DIFFER = {
    "offset": lambda ctx, odd: ctx.shift(ONES, int(odd)),
    "fill": lambda ctx, odd: ctx.shift(ONES, 1, fill=int(odd)),
    "periodic": lambda ctx, odd: ctx.shift(ONES, 1, odd),
    "shape of shift": lambda ctx, odd: ctx.shift(ONES[odd:]),
    "dtype of shift": lambda ctx, odd: ctx.shift(ONES.astype("f4" if odd else "f8")),
    "op of scan": lambda ctx, odd: ctx.scan("min" if odd else "max", ONES),
    "exclusive": lambda ctx, odd: ctx.scan("sum", ONES, odd),
    "shape of scan": lambda ctx, odd: ctx.scan("sum", ONES[odd:]),
    "dtype of scan": lambda ctx, odd: ctx.scan("sum", ONES.astype("f4" if odd else "f8")),
    "root of broadcast": lambda ctx, odd: ctx.broadcast(ONES, int(odd)),
    "shape of broadcast": lambda ctx, odd: ctx.broadcast(ONES[odd:]),
    "dtype of broadcast": lambda ctx, odd: ctx.broadcast(ONES.astype("i4" if odd else "f8")),
    "structure": lambda ctx, odd: ctx.broadcast([ONES] if odd else ONES),
    "root of scatter": lambda ctx, odd: ctx.scatter(ONES, int(odd)),
    "shape of scatter": lambda ctx, odd: ctx.scatter(ONES[:, odd:]),
    "keys": lambda ctx, odd: ctx.scatter({"b" if odd else "a": ONES}),
    "op of reduce_scatter": lambda ctx, odd: ctx.reduce_scatter("sum" if odd else "mean", ONES),
    "axis of reduce_scatter": lambda ctx, odd: ctx.reduce_scatter("sum", ONES, int(odd)),
    "shape of reduce_scatter": lambda ctx, odd: ctx.reduce_scatter("sum", ONES[odd:]),
    "split_axis": lambda ctx, odd: ctx.all_to_all(ONES, int(odd)),
    "concat_axis": lambda ctx, odd: ctx.all_to_all(ONES, 0, int(odd)),
    "dtype of all_to_all": lambda ctx, odd: ctx.all_to_all(ONES.astype("f4" if odd else "f8")),
    "collective": lambda ctx, odd: (ctx.shift if odd else ctx.all_to_all)(ONES),
}


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_differ_get_an_error(strategy, rank, size, others, name):
    with pytest.raises(CollectiveMismatchError) as caught:
        run(strategy, lambda ctx: DIFFER[name](ctx, not others))
    text = str(caught.value)
    assert f"rank {size - 1}: " in text
    assert text.count("  test_replica_moves.py:") >= 2


BAD_ON_ONE = {
    "axis": (lambda ctx, odd: ctx.reduce_scatter("sum", ONES, 9 if odd else 0), ValueError),
    "0-d": (lambda ctx, odd: ctx.all_to_all(np.ones(()) if odd else ONES), ValueError),
    "root": (lambda ctx, odd: ctx.broadcast(ONES, 99 if odd else 0), ValueError),
    "kind of root": (lambda ctx, odd: ctx.scatter(ONES, "0" if odd else 0), TypeError),
    "offset": (lambda ctx, odd: ctx.shift(ONES, 0.5 if odd else 1), TypeError),
    "op": (lambda ctx, odd: ctx.scan("mean" if odd else "sum", ONES), ValueError),
    "nothing": (lambda ctx, odd: ctx.broadcast(None, ctx.num_replicas_in_sync - 1), TypeError),
}


@pytest.mark.parametrize("name", BAD_ON_ONE)
def test_what_is_bad_on_one_rank_is_an_error_on_all(strategy, size, others, name):
    call, error = BAD_ON_ONE[name]
    with pytest.raises(CollectiveMismatchError if others else error) as caught:
        run(strategy, lambda ctx: call(ctx, not others))
    if others:
        assert f"rank {size - 1}: " in str(caught.value)
        assert f"refused its arguments ({error.__name__}" in str(caught.value)
    with pytest.raises(CollectiveMismatchError):  # even if that rank has caught its own
        run(strategy, lambda ctx: ctx.all_reduce("sum", 1.0))


def test_a_root_must_give_something(strategy, size):
    if size == 1:
        with pytest.raises(TypeError, match="None on the root"):
            run(strategy, lambda ctx: ctx.scatter(None))


OTHER_AXES = {
    (0, 0): ((4, 2), (4, 3)),
    (0, 1): ((4, 2), (5, 2)),
    (1, 0): ((3, 2), (3, 2, 4)),
}
"""Shapes of even and odd ranks that do not fit, by `split_axis` and `concat_axis`."""


@pytest.mark.parametrize("error", [ms.errors.CollectiveMismatchError, ValueError])
@pytest.mark.parametrize("axes", OTHER_AXES, ids=str)
def test_shapes_that_differ_elsewhere_are_a_mismatch(strategy, rank, size, axes, error):
    if size == 1:
        pytest.skip("one rank has nobody to differ from")
    shapes = OTHER_AXES[axes]
    with pytest.raises(error, match=f"along concat_axis {axes[1]} only") as caught:
        run(strategy, lambda ctx: ctx.all_to_all(np.ones(shapes[rank % 2]), *axes))
    for odd, shape in enumerate(shapes):
        assert f"{rank_list(range(odd, size, 2))}: {shape}\n" in str(caught.value)
    assert run(strategy, lambda ctx: ctx.all_reduce("sum", 1.0)) == size
