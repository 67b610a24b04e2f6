"""Scan: the reduction over the ranks up to each one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arguments import as_bool
from mpistrat.arrays import Array, host_view
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import Operation, described
from mpistrat.comm.ops import combined_pair, finish
from mpistrat.comm.packing import placed_like
from mpistrat.comm.wire import cast, identity, result_dtype, wire_dtype
from mpistrat.options import ReduceOp, ReduceOpLike
from mpistrat.sharding import cut

_PIECE_BYTES = 2**20
"""Bytes of the pieces in which a scan sends long arrays, so that all ranks work in parallel."""


@dataclass
class Scan(Operation):
    """`ReplicaContext.scan`."""

    op: ReduceOp
    is_exclusive: bool
    is_reversed: bool = False
    """Whether the scan begins at the last rank."""

    @classmethod
    def parse(cls, op: ReduceOpLike, exclusive: Any) -> Scan:
        """Return the operation for arguments as users pass them."""
        parsed = ReduceOp.parse(op)
        if parsed is ReduceOp.MEAN:
            raise ValueError("scan: MEAN has no meaning for a part of the ranks. Use SUM.")
        return cls(parsed, as_bool("scan: exclusive", exclusive))

    @property
    def has_gradient(self) -> bool:
        """Whether the reduction is a sum."""
        return self.op is ReduceOp.SUM

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Combine the array from the previous rank, and pass it on. **Collective**."""
        dtypes = [np.dtype(array.dtype) for array in arrays]
        wires = [wire_dtype(self.op, dtype) for dtype in dtypes]
        how = f"{self.op.name}, {'exclusive' if self.is_exclusive else 'inclusive'}"
        call.agree(how, described(arrays), structure)
        results = []
        with call.moving():
            for array, dtype, wire in zip(arrays, dtypes, wires, strict=True):
                own = cast(host_view(array), wire).reshape(-1)
                scanned = self._fold(call, own, identity(self.op, wire, dtype))
                finish(self.op, scanned, call.channel.size)
                result = cast(scanned, result_dtype(self.op, dtype)).reshape(array.shape)
                results.append(placed_like(result, array))
        call.show_received(results)
        return results

    def _fold(self, call: CollectiveCall, own: np.ndarray, first: Any) -> np.ndarray:
        """Return the reduction of earlier ranks, with `own` unless exclusive. **Collective**."""
        call.note_moved(own.nbytes, "scan")
        if not self.is_reversed:
            return self._fold_forwards(call, own, first)
        # Replicas of one rank run in order, so for the reverse order the arrays are mirrored first.
        return _mirrored(call, self._fold_forwards(call, _mirrored(call, own), first))

    def _fold_forwards(self, call: CollectiveCall, own: np.ndarray, first: Any) -> np.ndarray:
        rank, size, transport = call.channel.rank, call.channel.size, call.channel.transport
        result = np.empty_like(own)
        for part in cut(own.size, max(_PIECE_BYTES // own.itemsize, 1)):
            folded = own[part]
            if rank > 0:
                came = np.empty_like(folded)
                # A chain: rank 0 receives nothing, and each other rank receives before it sends. So
                # blocking sends cannot wait for each other in a cycle.
                transport.receive(came, rank - 1)
                with np.errstate(all="ignore"):
                    folded = combined_pair(self.op, came, folded, np.empty_like(folded))
            else:
                came = np.full_like(folded, first)
            if rank + 1 < size:
                # Sent before the result of this part is stored, so that the next rank can begin.
                transport.send(folded, rank + 1)
            result[part] = came if self.is_exclusive else folded
        return result

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Add up the gradients of the ranks from this one on. **Collective**."""
        back = Scan(self.op, self.is_exclusive, not self.is_reversed)
        return back.forward(call, gradients, "gradient")


def _mirrored(call: CollectiveCall, own: np.ndarray) -> np.ndarray:
    """Return the array of the mirror rank: as far from the last as this rank is from the first."""
    size = call.channel.size
    counts = [0] * size
    counts[size - 1 - call.channel.rank] = own.size
    return call.channel.transport.all_to_all(own, counts, counts)
