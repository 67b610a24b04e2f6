"""Ridges of `mpistrat inspect --plot`: every value is in a bin, on an axis that fits all."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import create_checkpoint, variable_item
from mpistrat.cli import main
from mpistrat.cli.statistics import SymmetricLog, binned, choose_scale, finite_limits

ARRAYS = hnp.arrays(st.sampled_from(["f2", "f4", "f8", "i1", "u8", "i8", "?"]), st.integers(1, 40))


def ridge_of(*arrays):
    scale, start, stop = choose_scale([each for each in [finite_limits(arrays)] if each])
    edges = np.linspace(start, stop, 33)
    assert np.isfinite(edges).all()
    assert (np.diff(edges) > 0).all()
    return binned(arrays, scale, edges)


@given(ARRAYS)
def test_each_value_is_in_a_bin_or_is_not_finite(array):
    found = ridge_of(array[:5], array[5:]) if array.size > 5 else ridge_of(array)
    is_float = array.dtype.kind == "f"
    num_finite = int(np.isfinite(array).sum()) if is_float else array.size
    assert found.counts.sum() == num_finite
    assert found.num_nan == (int(np.isnan(array).sum()) if is_float else 0)
    assert found.num_infinite == array.size - num_finite - found.num_nan


def test_the_largest_and_the_smallest_floats_fit():
    info = np.finfo(np.float64)
    assert ridge_of(np.array([-info.max, info.max, info.smallest_subnormal])).counts.sum() == 3
    assert ridge_of(np.array([info.smallest_subnormal])).counts.sum() == 1


def test_magnitudes_of_complex_numbers():
    found = ridge_of(np.array([3 + 4j, 5, np.nan]))
    assert found.counts.sum() == found.counts.max() == 2
    assert found.num_nan == 1


def test_both_sides_of_zero_are_logarithmic():
    scale = SymmetricLog(1e-6)
    assert scale(0.0) == 0
    assert scale(-3.0) == -scale(3.0)
    assert scale(10.0) - scale(1.0) == pytest.approx(1, abs=1e-5)


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_there_are_some_ticks_but_not_many(one, other):
    scale, start, stop = choose_scale([(min(one, other), max(one, other))])
    ticks = scale.ticks(start, stop)
    assert len(ticks) <= 12
    assert all(math.isfinite(place) for place in ticks)
    assert all(start <= place <= stop for place in ticks)


def test_a_network_of_161_variables_in_one_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "network.h5"
    rng = np.random.default_rng(0)
    with create_checkpoint(path, Header(step=3)) as writer:
        for number in range(161):
            name = f"model/layer{number // 3}/variable{number % 3}"
            writer.add(variable_item(name, rng.normal(0, 10.0 ** -(number % 5), 50)))
    assert main(["inspect", str(path), "--plot", str(tmp_path / "out.png")]) == 0
    assert capsys.readouterr().err == ""
    with image.open(tmp_path / "out.png") as picture:
        assert picture.height > 161 * 25, "a row needs 25 pixels to be read"
