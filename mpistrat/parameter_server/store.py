"""Parameter store: the parts of variables that one rank holds, and what others ask of it.

A request has a header of fixed size and arrays as bytes beside it; nothing in it is pickled.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.comm.wire import named_dtype
from mpistrat.values import IndexedSlices
from mpistrat.variables.slice_writes import SLICE_WRITES, SliceWrite
from mpistrat.variables.writes import ASSIGN, ASSIGN_ADD, ASSIGN_SUB, Write

if TYPE_CHECKING:
    from mpistrat.comm.messages import Sending


class Operation(enum.IntEnum):
    """What a request asks for."""

    READ = 1
    """Elements of a part: all, or `count` from `start` on."""
    ROWS = 2
    """The rows of a part whose numbers are beside."""
    WRITE = 3
    """A write of the whole part, by `how`."""
    PIECE = 4
    """A write of elements from `start` on, as a restore does it."""
    SLICES = 5
    """A write of rows, by `how`; `start` is the number of axes that the row numbers stand for."""
    STEP = 6
    """A step of an optimizer, of number `key`."""
    SLOTS = 7
    """The keys of all slots of an optimizer, of number `key`."""


WRITES: tuple[Write, ...] = (ASSIGN, ASSIGN_ADD, ASSIGN_SUB, *SLICE_WRITES)
"""The ways to write, by their number in requests."""

_HEAD = struct.Struct("<BB6xqqq24s")
_PARTS_BITS = 32
_SLOT_BITS = 8


def slot_key(part: int, optimizer: int, slot: int) -> int:
    """Return the key of a slot: `slot` is its place among those of the optimizer's rule."""
    return (optimizer + 1) << (_PARTS_BITS + _SLOT_BITS) | slot << _PARTS_BITS | part


def _part_of(key: int) -> int:
    return key & ((1 << _PARTS_BITS) - 1)


def _optimizer_of(key: int) -> int:
    return (key >> (_PARTS_BITS + _SLOT_BITS)) - 1


@dataclass(slots=True)
class Request:
    """What one rank asks of the holder of a part."""

    operation: Operation
    key: int
    """Of the part, of a slot, or the number of the optimizer."""
    dtype: np.dtype
    buffers: Sequence[np.ndarray] = ()
    how: int = 0
    """The number in `WRITES`, plus `RETURNS` where the value afterwards is wanted."""
    start: int = 0
    count: int = -1
    extra: bytes = b""

    RETURNS = 128

    def body(self) -> bytes:
        """Return the header as it travels."""
        name = self.dtype.name.encode()
        head = _HEAD.pack(self.operation, self.how, self.key, self.start, self.count, name)
        return head + self.extra

    @classmethod
    def parse(cls, body: Any, buffers: Sequence[np.ndarray]) -> Request:
        """Return what has travelled."""
        operation, how, key, start, count, name = _HEAD.unpack_from(body)
        dtype = dtype_of_name(name)
        extra = bytes(body[_HEAD.size :])
        return cls(Operation(operation), key, dtype, buffers, how, start, count, extra)


_dtypes: dict[bytes, np.dtype] = {}


def dtype_of_name(name: bytes) -> np.dtype:
    """Return a dtype by the name that travels, padded with zero bytes."""
    found = _dtypes.get(name)
    if found is None:
        found = _dtypes[name] = named_dtype(name.rstrip(b"\0").decode())
    return found


@dataclass(slots=True)
class Reply:
    """The answer to a request."""

    buffers: Sequence[np.ndarray] = ()
    lent: int | None = None
    """The key of the part whose own memory is among the buffers."""


class ParameterStore:
    """The memory of the parts that this rank holds, and of their slots."""

    # One thread answers one request after the other: that makes each write exact. A read lends its
    # memory to a message; a write that comes meanwhile goes to a copy.

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Of all parts, whoever holds them."""
        self.take_step: Callable[[ParameterStore, Request], None] | None = None
        """What an optimizer does."""
        self._arrays: dict[int, np.ndarray] = {}
        self._lent: dict[int, list[Sending]] = {}
        self._do = {
            Operation.READ: self._read,
            Operation.ROWS: self._rows,
            Operation.WRITE: self._write,
            Operation.PIECE: self._piece,
            Operation.SLICES: self._slices,
            Operation.STEP: self._step,
            Operation.SLOTS: self._slots,
        }

    def add(self, key: int, array: np.ndarray) -> None:
        """Hold a part, in this memory."""
        self._arrays[key] = array

    def clear(self) -> None:
        """Give all memory up."""
        self._arrays.clear()
        self._lent.clear()

    def answer(self, request: Request) -> Reply:
        """Do what is asked, all of it or nothing."""
        return self._do[request.operation](request)

    def lend(self, key: int, sending: Sending) -> None:
        """Keep in mind that a message reads the memory of a part until it is done."""
        if not sending.is_done():
            self._lent.setdefault(key, []).append(sending)

    def array(self, key: int, dtype: np.dtype) -> np.ndarray:
        """Return the memory of a part or slot, to be written to; slots begin as zeros."""
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = np.zeros(self.shapes[_part_of(key)], dtype)
        elif not all(each.is_done() for each in self._lent.pop(key, ())):
            found = self._arrays[key] = found.copy()
        return found

    def _seen(self, request: Request) -> np.ndarray:
        """Return the memory that a request reads; of a slot that is not there yet, zeros."""
        found = self._arrays.get(request.key)
        if found is None:
            # Not kept: a read must not create a slot.
            found = np.zeros(self.shapes[_part_of(request.key)], request.dtype)
        return found

    def _read(self, request: Request) -> Reply:
        flat = self._seen(request).reshape(-1)
        if request.count >= 0:
            flat = flat[request.start : request.start + request.count]
        return Reply([flat], request.key)

    def _rows(self, request: Request) -> Reply:
        rows = request.buffers[0].view(np.int64)
        # Indexing by an array copies, so no memory is lent.
        return Reply([self._seen(request)[rows]])

    def _write(self, request: Request) -> Reply:
        value = request.buffers[0].view(request.dtype).reshape(self.shapes[_part_of(request.key)])
        write = WRITES[request.how & ~Request.RETURNS]
        if write is ASSIGN:
            self._arrays[request.key] = value  # it came in memory of its own
            # Messages that still read the old array keep it alive. Nothing reads the new one yet.
            self._lent.pop(request.key, None)
        else:
            write.apply(self.array(request.key, request.dtype), value)
        return self._after_write(request)

    def _piece(self, request: Request) -> Reply:
        piece = request.buffers[0].view(request.dtype)
        flat = self.array(request.key, request.dtype).reshape(-1)
        flat[request.start : request.start + piece.size] = piece
        return Reply()

    def _slices(self, request: Request) -> Reply:
        write, leading = WRITES[request.how & ~Request.RETURNS], request.start
        assert isinstance(write, SliceWrite)
        array = self.array(request.key, request.dtype)
        indices = request.buffers[0].view(np.int64)
        values = request.buffers[1].view(request.dtype)
        rows = IndexedSlices(values.reshape(indices.size, *array.shape[leading:]), indices)
        write.apply(array, rows)
        return self._after_write(request)

    def _after_write(self, request: Request) -> Reply:
        return self._read(request) if request.how & Request.RETURNS else Reply()

    def _step(self, request: Request) -> Reply:
        assert self.take_step is not None
        self.take_step(self, request)
        return Reply()

    def _slots(self, request: Request) -> Reply:
        keys = [key for key in self._arrays if _optimizer_of(key) == request.key]
        return Reply([np.array(keys, np.int64)])

    def num_bytes(self) -> int:
        """Return how much memory is held."""
        return sum(math.prod(each.shape) * each.itemsize for each in self._arrays.values())
