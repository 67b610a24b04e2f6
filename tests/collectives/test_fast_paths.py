"""Every collective three times, by each way of the fast paths and without them: the same bits."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat import nests
from tests.collectives.test_random_nests import build, nests_of
from tests.fast_paths import OFF, WAYS, all_opened, thorough_but
from tests.random_arrays import CHARS, DTYPES, OPS, can_reduce, specs

TIMES = 3
"""The second call prepares what the third one repeats."""
NUM_REPLICAS = [None, 5]


@pytest.fixture(scope="module", params=NUM_REPLICAS, ids=["ranks", "replicas"])
def strategies(request):
    ways = WAYS if request.param is None else WAYS[:1]
    with all_opened([*ways, OFF], num_replicas=request.param) as opened:
        yield opened


def as_bytes(nest):
    """Return what `nest` is made of, to the bit."""
    leaves, structure = nests.flatten(nest)
    found = []
    for leaf in leaves:
        parts = (leaf.values, leaf.indices) if isinstance(leaf, ms.IndexedSlices) else (leaf,)
        found += [(str(each.dtype), np.shape(each), bits(each)) for each in parts]
    return nests.signature(structure), found


def bits(array):
    """Return the bytes of `array`, without the padding of long doubles, which is in no number."""
    array = np.array(array)
    if array.dtype.kind == "c":
        array += 0  # the sign of zero depends on the order in products of complex numbers
    if array.dtype.char in "gG" and LONG.itemsize == 16 and np.finfo(LONG).nmant == 63:
        array.reshape(-1).view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return array.tobytes()


LONG = np.dtype(np.longdouble)


def results_of(strategy, call):
    """Return what ``call(replica, time)`` gives to each replica here, `TIMES` times."""
    found = {}

    def step(time):
        replica = ms.get_replica_context()
        result = as_bytes(call(replica, time))
        found[replica.replica_id_in_sync_group, time] = result

    for time in range(TIMES):
        strategy.run(step, args=(time,))
    return found


def assert_same_bits(strategies, call):
    expected = results_of(strategies[OFF], call)
    for way, strategy in strategies.items():
        if way != OFF:
            assert results_of(strategy, call) == expected, way


def numbers(replica, time, length, dtype="f4"):
    """Return floats of which every order of the sum has other last bits."""
    rng = np.random.default_rng([replica.replica_id_in_sync_group, time, length])
    return (rng.normal(size=length) * 10.0 ** rng.integers(-3, 4, length)).astype(dtype)


def whole_numbers(replica, time, length, dtype="f4"):
    """Return numbers of which every order of the sum has the same bits, as MPI may choose it."""
    rng = np.random.default_rng([replica.replica_id_in_sync_group, time, length])
    found = rng.integers(0, 4, length)
    return (found + 1j * rng.integers(0, 4, length) if dtype in "FDG" else found).astype(dtype)


LENGTHS = [0, 1, 7, 1000, 5000, 70_000, 400_000]


@pytest.mark.parametrize("op", thorough_but(OPS, ["mean"]))
@pytest.mark.parametrize("length", thorough_but(LENGTHS, [1, 1000, 70_000]))
def test_float32_arrays(strategies, op, length):
    assert_same_bits(
        # What MPI adds up between nodes has the order of MPI's choice.
        {way: each for way, each in strategies.items() if way in ("memory", OFF)},
        lambda replica, time: replica.all_reduce(op, numbers(replica, time, length)),
    )
    assert_same_bits(
        strategies,
        lambda replica, time: replica.all_reduce(op, whole_numbers(replica, time, length)),
    )


def test_numbers_that_are_special(strategies):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-42, 3e38], np.float32)

    def call(replica, time):
        turned = np.roll(special, replica.replica_id_in_sync_group + time)
        return [replica.all_reduce(op, turned) for op in ("sum", "mean", "min", "max")]

    assert_same_bits({way: strategies[way] for way in ("memory", OFF)}, call)


def test_numbers_and_nests(strategies):
    def call(replica, time):
        number = float(replica.replica_id_in_sync_group + time)
        nest = {"a": numbers(replica, time, 5), "b": [numbers(replica, time, 300), 3]}
        return {
            "number": replica.all_reduce("sum", number),
            "nest": replica.all_reduce("mean", nest),
            "begun": replica.start_all_reduce("sum", nest).wait(),
            "gathered": replica.all_gather(numbers(replica, time, 6).reshape(2, 3), 0),
            "part": replica.reduce_scatter("sum", numbers(replica, time, 37)),
            "scan": replica.scan("sum", numbers(replica, time, 11)),
            "root": replica.broadcast(
                numbers(replica, time, 9), root=replica.num_replicas_in_sync - 1
            ),
            "shift": replica.shift(numbers(replica, time, 9), 1, periodic=True),
        }

    assert_same_bits({way: strategies[way] for way in ("memory", OFF)}, call)


def test_slices(strategies):
    def call(replica, time):
        rows = ms.IndexedSlices(
            numbers(replica, time, 4).reshape(2, 2), np.array([time, 0]), (3, 2)
        )
        return replica.all_reduce("mean", {"rows": rows, "x": numbers(replica, time, 3)})

    assert_same_bits({way: strategies[way] for way in ("memory", OFF)}, call)


OPTIONS = {
    "default": {},
    "deterministic": {"deterministic": True},
    "MPI": {"implementation": ms.CommunicationImplementation.MPI},
    "shared": {"implementation": ms.CommunicationImplementation.SHARED},
    "small packs": {"bytes_per_pack": 64},
    "float16": {"wire_dtype": "float16"},
}
MOVES = (
    "all_reduce",
    "in_place",
    "start_all_reduce",
    "reduce_scatter",
    "scan",
    "axis",
    "reduce_to",
)


def moved(replica, way, op, value, options):
    """Return what one public function makes of `value`."""
    if way == "all_reduce":
        return replica.all_reduce(op, value, options)
    if way == "in_place":
        mean = op == "mean" and value.dtype.kind in "iu"
        out = np.empty(value.shape, np.float64) if mean else value.view()
        return replica.all_reduce(op, value, options, out=out)
    if way == "start_all_reduce":
        return replica.start_all_reduce(op, value, options).wait()
    if way == "reduce_scatter":
        return replica.reduce_scatter(op, value, options=options)
    if way == "scan":
        return replica.scan("max" if op == "mean" else op, value)

    def merge(strategy, per_replica):
        if way == "axis":
            return strategy.reduce(op, per_replica, axis=0)
        return strategy.extended.reduce_to(op, per_replica, "cpu:0", options)

    return replica.merge_call(merge, args=(value,))


def may_move(way, op, char):
    kind = np.dtype(char).kind
    return can_reduce(op, char) and not (way == "scan" and op == "mean" and kind == "c")


@pytest.mark.parametrize("options", thorough_but(OPTIONS, ["default", "deterministic"]))
@pytest.mark.parametrize("way", thorough_but(MOVES, ["all_reduce"]))
def test_every_dtype_op_and_option_works_again(strategies, way, options):
    """The same result each time, for the numbers of every dtype in the table."""
    if options == "float16" and strategies[OFF].extended._collectives.layout.num_replicas == 5:
        pytest.skip("wire_dtype is refused with num_replicas")
    chosen = ms.CommunicationOptions(**OPTIONS[options])
    cases = [(op, char) for op in OPS for char in CHARS if may_move(way, op, char)]

    def call(replica, time):
        return [
            moved(replica, way, op, whole_numbers(replica, time, 6, char), chosen)
            for op, char in cases
        ]

    if way == "scan" and options != "default":
        pytest.skip("scan takes no options")
    assert_same_bits(strategies, call)


@settings(max_examples=25)
@given(data=st.data(), op=st.sampled_from(OPS), deterministic=st.booleans())
def test_nests_of_any_arrays(strategies, data, op, deterministic):
    nest = data.draw(nests_of(specs(op)))
    options = ms.CommunicationOptions(deterministic=deterministic)

    def call(replica, time):
        own = build(nest, (replica.replica_id_in_sync_group, time))
        return replica.all_reduce(op, own, options if deterministic else None)

    assert_same_bits(strategies, call)


@settings(max_examples=25)
@given(
    data=st.data(),
    op=st.sampled_from(["sum", "mean", "min", "max", "prod"]),
    length=st.sampled_from([1, 3, 2049, 70_000]),
)
def test_any_float32_numbers(strategies, data, op, length):
    """Drawn by the bit: also NaN, infinities and subnormal ones."""
    drawn = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30))
    few = np.array(drawn, np.uint32).view(np.float32)

    def call(replica, time):
        start = 3 * replica.replica_id_in_sync_group + time
        return replica.all_reduce(op, np.resize(np.roll(few, start), length))

    with np.errstate(all="ignore"):
        assert_same_bits({way: strategies[way] for way in ("memory", OFF)}, call)


def overlapping(kind, memory, length):
    """Return a value and an output in `memory`, two objects, and the elements of each."""
    first = slice(0, length)
    if kind == "same":
        return memory[first], memory[first]
    if kind == "reshaped":
        return memory[first].reshape(length, 1), memory[first].reshape(length, 1)
    if kind == "bytes":
        again = np.frombuffer(memory.data, memory.dtype)[first]
        return memory[first], again
    if kind == "ahead":
        return memory[first], memory[1 : length + 1]
    if kind == "behind":
        return memory[1 : length + 1], memory[first]
    if kind == "reversed":
        return memory[first], memory[first][::-1]
    assert kind == "strided"
    return memory[: 2 * length : 2], memory[1 : 2 * length : 2][:length]


KINDS = ["same", "reshaped", "bytes", "ahead", "behind", "reversed", "strided"]


@pytest.mark.parametrize("kind", thorough_but(KINDS, ["same", "ahead"]))
@pytest.mark.parametrize(
    "options", thorough_but(["default", "MPI", "shared", "deterministic"], ["MPI"])
)
def test_out_in_the_memory_of_the_value(strategies, kind, options):
    """By address: two objects over the same memory, or over memory that overlaps."""
    chosen = None if options == "default" else ms.CommunicationOptions(**OPTIONS[options])
    for strategy, dtype, length, is_nest in itertools.product(
        strategies.values(), ("f4", "i8", "f2", "c16"), (1, 3, 5000, 70_000), (False, True)
    ):
        total = sum(range(1, strategy.num_replicas_in_sync + 1))

        def step(dtype=dtype, length=length, is_nest=is_nest, total=total):
            replica = ms.get_replica_context()
            for _ in range(TIMES):
                memory = np.full(2 * length + 2, replica.replica_id_in_sync_group + 1, dtype)
                value, out = overlapping(kind, memory, length)
                given = {"a": value, "b": [memory[-1:]]} if is_nest else value
                goal = {"a": out, "b": [memory[-1:]]} if is_nest else out
                assert replica.all_reduce("sum", given, chosen, out=goal) is goal
                assert (out == total).all()
                assert not is_nest or memory[-1] == total

        strategy.run(step)


@pytest.mark.parametrize("kind", ["one", "next", "ahead"])
@pytest.mark.parametrize("dtype", thorough_but(["f4", "f2", "c16", "g"], ["f4"]))
def test_out_in_the_memory_of_another_replica(kind, dtype):
    """Replicas of a rank share its memory, and all of them are read before any is written to."""
    with all_opened(["memory", OFF], num_replicas=6) as opened:
        for strategy, length in itertools.product(opened.values(), (3, 5000, 70_000)):
            ids = strategy.extended._replica_set.ids
            memory = np.empty(len(ids) * length + 1, dtype)
            rows = [memory[i * length : (i + 1) * length] for i in range(len(ids))]

            def step(memory=memory, rows=rows, ids=ids, length=length):
                position = ids.index(ms.get_replica_context().replica_id_in_sync_group)
                value = rows[0 if kind == "one" else position]
                out = rows[0 if kind == "one" else (position + 1) % len(ids)]
                if kind == "ahead":
                    out = memory[position * length + 1 : (position + 1) * length + 1]
                ms.get_replica_context().all_reduce("sum", value, out=out)

            for _ in range(TIMES):
                for each, row in zip(ids, rows, strict=True):
                    row[...] = each + 1
                if kind == "one":
                    rows[0][...] = 2
                strategy.run(step)
                expected = 12 if kind == "one" else 21
                written = memory[:length] if kind == "one" else memory[1 : len(ids) * length]
                assert (written == expected).all()


def test_the_table_of_dtypes_is_whole():
    assert {each.char for each in DTYPES} >= set(CHARS)
