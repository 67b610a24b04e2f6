"""The devices on which tests run: ``pytest --device=gpu`` has strategies compute on GPUs.

Without a GPU that is done with the stand-in for CuPy (`tests/standin`).
"""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import cuda_api
from mpistrat.arrays import address_of

_chosen = "cpu"


def choose(kind):
    """Have the strategies of all tests compute on this kind of device."""
    global _chosen
    _chosen = kind


def kind():
    """Return the ``device=`` argument of the strategies of tests."""
    return _chosen


def name():
    """Return the kind of device as it is in device strings."""
    return kind().upper()


def index(rank):
    """Return the number of the device of a rank, all on one node."""
    return rank % max(cuda_api.count_gpus(), 1) if kind() == "gpu" else 0


def without_host_dtypes(dtypes):
    """Return parameters of a test, of which those that CuPy lacks are about host memory."""
    return [
        pytest.param(each, marks=pytest.mark.host_memory) if np.dtype(each).char in "gG" else each
        for each in dtypes
    ]


def implementation(name):
    """Return the way of reductions called `name`; MPI itself takes host memory only."""
    is_staged = name == "MPI" and kind() == "gpu"
    return ms.CommunicationImplementation["STAGED" if is_staged else name]


def on_host(value):
    """Return `value`, also arrays inside of lists, as NumPy arrays."""
    if isinstance(value, list | tuple):
        return type(value)(on_host(each) for each in value)
    if kind() == "cpu":
        return value
    if hasattr(type(value), "__cupy_get_ndarray__"):
        value = value.__cupy_get_ndarray__()
    return value.get() if hasattr(value, "get") else value


def placed(array):
    """Return `array` on the device, as an operand of what lies there."""
    return current_namespace().asarray(array) if isinstance(array, np.ndarray) else array


def shares_memory(first, second):
    """Return whether two arrays share memory, or on a device whether they begin together."""
    if kind() == "cpu":
        return np.shares_memory(first, second)
    return address_of(first) == address_of(second)


def current_namespace():
    """Return the array namespace of the device that is the current one."""
    return cuda_api.array_namespace() if kind() == "gpu" else np


def array_equal(found, expected):
    return np.array_equal(on_host(found), on_host(expected))


def assert_array_equal(found, expected, **options):
    np.testing.assert_array_equal(on_host(found), on_host(expected), **options)


def assert_allclose(found, expected, *tolerances, **options):
    np.testing.assert_allclose(on_host(found), on_host(expected), *tolerances, **options)
