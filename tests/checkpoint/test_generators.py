"""Random generators go on where they were saved."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.object_graph import DeviceGeneratorState
from tests.devices import array_equal


class DeviceBits:
    """Keeps its state as CuPy's bit generators do, in host memory."""

    def __init__(self, seed, size=1000):
        self._state = np.random.default_rng(seed).integers(-128, 128, size, np.int8)


class DeviceGenerator:
    """Stands for `cupy.random.Generator`."""

    def __init__(self, seed, size=1000):
        self.bit_generator = DeviceBits(seed, size)


DeviceGenerator.__module__ = "cupy.random._generator_api"


def test_a_random_state_goes_on_where_it_was(tmp_path):
    generator, other = np.random.RandomState(1), np.random.RandomState(2)
    generator.standard_normal(3)  # leaves a number behind
    path = ms.Checkpoint(rng=generator).write(tmp_path / "run.h5")
    expected = generator.standard_normal(5)
    ms.Checkpoint(rng=other).restore(path).assert_consumed()
    assert other.standard_normal(5).tolist() == expected.tolist()


def test_a_device_generator_gets_its_state_back_in_place(tmp_path):
    saved, other = DeviceGenerator(1), DeviceGenerator(2)
    path = ms.Checkpoint(rng=saved).write(tmp_path / "run.h5")
    memory = other.bit_generator._state
    ms.Checkpoint(rng=other).restore(path).assert_consumed()
    assert other.bit_generator._state is memory
    assert array_equal(memory, saved.bit_generator._state)


@pytest.mark.parametrize("change", [{"bit_generator": "XORWOW"}, {"state": np.zeros(8, np.int8)}])
def test_the_state_of_another_device_generator_is_refused(change):
    bits = DeviceBits(1)
    state = DeviceGeneratorState(bits)
    before = bits._state.copy()
    with pytest.raises(ValueError, match="given to a DeviceBits of 1000"):
        state.load_state_dict({**state.state_dict(), **change})
    assert array_equal(bits._state, before)
