"""Broadcast: the arrays of one rank, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arguments import as_integer
from mpistrat.arrays import Array, host_copy_to_send
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import Operation, check_sendable, described
from mpistrat.collectives.reduction import dtype_name
from mpistrat.comm.packing import placed_like
from mpistrat.comm.wire import named_dtype
from mpistrat.options import ReduceOp


@dataclass
class FromRoot(Operation):
    """An operation on the arrays of one rank, whose shapes and dtypes other ranks have learned."""

    root: int

    @classmethod
    def parse(cls, root: Any, size: int) -> FromRoot:
        """Return the operation for arguments as users pass them."""
        return cls(as_integer(f"{cls.__name__.lower()}: root", root, 0, size - 1))

    def check(self, call: CollectiveCall, arrays: Sequence[Array]) -> None:
        """Raise for arrays for which ranks that pass ``None`` cannot allocate memory."""
        check_sendable(call.kind, arrays)
        for array in arrays:
            dtype = np.dtype(array.dtype)
            try:
                there = np.empty(0, named_dtype(dtype_name(dtype))).dtype
            except (TypeError, ValueError, SyntaxError):
                there = None
            if there != dtype.newbyteorder("="):
                raise TypeError(
                    f"{call.kind}: an array of dtype {dtype} cannot be sent, as its dtype has no "
                    "name by which other ranks find it. Send its fields, or its bytes as "
                    "array.view(np.uint8)."
                )


class Broadcast(FromRoot):
    """`ReplicaContext.broadcast`."""

    def forward(
        self,
        call: CollectiveCall,
        arrays: Sequence[Array],
        structure: object = (),
        out: Sequence[np.ndarray] | None = None,
    ) -> list[Array]:
        """Copy the arrays of the root, once the ranks agree on their shapes. **Collective**."""
        # `out` are contiguous arrays on the host; on the root they are the `arrays`.
        is_root = call.channel.rank == self.root
        results = []
        with call.moving():
            for number, array in enumerate(arrays):
                if out is not None:
                    buffer = out[number]
                elif is_root:
                    buffer = host_copy_to_send(array)
                else:
                    dtype = np.dtype(array.dtype).newbyteorder("=")
                    buffer = np.empty(tuple(array.shape), dtype)
                call.note_moved(buffer.nbytes, "broadcast")
                call.channel.transport.broadcast(buffer, self.root)
                results.append(placed_like(buffer, array) if out is None else buffer)
        call.show_received(results)
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the sum on the root, and zeros on the other ranks. **Collective**."""
        reduced = call.reduce(ReduceOp.SUM, gradients, self.root)
        return [np.zeros_like(each) for each in gradients] if reduced is None else reduced


def broadcast(call: CollectiveCall, array: Array, *details: object, root: int = 0) -> Array:
    """Return the `array` of `root` on every rank, in its own memory. **Collective**."""
    # The ranks must agree on shape, dtype and `details`.
    call.agree(f"from rank {root}", *described([array]), *details)
    return Broadcast(root).forward(call, [array])[0]


def broadcast_each(
    call: CollectiveCall, buffers: Sequence[np.ndarray], roots: Sequence[int]
) -> None:
    """Overwrite each of `buffers` with its root's buffer, once agreed. **Collective**."""
    with call.moving():
        call.channel.transport.broadcast_each(buffers, roots)
    call.show_received(buffers)
