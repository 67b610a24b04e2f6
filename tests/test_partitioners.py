"""Partitioners: the counts of TensorFlow 2.21, and what holds for any shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner

MIB = 1 << 20
COUNTS = [
    *[(FixedShardsPartitioner(n), (10, 3), "f4", min(n, 10)) for n in (1, 2, 3, 10, 20)],
    (FixedShardsPartitioner(2), (1, 5), "f4", 1),
    (MinSizePartitioner(4, 2), (6, 1), "f4", 2),
    (MinSizePartitioner(4, 10), (6, 1), "f4", 6),
    *[
        (MinSizePartitioner(size, 100), (6, 1), "f4", count)
        for size, count in zip((1, 4, 5, 8, 12, 24, 25), (6, 6, 5, 3, 2, 1, 1), strict=True)
    ],
    (MinSizePartitioner(), (1024, 1024), "f4", 1),
    (MinSizePartitioner(max_shards=8), (1024, 1024), "f4", 8),
    (MinSizePartitioner(max_shards=100), (1024, 1024), "f4", 16),
    (MinSizePartitioner(100, 5), (13, 7), "f8", 5),
    *[
        (MaxSizePartitioner(size), (6, 1), "f4", count)
        for size, count in zip((1, 4, 8, 12, 23, 24, 1024), (6, 6, 3, 2, 2, 1, 1), strict=True)
    ],
    *[(MaxSizePartitioner(4, most), (6, 1), "f4", min(most, 6)) for most in (2, 4, 100)],
    (MaxSizePartitioner(MIB), (1024, 1024), "f4", 4),
    (MaxSizePartitioner(300_000), (1024, 1024), "f4", 15),
    (MaxSizePartitioner(100), (13, 7), "f8", 13),
    (MinSizePartitioner(1, 100), (5,), "?", 5),
    (MaxSizePartitioner(3), (5,), "?", 2),
    (MinSizePartitioner(1, 100), (0, 4), "f4", 1),
    (MaxSizePartitioner(1), (0, 4), "f4", 1),
    (FixedShardsPartitioner(3), (0,), "f4", 1),
    (MaxSizePartitioner(1), (4, 0), "f4", 1),
]


@pytest.mark.parametrize(("partitioner", "shape", "dtype", "count"), COUNTS, ids=str)
def test_counts(partitioner, shape, dtype, count):
    assert partitioner(shape, dtype) == [count, *[1] * (len(shape) - 1)]


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis(axis):
    assert FixedShardsPartitioner(4)((6, 8), np.float32, axis=axis) == [1, 4]


EACH = [FixedShardsPartitioner(2), MinSizePartitioner(1, 2), MaxSizePartitioner(1)]


@pytest.mark.parametrize("partitioner", EACH, ids=repr)
def test_shapes_and_axes_that_cannot_be(partitioner):
    with pytest.raises(ValueError, match="scalar"):
        partitioner((), "f4")
    for axis in (2, -3):
        with pytest.raises(ValueError, match="axis"):
            partitioner((4, 4), "f4", axis)
    with pytest.raises(TypeError, match="axis"):
        partitioner((4, 4), "f4", 0.5)


@pytest.mark.parametrize("number", [0, -1])
def test_numbers_below_one_are_refused(number):
    for make in (
        lambda: FixedShardsPartitioner(number),
        lambda: MinSizePartitioner(number),
        lambda: MinSizePartitioner(1, number),
        lambda: MaxSizePartitioner(number),
        lambda: MaxSizePartitioner(1, number),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            make()


@pytest.mark.parametrize("value", [1.0, "2", None, True])
def test_what_is_no_integer_is_refused(value):
    for make in (FixedShardsPartitioner, MinSizePartitioner, MaxSizePartitioner):
        with pytest.raises(TypeError, match="integer"):
            make(value)
    with pytest.raises(TypeError, match="integer"):
        MinSizePartitioner(1, value)


def test_it_says_what_it_is():
    shown = repr(ms.partitioners.MinSizePartitioner(5, 2))
    assert shown == "MinSizePartitioner(min_shard_bytes=5, max_shards=2)"


@given(
    rows=st.integers(0, 200),
    row=st.integers(1, 50),
    size=st.integers(1, 2000),
    most=st.none() | st.integers(1, 300),
)
def test_any_size(rows, row, size, most):
    (count, _) = MaxSizePartitioner(size, most)((rows, row), "u1")
    assert 1 <= count <= max(rows, 1)
    assert most is None or count <= most
    if most is None:
        assert -(-rows // count) * row <= max(size, row)
        assert count == 1 or -(-rows // (count - 1)) * row > size
    (count, _) = MinSizePartitioner(size, most or 300)((rows, row), "u1")
    assert 1 <= count <= min(max(rows, 1), most or 300)
    assert count == 1 or (count - 1) * size < rows * row
