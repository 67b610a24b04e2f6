"""Update rules: what an optimizer does to each element, written for the host and the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Rule", "Step", "compute_dtype", "real_parts", "slot_dtype"]


@dataclass(frozen=True)
class Rule:
    """One element-wise update of a weight and its slots by a gradient."""

    name: str
    """Of the device's kernel: letters and underscores."""
    slots: tuple[str, ...]
    """Names of the slots, in the order in which they are given."""
    constants: tuple[str, ...]
    """Names of the numbers that it takes, in the order in which they are given."""
    on_host: Callable[..., None]
    """``on_host(weight, gradient, slots, constants, scratch)`` writes weight and slots in place.

    All are 1-d arrays of one floating dtype and equal length, constants 0-d ones. `gradient`
    must stay as it is; `scratch` may hold anything."""
    on_device: str
    """The same in CUDA C++ on ``weight``, ``gradient``, the slots and the constants by name."""


@dataclass(frozen=True)
class Step:
    """The numbers of one step, equal on all ranks and for all variables."""

    constants: tuple[float, ...]
    """For the constants of the rule."""
    keep: float = 1.0
    """What a weight is multiplied by before: the weight decay."""
    factor: float = 1.0
    """What a gradient is multiplied by before: clipping and the inverse of the loss scale."""


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """Return the real dtype in which elements of `dtype` are updated. Local.

    float32 for the halves, whose squares and small steps would vanish. Complex numbers are
    updated as pairs of real ones.
    """
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    real: np.dtype = np.dtype(dtype.char.lower())
    return real


def slot_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the slots of a variable of `dtype`. Local."""
    return dtype if dtype.kind == "c" else compute_dtype(dtype)


def real_parts(arrays: Sequence[Any]) -> list[Any]:
    """Return each array in C order as a 1-d view, complex ones as pairs of real ones. Local."""
    flat = [array.reshape(-1) for array in arrays]
    return [a.view(compute_dtype(a.dtype)) if a.dtype.kind == "c" else a for a in flat]
