"""The shapes of ResNet-50, and random arrays of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Bottleneck blocks in each stage, and their width (He et al., 2016, table 1)."""


def _normalized(*kernel: int) -> list[tuple[int, ...]]:
    """Return the shapes of a convolution and of the scale and offset of its normalization."""
    return [kernel, (kernel[0],), (kernel[0],)]


def _shapes() -> tuple[tuple[int, ...], ...]:
    shapes = _normalized(64, 3, 7, 7)
    channels = 64
    for num_blocks, width in _STAGES:
        for block in range(num_blocks):
            shapes += _normalized(width, channels, 1, 1)
            shapes += _normalized(width, width, 3, 3)
            shapes += _normalized(4 * width, width, 1, 1)
            if block == 0:
                shapes += _normalized(4 * width, channels, 1, 1)
            channels = 4 * width
    return (*shapes, (1000, channels), (1000,))


SHAPES = _shapes()
NUM_PARAMETERS = sum(prod(shape) for shape in SHAPES)


def random_arrays(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return float32 arrays of `shapes` with numbers as small as gradients."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    for array in arrays:
        array *= np.float32(1e-3)
    return arrays
