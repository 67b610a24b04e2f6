"""The tree of a deterministic reduction, against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.comm.ops import combine
from mpistrat.options import ReduceOp
from tests.tree_reduction import fold_in_tree

sizes = st.integers(1, 40)


class Word(str):
    """Addition that shows its order."""

    def __add__(self, other):
        return Word(f"({self} {other})")


@given(sizes)
def test_the_order_is_that_of_the_ranks(size):
    pieces = np.array([[Word(rank)] for rank in range(size)], dtype=object)
    (result,) = combine(ReduceOp.SUM, pieces)
    assert result.replace("(", "").replace(")", "") == " ".join(map(str, range(size)))
    assert result == fold_in_tree(lambda a, b: a + b, [Word(rank) for rank in range(size)])


@given(sizes, st.integers(1, 70), st.integers(0, 2**32), st.sampled_from(list(ReduceOp)))
def test_an_element_does_not_depend_on_its_neighbours(size, length, seed, op):
    random = np.random.default_rng(seed)
    pieces = (random.normal(size=(size, length)) * 10.0 ** random.integers(-9, 9, length)).astype(
        np.float32
    )
    whole = combine(op, pieces.copy())
    for start in range(0, length, 7):
        part = combine(op, pieces[:, start : start + 7].copy())
        assert part.tobytes() == whole[start : start + 7].tobytes()


@pytest.mark.parametrize("char", "FD")
def test_complex_products_do_not_depend_on_their_place(char):
    random = np.random.default_rng(3)
    pieces = (random.normal(size=(5, 99)) + 1j * random.normal(size=(5, 99))).astype(char)
    whole = combine(ReduceOp.PROD, pieces.copy())
    for width in (1, 2, 3, 5):
        parts = [
            combine(ReduceOp.PROD, pieces[:, start : start + width].copy())
            for start in range(0, 99, width)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("char", "fdFD")
def test_every_nan_is_the_same(char):
    odd = np.array([np.nan, -np.nan, np.inf], char)
    pieces = np.array([np.roll(odd, shift) for shift in range(3)])
    pieces[1] = -pieces[1]
    result = combine(ReduceOp.SUM, pieces.copy())
    assert result.tobytes() == combine(ReduceOp.SUM, pieces[::-1].copy()).tobytes()
    parts = result.view(np.dtype(char).type(0).real.dtype)
    assert not np.signbit(parts[np.isnan(parts)]).any()


def test_overflow_is_silent():
    pieces = np.full((3, 2), 3e38, np.float32)
    assert np.isposinf(combine(ReduceOp.SUM, pieces)).all()
