"""As much of ``cupy.random`` as examples use."""

import numpy as _np

from ._array import wrap as _wrap

_generator = _np.random.default_rng(0)


def seed(seed=None):
    global _generator
    _generator = _np.random.default_rng(seed)


class XORWOW:
    """A bit generator: its state is an array on the device."""

    def __init__(self, seed=None, *, size=1000):
        self._state = _wrap(_np.random.default_rng(seed).integers(0, 128, size, _np.int8))


class Generator:
    def __init__(self, bit_generator):
        self.bit_generator = bit_generator

    def random(self, size=None, dtype=float, out=None):
        state = self.bit_generator._state
        drawn = _np.random.default_rng(state._host.view(_np.uint8))
        found = drawn.random(size)
        state._host[...] = drawn.integers(0, 128, state.size, _np.int8)
        return _wrap(found)


def default_rng(seed=None):
    return Generator(XORWOW(seed))


def random(size=None):
    return _wrap(_generator.random(size))


def standard_normal(size=None, dtype=float):
    return _wrap(_generator.standard_normal(size).astype(dtype))
