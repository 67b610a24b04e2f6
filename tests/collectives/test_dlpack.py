"""Arrays of other libraries, taken through DLPack."""

import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import adopted, is_foreign
from tests.devices import assert_array_equal
from tests.helpers import triangle

CPU, CUDA, ROCM = 1, 2, 10


class Exported:
    """An array of another library, which NumPy knows through DLPack alone."""

    def __init__(self, array, device=CPU):
        self._array = array
        self._device = device

    def __dlpack__(self, **options):
        if self._device != CPU:
            raise AssertionError("memory of a device was asked for from the host")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device, 0


class WithArray(Exported):
    """One whose dtype DLPack does not have, which NumPy knows too."""

    def __dlpack__(self, **options):
        raise BufferError("Unsupported dtype")

    def __array__(self, dtype=None, copy=None):
        return self._array


@pytest.mark.parametrize("kind", [Exported, WithArray])
def test_collectives_take_arrays_of_other_libraries(strategy, rank, size, kind):
    def value():
        return kind(np.full((2, 3), rank, np.float32))

    def fn():
        replica = ms.get_replica_context()
        nest = replica.all_reduce("sum", {"there": value(), "here": np.ones(2)})
        started = replica.start_all_reduce("max", [value()]).wait()
        return nest, started, replica.all_gather(value(), 0), value()

    nest, started, gathered, returned = strategy.run(fn)
    for each, expected in (
        (nest["there"], np.full((2, 3), triangle(size))),
        (started[0], np.full((2, 3), size - 1)),
        (gathered, np.repeat(np.arange(size), 2)[:, None] * np.ones(3)),
    ):
        array = each.values[0]
        assert type(array) is np.ndarray
        assert array.dtype == np.float32
        assert_array_equal(array, expected)
    assert isinstance(returned, ms.PerReplica)
    assert (strategy.reduce("sum", returned) == triangle(size)).all()
    assert strategy.reduce("sum", value(), axis=None).shape == (2, 3)
    assert strategy.reduce("mean", returned, axis=0).shape == (3,)
    with strategy.scope():
        variable = ms.Variable(value(), name="w")
    variable.assign(kind(np.ones((2, 3), np.float32)))
    assert (variable.numpy() == 1).all()


def test_an_array_on_a_device_without_a_way_here_is_refused(strategy, size):
    with pytest.raises(TypeError, match=r"reduce .* type Exported .* device 10.*to the host"):
        strategy.reduce("sum", Exported(np.ones(2), ROCM))
    assert strategy.reduce("sum", 1) == size, "the strategy stays usable"


def test_arrays_on_cuda_need_cupy_or_a_way_over_the_host(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TypeError, match="cupy"):
        adopted("x", Exported(np.ones(2), CUDA))
    for device in (CUDA, ROCM):
        assert adopted("x", WithArray(np.ones(2), device)).tolist() == [1, 1]


def test_what_counts_as_foreign():
    assert is_foreign(Exported(np.ones(1)))
    for known in (np.ones(1), np.float32(1), 1.0, None, "text", Exported):
        assert not is_foreign(known)
    torch = pytest.importorskip("torch")
    assert not is_foreign(torch.ones(1))


def test_arrays_of_jax(strategy, rank, size):
    jnp = pytest.importorskip("jax.numpy")
    for dtype in ("float32", "int32", "bfloat16"):
        value = jnp.full((2,), rank, dtype)
        returned = strategy.run(lambda value=value: value)
        assert isinstance(returned, ms.PerReplica)
        total = strategy.reduce("sum", returned)
        assert type(total) is np.ndarray
        assert total.dtype.name == dtype
        assert total.tolist() == [triangle(size)] * 2
