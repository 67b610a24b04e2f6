"""Networks of the benchmarks: the shapes of ResNet-50, and a small one on plain arrays.

The small one is that of ``jobs/train_digits.py``, for training loops that differ in all else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mpistrat.sharding import slice_of_rank

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


LAYER_SIZES = (64, 128, 64, 10)
_GLOBAL_BATCH_SIZE = 128

Tape = list[np.ndarray]
"""The input of each layer, which `backward` needs."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch."""

    image: np.ndarray
    """Shape ``(local_batch_size, 64)``, uint8 up to 16."""
    label: np.ndarray
    """Shape ``(local_batch_size,)``, integers below 10."""
    global_size: int
    """Examples over all ranks."""


def random_batch(rank: int, size: int) -> Batch:
    """Return the part of `rank` of a batch of 128 random examples."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 17, (_GLOBAL_BATCH_SIZE, LAYER_SIZES[0]), np.uint8)
    label = rng.integers(0, LAYER_SIZES[-1], _GLOBAL_BATCH_SIZE)
    part = slice_of_rank(_GLOBAL_BATCH_SIZE, size, rank)
    return Batch(image[part], label[part], _GLOBAL_BATCH_SIZE)


def first_weights() -> list[np.ndarray]:
    """Return kernel and bias of each layer in turn, float32, equal on all ranks."""
    rng = np.random.default_rng(0)
    weights = []
    for n, m in itertools.pairwise(LAYER_SIZES):
        weights.append((rng.standard_normal((n, m)) / np.sqrt(n)).astype(np.float32))
        weights.append(np.zeros(m, np.float32))
    return weights


def forward(weights: Sequence[np.ndarray], image: np.ndarray) -> tuple[np.ndarray, Tape]:
    """Return the logits of shape ``(local_batch_size, 10)``, and the tape."""
    x = image.astype(np.float32) / 16
    tape = []
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        tape.append(x)
        logits = x @ kernel + bias
        x = np.tanh(logits)
    return logits, tape


def cross_entropy(logits: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each example, and the gradient of their sum with respect to the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    target = (label[:, None] == np.arange(logits.shape[1])).astype(np.float32)
    return -(target * log_probability).sum(axis=1), np.exp(log_probability) - target


def backward(weights: Sequence[np.ndarray], tape: Tape, error: np.ndarray) -> list[np.ndarray]:
    """Return the gradients in the order of `weights`, from that of the logits."""
    gradients: list[np.ndarray] = []
    for kernel, x in zip(reversed(weights[::2]), reversed(tape), strict=True):
        gradients = [x.T @ error, error.sum(axis=0), *gradients]
        error = (error @ kernel.T) * (1 - x * x)  # the slope of tanh
    return gradients
