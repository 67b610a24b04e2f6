"""The network of ``jobs/train_digits.py`` on plain arrays, in loops that differ in all else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.sharding import slice_of_rank

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
