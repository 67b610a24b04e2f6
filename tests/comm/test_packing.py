"""Packing of arrays into messages and back, with a fake for each reducer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.comm.pack_plan import plan_reduction
from mpistrat.comm.packing import _Single, pack
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import MpiReducer, ReduceScatterReducer
from mpistrat.comm.transport import SoloTransport
from mpistrat.options import CommunicationOptions, ReduceOp
from tests.random_arrays import LAYOUTS, OPS, Spec, assert_own, expected_of, specs

FOLDS = {
    ReduceOp.SUM: lambda numbers, size: numbers * numbers.dtype.type(size),
    ReduceOp.PROD: lambda numbers, size: numbers**size,
    ReduceOp.MIN: lambda numbers, size: numbers,
    ReduceOp.MAX: lambda numbers, size: numbers,
}


class EqualRanks(SoloTransport):
    """Three ranks that bring the same numbers, over a transport as demanding as MPI."""

    size = 3

    def all_reduce(self, op, source, target):
        for each in (source, target):
            assert each.flags.c_contiguous
            assert each.flags.aligned
            assert each.dtype.isnative
        assert (source.dtype, source.size) == (target.dtype, target.size)
        assert source is target or not np.may_share_memory(source, target)
        target[...] = FOLDS[op](source, self.size).reshape(target.shape)

    def start_all_reduce(self, op, source, target):
        return lambda: self.all_reduce(op, source, target)


class ByPieces:
    """Reduces each array of a message for itself, as in shared memory."""

    def __init__(self, transport):
        self.transport = transport

    def all_reduce(self, op, message):
        assert message.num_bytes == sum(source.nbytes for source in message.sources)
        moved = ReduceOp.SUM if op is ReduceOp.MEAN else op
        for source, target in zip(message.sources, message.targets, strict=True):
            assert source.dtype == message.dtype
            self.transport.all_reduce(moved, source, target)
            MpiReducer(self.transport)._finish(op, target)

    def start_all_reduce(self, op, message):
        return lambda: self.all_reduce(op, message)


WAYS = {
    "whole": MpiReducer(EqualRanks()),
    "by pieces": ByPieces(EqualRanks()),
    "by slices": ReduceScatterReducer(SoloTransport()),
}


def reduce(op, arrays, way, pool, options=CommunicationOptions(), start=False):  # noqa: B008
    """Do what `CollectiveCall` does, without agreement."""
    kinds = [(array.dtype, array.shape) for array in arrays]
    plan = plan_reduction(op, kinds, None, options)
    packing = pack(plan, arrays, pool, copy=start)
    assert all(
        message.num_bytes <= options.bytes_per_pack or len(message.sources) == 1
        for message in packing.messages
    )
    if start:
        ends = [WAYS[way].start_all_reduce(op, message) for message in packing.messages]
        for array in arrays:  # the program may write to its arrays
            if array.flags.writeable:
                array[...] = 1
        for end in ends:
            end()
    else:
        for message in packing.messages:
            WAYS[way].all_reduce(op, message)
    return packing.unpack()


@st.composite
def calls(draw):
    op = draw(st.sampled_from(OPS))
    return op, draw(st.lists(specs(op), max_size=8)), draw(st.sampled_from([1, 300, 20_000, 2**25]))


def check(op, each, way, bytes_per_pack=2**25, start=False):
    """Reduce arrays as `each` says, twice, and assert that it is right."""
    size = 1 if way == "by slices" else EqualRanks.size
    pool, options = Pool(), CommunicationOptions(bytes_per_pack=bytes_per_pack)
    held = []
    for _ in range(2):
        arrays = [spec.build(number) for number, spec in enumerate(each)]
        before = [array.copy() for array in arrays]
        results = reduce(ReduceOp.parse(op), arrays, way, pool, options, start)
        for was, array, result in zip(before, arrays, results, strict=True):
            expected = expected_of(op, [was] * size)
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(result, expected)
            assert start or array.tobytes() == was.tobytes()
        assert_own(results, [*arrays, *held])
        held = results
        for result in results:
            result[...] = 3


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30)
@given(call=calls(), start=st.booleans())
def test_packing_is_not_to_be_seen_in_the_results(way, call, start):
    op, each, bytes_per_pack = call
    check(op, each, way, bytes_per_pack, start)


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_alone_and_among_others(layout, way, start):
    for op, dtype in (("sum", "f4"), ("mean", "f8"), ("max", "f4"), ("sum", "i2"), ("mean", "u2")):
        specs = [Spec(np.dtype(dtype), shape, layout) for shape in ((300, 100), (70, 3), (9,), ())]
        check(op, specs, way, start=start)
        for spec in specs:
            check(op, [spec], way, start=start)


@pytest.mark.parametrize("layout", ["C", "read_only"])
@pytest.mark.parametrize("dtype", ["f4", "i8", "longlong", "c8", "u1"])
def test_one_plain_array_is_not_copied(layout, dtype):
    array = Spec(np.dtype(dtype), (300, 100), layout).build(0)
    plan = plan_reduction(ReduceOp.SUM, [(array.dtype, array.shape)], None, CommunicationOptions())
    packing = pack(plan, [array], Pool())
    assert isinstance(packing, _Single)
    (source,) = packing.messages[0].sources
    assert np.shares_memory(source, array)
    copied = pack(plan, [array], Pool(), copy=True)
    assert not np.may_share_memory(copied.messages[0].sources[0], array)


def test_large_arrays_among_others_are_not_copied():
    arrays = [np.ones(size, np.float32) for size in (10, 100_000, 20, 50_000)]
    kinds = [(array.dtype, array.shape) for array in arrays]
    plan = plan_reduction(ReduceOp.MEAN, kinds, None, CommunicationOptions())
    (message,) = pack(plan, arrays, Pool()).messages
    assert [source.size for source in message.sources] == [30, 100_000, 50_000]
    assert np.shares_memory(message.sources[1], arrays[1])
    assert np.shares_memory(message.sources[2], arrays[3])


@pytest.mark.parametrize("is_plain", [False, True])
def test_small_results_do_not_lie_in_the_buffer_of_the_pack(is_plain):
    arrays = [np.full(shape, number, np.float32) for number, shape in enumerate([(3,), (2, 2), ()])]
    kinds = [(array.dtype, array.shape) for array in arrays]
    options = CommunicationOptions()
    plan = plan_reduction(ReduceOp.SUM, kinds, None, options, is_plain=is_plain)
    packing = pack(plan, arrays, Pool())
    (message,) = packing.messages
    WAYS["whole"].all_reduce(ReduceOp.SUM, message)
    results = packing.unpack()
    (buffer,) = message.targets
    buffer[...] = -1  # as a later reduction does, which gets the same memory
    for array, result in zip(arrays, results, strict=True):
        assert not np.shares_memory(result, buffer)
        np.testing.assert_array_equal(result, 3 * array)


@given(call=calls())
def test_every_array_has_one_place_in_a_plan(call):
    op, each, bytes_per_pack = call
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    kinds = [(spec.dtype, spec.shape) for spec in each]
    plan = plan_reduction(ReduceOp.parse(op), kinds, None, options)
    placed = [i for one in plan.packs for i in (*one.small, *one.large)]
    assert sorted(placed) == list(range(len(each)))
    for one in plan.packs:
        lengths = [int(np.prod(each[i].shape)) for i in one.small]
        assert [stop - start for start, stop in one.spans] == lengths
        assert one.small_size == sum(lengths)
        assert all(
            start == stop for (_, stop), (start, _) in zip(one.spans, one.spans[1:], strict=False)
        )
    assert [shape for shape, _ in plan.results] == [spec.shape for spec in each]
