"""Reduction in the memory of each node, and over MPI between the nodes.

The ranks of a node reduce one slice each, in shared memory; then the ranks that hold the same slice
on the other nodes reduce it among themselves. So each rank sends its part of the data alone, and
all links of a node are in use. This is the hierarchy of "Bandwidth optimal all-reduce algorithms
for clusters of workstations" (Patarasuk and Yuan, 2009) on two levels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import address_of
from mpistrat.comm.functions import compiled_function
from mpistrat.comm.message import Message
from mpistrat.comm.node import HALF_BYTES, NodeMemory
from mpistrat.comm.operators import operator
from mpistrat.comm.reducer import Reducer
from mpistrat.comm.transport import Occupancy
from mpistrat.comm.tree import divide
from mpistrat.options import ReduceOp

__all__ = ["NodewiseReducer"]


class NodewiseReducer:
    """Reduces messages over several nodes.

    Parameters
    ----------
    memory : NodeMemory
        That of this node.
    comm : mpi4py.MPI.Intracomm
        All ranks. **Collective** over them.
    num_slices : int
        The number of ranks on the smallest node.
    otherwise : Reducer
        For reductions that go on beside the program.
    occupancy : Occupancy
        Entered while this rank waits for the others.
    """

    min_bytes = 0

    def __init__(
        self,
        memory: NodeMemory,
        comm: MPI.Intracomm,
        num_slices: int,
        otherwise: Reducer,
        occupancy: Occupancy,
    ) -> None:
        self._otherwise = otherwise
        self._occupancy = occupancy
        self._memory = memory
        self._num_slices = num_slices
        self._size = comm.size
        colour = memory.rank if memory.rank < num_slices else MPI.UNDEFINED
        self._peers = comm.Split(colour, comm.rank)

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether the compiled code reduces `dtype` by `op`. Local."""
        return compiled_function(op, dtype) is not None

    def board(self, message: Message) -> None:
        """Do nothing: the agreement goes over MPI, and is no wait for this memory. Local."""

    def unboard(self) -> None:
        """Do nothing: nothing is boarded. Local."""

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        source, target, split = message.whole()
        step = HALF_BYTES
        start, goal = address_of(source), address_of(target)
        with self._occupancy:
            for done in range(0, source.nbytes, step):
                num_bytes = min(step, source.nbytes - done)
                self._reduce_block(op, source.dtype, start + done, goal + done, num_bytes)
        split()

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, on every rank: that costs no more. **Collective**."""
        self.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Leave `message` to MPI: no thread may send beside the program. **Collective**."""
        return self._otherwise.start_all_reduce(op, message)

    def drain(self) -> None:
        """Do nothing: nothing is under way. Local."""

    def _reduce_block(
        self, op: ReduceOp, dtype: np.dtype, source: int, target: int, num_bytes: int
    ) -> None:
        memory, library = self._memory, self._memory.library
        function = compiled_function(op, dtype)
        assert function is not None
        lane, slices = memory.reductions.pointer, self._num_slices
        place = library.reduce_slice(lane, function[0], slices, source, num_bytes)
        own = memory.view(*place).view(dtype)
        if self._peers != MPI.COMM_NULL and own.size:
            self._peers.Allreduce(MPI.IN_PLACE, own, operator(op, own))
            if op is ReduceOp.MEAN:
                divide(own, self._size)
        library.collect_slices(lane, slices, target, num_bytes)
