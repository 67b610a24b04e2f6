"""Device arrays on their way: each pack is one array on the device, made by one concatenation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, namespace_of, on_device_of
from mpistrat.comm.message import Message
from mpistrat.comm.ordered import as_floats, as_ordered_integers
from mpistrat.comm.plan import Pack, Plan
from mpistrat.comm.pool import Pool

__all__ = ["DeviceMessage", "DevicePack"]


class DeviceMessage(Message):
    """A message of one array in device memory."""

    on_device = True


class DevicePack:
    """The arrays of one pack in the form in which they are reduced.

    Written once for any array namespace. CuPy's own pool recycles the memory.

    Parameters
    ----------
    plan : Plan
    pack : Pack
        Of `plan`, with arrays on the device.
    arrays : sequence of arrays
        Those of the whole call, never written to.
    pool : Pool
    copy : bool
        Whether the arrays may change before the reduction ends.
    """

    def __init__(
        self, plan: Plan, pack: Pack, arrays: Sequence[Array], pool: Pool, copy: bool
    ) -> None:
        self._plan = plan
        self._pack = pack
        first = arrays[pack.large[0] if pack.large else pack.small[0]]
        self._device = on_device_of(first)
        with self._device:
            source, self._target = self._ends([arrays[i] for i in pack.small] or [first], copy)
        self.message = DeviceMessage([source], [self._target], pool)

    def _ends(self, arrays: Sequence[Array], copy: bool) -> tuple[Array, Array]:
        """Return what is to be reduced, and where the result goes."""
        pack, first = self._pack, arrays[0]
        xp = namespace_of(first)
        is_plain = first.dtype == pack.wire and first.flags.c_contiguous
        if not pack.small and is_plain and not (copy or pack.is_reordered):
            source = first.view(pack.wire)  # C has two names for one integer
            return source, xp.empty(first.shape, dtype=pack.wire)
        if pack.small:
            flat = [array.reshape(-1) for array in arrays]
            target = xp.concatenate(flat, dtype=pack.wire, casting="unsafe")
        else:
            target = xp.array(first, dtype=pack.wire, order="C", copy=True)
        target = as_ordered_integers(self._plan.op, target)
        return target, target

    def unpack(self, results: list[Array]) -> None:
        """Write the result of each array to its place in `results`. Local.

        Those of one pack are parts of one allocation, where their dtype is what has travelled.
        """
        pack, op = self._pack, self._plan.op
        with self._device, np.errstate(all="ignore"):
            reduced = as_floats(op, self._target, pack.wire)
            for position in pack.large:
                results[position] = reduced.astype(self._plan.results[position][1], copy=False)
            for position, (start, stop) in zip(pack.small, pack.places, strict=True):
                shape, dtype = self._plan.results[position]
                part = reduced[start:stop].astype(dtype, copy=False)
                results[position] = part.reshape(shape)
