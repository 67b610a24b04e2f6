"""Reduction in memory that the ranks of a node share.

Each rank copies its numbers in, reduces one slice of those of all ranks, and copies the results
out, in blocks that stay in the cache: every number crosses the memory bus a few times, and no
message is sent. The loop is compiled (``node.c``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.arrays import address_of
from mpistrat.comm.background import Background
from mpistrat.comm.message import Message
from mpistrat.comm.node import HALF_BYTES, Lane, NodeMemory
from mpistrat.comm.transport import NodeReducer
from mpistrat.options import ReduceOp

__all__ = ["SharedMemoryReducer", "SharedReducer"]

_BLOCK_BYTES = 2**18
_SMALL_BYTES = 2**13
"""Up to here one wait costs more than to reduce all of it on every rank."""

# As node.c numbers them.
_ARITHMETIC = ("f4", "f8", "u1", "u2", "u4", "u8")
_ORDER = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_FUNCTIONS = {
    name: number
    for number, name in enumerate(
        [(op, each) for op in (ReduceOp.SUM, ReduceOp.PROD) for each in _ARITHMETIC]
        + [(op, each) for op in (ReduceOp.MIN, ReduceOp.MAX) for each in _ORDER]
    )
}
_ROOM = 64
"""Pieces for which there is a table at hand."""


class SharedMemoryReducer:
    """Reduces messages in `memory`.

    Parameters
    ----------
    memory : NodeMemory
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        self._background = Background("mpistrat-reductions")
        self._tables = np.empty((_ROOM, 3), np.int64)
        self._tables_address: int = self._tables.ctypes.data

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether the compiled code reduces `dtype` by `op`. Local."""
        return _function(op, dtype) is not None

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        self._reduce(self._memory.reductions, op, message, self._pieces(message))

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Have a thread reduce each array of `message`; return what waits for it."""
        pieces = _table(message)
        return self._background.submit(
            lambda: self._reduce(self._memory.background, op, message, pieces.ctypes.data)
        )

    def drain(self) -> None:
        """Wait for what the thread does. Local."""
        self._background.drain()

    def _pieces(self, message: Message) -> int:
        """Return the address of a table of the arrays, valid until the next call."""
        if len(message.sources) == 1:
            source, target = message.sources[0], message.targets[0]
            start = address_of(target)
            first = start if source is target else address_of(source)
            self._tables[0] = first, start, source.nbytes
            return self._tables_address
        self._last_table = _table(message)
        return int(self._last_table.ctypes.data)

    def _reduce(self, lane: Lane, op: ReduceOp, message: Message, pieces: int) -> None:
        function = _function(op, message.dtype)
        assert function is not None
        number, itemsize = function
        divisor = self._memory.size if op is ReduceOp.MEAN else 1
        self._memory.library.reduce(
            lane.pointer,
            number,
            divisor,
            itemsize,
            min(_BLOCK_BYTES, HALF_BYTES),
            _SMALL_BYTES,
            pieces,
            message.num_bytes,
        )


def _table(message: Message) -> np.ndarray:
    """Return address of source, address of target and bytes of each array."""
    rows = [
        (address_of(source), address_of(target), source.nbytes)
        for source, target in zip(message.sources, message.targets, strict=True)
    ]
    return np.array(rows, np.int64)


def _function(op: ReduceOp, dtype: np.dtype) -> tuple[int, int] | None:
    """Return the number of the compiled function, and the bytes of what it divides for MEAN."""
    found = _known.get((op, dtype))
    if found is None and (op, dtype) not in _known:
        found = _known[op, dtype] = _find_function(op, dtype)
    return found


_known: dict[tuple[ReduceOp, np.dtype], tuple[int, int] | None] = {}


def _find_function(op: ReduceOp, dtype: np.dtype) -> tuple[int, int] | None:
    kind, itemsize = dtype.kind, dtype.itemsize
    if op is ReduceOp.MEAN:
        op = ReduceOp.SUM
        if kind not in "fc":
            return None
    if kind == "c" and op is ReduceOp.SUM:
        kind, itemsize = "f", itemsize // 2  # the parts are added one by one
    if kind == "i" and op in (ReduceOp.SUM, ReduceOp.PROD):
        kind = "u"
    number = _FUNCTIONS.get((op, f"{kind}{itemsize}"))
    return None if number is None else (number, itemsize)


class SharedReducer:
    """Leaves a message to the `NodeReducer` of the transport.

    Every element is combined in rank order, by one rank for all.

    Parameters
    ----------
    node : NodeReducer
    """

    def __init__(self, node: NodeReducer) -> None:
        self._node = node

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        self._node.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin to reduce each array of `message`. **Collective**, without waiting."""
        return self._node.start_all_reduce(op, message)

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, on every rank: that costs no more. **Collective**."""
        self._node.all_reduce(op, message)
