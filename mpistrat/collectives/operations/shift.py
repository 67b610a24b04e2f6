"""Shift: each rank gets the arrays of the rank `offset` places before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arguments import as_bool, as_integer
from mpistrat.arrays import Array, host_view, is_number, native
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import Operation, check_sendable, described
from mpistrat.collectives.operations.all_to_all import exchange_flat
from mpistrat.comm.packing import placed_like
from mpistrat.comm.wire import is_floating


@dataclass
class Shift(Operation):
    """`ReplicaContext.shift`."""

    offset: int
    is_periodic: bool
    fill: Any

    @classmethod
    def parse(cls, offset: Any, periodic: Any, fill: Any) -> Shift:
        """Return the operation for arguments as users pass them."""
        if np.ndim(fill) != 0 or not is_number(fill if np.isscalar(fill) else np.asarray(fill)[()]):
            raise TypeError(f"shift: fill must be a number, not {fill!r}.")
        is_periodic = as_bool("shift: periodic", periodic)
        return cls(as_integer("shift: offset", offset), is_periodic, fill)

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Send whole arrays, or fill them if no rank sends one. **Collective**."""
        check_sendable(call.kind, arrays)
        fills = [_filling(self.fill, array.dtype.newbyteorder("=")) for array in arrays]
        shown = " and ".join(dict.fromkeys(map(str, fills)))
        call.agree(
            f"offset {self.offset}, periodic {self.is_periodic}, fill {shown}",
            described(arrays),
            structure,
        )
        rank, size = call.channel.rank, call.channel.size
        target, source = rank + self.offset, rank - self.offset
        if self.is_periodic:
            target, source = target % size, source % size
        results = []
        for array, fill in zip(arrays, fills, strict=True):
            sent = native(host_view(array)).reshape(-1)
            counts = [sent.size if each == target else 0 for each in range(size)]
            incoming = [sent.size if each == source else 0 for each in range(size)]
            # Also on ranks that send or receive nothing, because the exchange is collective.
            came = exchange_flat(call, sent[: sum(counts)], counts, incoming)
            if not 0 <= source < size:
                came = np.full(sent.size, fill, fill.dtype)
            results.append(placed_like(came.reshape(array.shape), array))
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Shift the gradients back; beyond the ends they are zero. **Collective**."""
        return Shift(-self.offset, self.is_periodic, 0).forward(call, gradients, "gradient")


def _filling(fill: Any, dtype: np.dtype) -> np.ndarray:
    """Return the number `fill` as an array of `dtype`, which must be able to hold it."""
    made = np.zeros((), dtype)
    if not (dtype.kind in "biufc" or is_floating(dtype)):
        fits = fill == 0
    else:
        try:
            with np.errstate(all="ignore"):
                made[...] = fill
            # Floats round numbers that they cannot hold, integers would wrap.
            fits = dtype.kind not in "biu" or bool(made == fill)
        except (TypeError, ValueError, OverflowError):
            fits = False
    if not fits:
        raise ValueError(f"shift: fill {fill!r} is not a value of the dtype {dtype} of the array.")
    return made
