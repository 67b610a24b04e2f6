"""Update rules: what an optimizer does to each element, in C and in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array, address_of, addresses_of
from mpistrat.comm.dtypes import is_narrow
from mpistrat.optimizers.kernels import Kernel

__all__ = ["Memory", "Rule", "Step", "Target", "compute_dtype", "flat_real", "slot_dtype"]


@dataclass(frozen=True, eq=False)
class Rule:
    """One element-wise update of a weight and its slots by a gradient."""

    kernel: Kernel
    in_numpy: Callable[..., None]
    """The same to the bit as ``in_numpy(weight, gradient, slots, constants, scratch)``, in place.

    All are 1-d arrays of one floating dtype and equal length, constants 0-d ones. `gradient`
    must stay as it is; `scratch` may hold anything."""


@dataclass(frozen=True)
class Step:
    """The numbers of one step, equal on all ranks and for all variables."""

    constants: tuple[float, ...]
    """For the constants of the kernel."""
    keep: float = 1.0
    """What a weight is multiplied by before: the weight decay."""
    factor: float = 1.0
    """What a gradient is multiplied by before: clipping and the inverse of the loss scale."""


class Target:
    """What a rule writes to: a weight and its slots, whose memory stays where it is.

    Parameters
    ----------
    weight : array
        In C order.
    slots : sequence of arrays
        In C order, of the same shape and of `slot_dtype`.
    """

    def __init__(self, weight: Array, slots: Sequence[Array]) -> None:
        self.weight = weight
        self.slots = slots
        self.flat_weight, *self.flat_slots = map(flat_real, (weight, *slots))
        self.compute_dtype = compute_dtype(self.flat_weight.dtype)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where the memory of each begins and ends."""
        arrays = (self.weight, *self.slots)
        return [(address_of(each), address_of(each) + each.nbytes) for each in arrays]

    @functools.cached_property
    def memory(self) -> Memory:
        """Of this target alone, on the host."""
        return Memory([self])


class Memory:
    """Where several targets of one compute dtype lie on the host, as C takes it.

    Parameters
    ----------
    targets : sequence of Target
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.count = len(targets)
        self.sizes = np.array([target.flat_weight.size for target in targets], np.intp).tobytes()
        self.addresses = addresses_of(
            [array for target in targets for array in (target.weight, *target.slots)]
        )


@functools.lru_cache
def compute_dtype(dtype: np.dtype) -> np.dtype:
    """Return the real dtype in which elements of `dtype` are updated. Local.

    float32 for the halves, whose squares and small steps would vanish. Complex numbers are
    updated as pairs of real ones.
    """
    if is_narrow(dtype):
        return np.dtype(np.float32)
    real: np.dtype = np.dtype(dtype.char.lower())
    return real


def slot_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the slots of a variable of `dtype`. Local."""
    return dtype if dtype.kind == "c" else compute_dtype(dtype)


def flat_real(array: Array) -> Array:
    """Return a 1-d view of `array` in C order, of pairs of real numbers if it is complex. Local."""
    flat = array.reshape(-1)
    return flat.view(compute_dtype(flat.dtype)) if flat.dtype.kind == "c" else flat
