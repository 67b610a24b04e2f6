"""Parameter store: parts of variables that one rank holds, and the client that asks other ranks.

A request is a header of fixed size, followed by arrays as bytes. Nothing in it is pickled.
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
from mpistrat.errors import UnavailableError
from mpistrat.values import IndexedSlices
from mpistrat.variables.slice_writes import SLICE_WRITES, SliceWrite
from mpistrat.variables.writes import ASSIGN, ASSIGN_ADD, ASSIGN_SUB, Write

if TYPE_CHECKING:
    from mpistrat.comm.messages import BackOff, Messenger, Sending


class Operation(enum.IntEnum):
    """Operation that a request asks for."""

    READ = 1
    """Read elements of a part: all, or `count` from `start` on."""
    ROWS = 2
    """Read the rows of a part whose numbers are in the buffer."""
    WRITE = 3
    """Write the whole part, by method `how`."""
    PIECE = 4
    """Write elements from `start` on, for a restore."""
    SLICES = 5
    """Write rows, by method `how`. The row numbers stand for the first `start` axes."""
    STEP = 6
    """Take a step of optimizer number `key`."""
    SLOTS = 7
    """Return the keys of all slots of optimizer number `key`."""


WRITES: tuple[Write, ...] = (ASSIGN, ASSIGN_ADD, ASSIGN_SUB, *SLICE_WRITES)
"""Write methods. Requests name a method by its index here."""

_HEAD = struct.Struct("<BB6xqqq24s")
_PARTS_BITS = 32
_SLOT_BITS = 8


def slot_key(part: int, optimizer: int, slot: int) -> int:
    """Return the key of a slot; `slot` is its index among the slots of the optimizer's rule."""
    return (optimizer + 1) << (_PARTS_BITS + _SLOT_BITS) | slot << _PARTS_BITS | part


def _part_of(key: int) -> int:
    return key & ((1 << _PARTS_BITS) - 1)


def _optimizer_of(key: int) -> int:
    return (key >> (_PARTS_BITS + _SLOT_BITS)) - 1


@dataclass(slots=True)
class Request:
    """Request of one rank to the holder of a part."""

    operation: Operation
    key: int
    """Key of the part or of a slot, or the number of the optimizer."""
    dtype: np.dtype
    buffers: Sequence[np.ndarray] = ()
    how: int = 0
    """Index in `WRITES`, plus `RETURNS` if the answer is to contain the new value."""
    start: int = 0
    count: int = -1
    extra: bytes = b""

    RETURNS = 128

    def body(self) -> bytes:
        """Return the header as bytes to send."""
        name = self.dtype.name.encode()
        head = _HEAD.pack(self.operation, self.how, self.key, self.start, self.count, name)
        return head + self.extra

    @classmethod
    def parse(cls, body: Any, buffers: Sequence[np.ndarray]) -> Request:
        """Return the request that was received."""
        operation, how, key, start, count, name = _HEAD.unpack_from(body)
        dtype = dtype_of_name(name)
        extra = bytes(body[_HEAD.size :])
        return cls(Operation(operation), key, dtype, buffers, how, start, count, extra)


_dtypes: dict[bytes, np.dtype] = {}


def dtype_of_name(name: bytes) -> np.dtype:
    """Return the dtype with this name, which messages pad with zero bytes."""
    found = _dtypes.get(name)
    if found is None:
        found = _dtypes[name] = named_dtype(name.rstrip(b"\0").decode())
    return found


@dataclass(slots=True)
class Reply:
    """Answer to a request."""

    buffers: Sequence[np.ndarray] = ()
    lent: int | None = None
    """Key of the part whose own memory is among the buffers; ``None`` if all are copies."""


class ParameterStore:
    """Holds the memory of this rank's parts and of their slots."""

    # One thread answers the requests one after the other, so each write is exact. A read lends the
    # memory of the part to a message; a write that arrives in the meantime goes to a copy.

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Shapes of all parts, including those that other ranks hold."""
        self.take_step: Callable[[ParameterStore, Request], None] | None = None
        """Takes a step of an optimizer."""
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
        """Add a part, whose memory is `array`."""
        self._arrays[key] = array

    def clear(self) -> None:
        """Drop all memory."""
        self._arrays.clear()
        self._lent.clear()

    def answer(self, request: Request) -> Reply:
        """Do everything that the request asks, or nothing."""
        return self._do[request.operation](request)

    def lend(self, key: int, sending: Sending) -> None:
        """Remember that a message reads the memory of a part until it is sent."""
        if not sending.is_done():
            self._lent.setdefault(key, []).append(sending)

    def array(self, key: int, dtype: np.dtype) -> np.ndarray:
        """Return the memory of a part or slot for writing. A new slot is filled with zeros."""
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = np.zeros(self.shapes[_part_of(key)], dtype)
        elif not all(each.is_done() for each in self._lent.pop(key, ())):
            found = self._arrays[key] = found.copy()
        return found

    def _seen(self, request: Request) -> np.ndarray:
        """Return the memory that a request reads, or zeros if the slot does not exist yet."""
        found = self._arrays.get(request.key)
        if found is None:
            # Do not store the zeros, because a read must not create a slot.
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
            self._arrays[request.key] = value  # it arrived in memory of its own
            # Messages that still read the old array keep it alive. None reads the new one yet.
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
        """Return the number of bytes that the parts and slots take."""
        return sum(math.prod(each.shape) * each.itemsize for each in self._arrays.values())


class Lane:
    """Lanes of messages. A rank can wait for the messages of one lane."""

    REQUEST = 1
    """Request to the holder of variables."""
    REPLY = 2
    """Reply from the holder."""
    CLOSURE = 3
    """Closure from the chief to a worker."""
    RESULT = 4
    """Result from a worker to the chief."""
    CONTROL = 5
    """End of the job, from the chief to all other ranks, and their answers."""


DONE, FAILED = 0, 1
"""Kinds of replies."""


@dataclass(frozen=True)
class Part:
    """Range of rows of a variable, and the ranks that hold it."""

    key: int
    rows: range
    holders: tuple[int, ...]
    """Ranks that hold the part. Reads ask the first one; all servers hold a counter."""


@dataclass
class ParameterClient:
    """Asks for parts of variables: this rank's own store, or other ranks by messages."""

    messages: Messenger
    store: ParameterStore
    before: Callable[[str, bool], None]
    """Raises an error or prepares for a call. Takes its name, and whether it needs other ranks."""
    describe_loss: Callable[[int], UnavailableError]
    """Returns the error to raise for a lost rank."""
    while_waiting: Callable[[], object]
    """Called repeatedly while this rank waits for other ranks."""
    back_off: BackOff
    _number: int = 0

    def ask(self, what: str, holder: int, request: Request) -> list[np.ndarray]:
        """Return the buffers of the answer, which share no memory with the store."""
        return self.ask_each(what, [(holder, request)])[0]

    def ask_each(
        self, what: str, requests: Sequence[tuple[int, Request]]
    ) -> list[list[np.ndarray]]:
        """Send several requests at once, and return their answers."""
        own = self.messages.rank
        self.before(what, any(holder != own for holder, _ in requests))
        pending: list[tuple[int, int] | Reply] = []
        for holder, request in requests:
            if holder == own:
                pending.append(_private(self.store, request))
                continue
            self._number += 1
            self.messages.send(
                holder, Lane.REQUEST, 0, self._number, request.body(), request.buffers
            )
            pending.append((holder, self._number))
        return [
            list(each.buffers) if isinstance(each, Reply) else self._wait(what, *each)
            for each in pending
        ]

    def _wait(self, what: str, holder: int, number: int) -> list[np.ndarray]:
        """Wait for the answer to a request, and return it."""
        back_off, messages = self.back_off, self.messages
        back_off.reset()
        while True:
            message = messages.poll(holder, Lane.REPLY)
            if message is None:
                # Check for a loss only if nothing has arrived: the rank may have answered before.
                if holder in messages.lost:
                    raise self.describe_loss(holder)
                self.while_waiting()
                back_off.rest()
            # Drop answers with any other number: the wait for them has ended with an error.
            elif message.number == number:
                if message.kind == FAILED:
                    text = bytes(message.body).decode()
                    raise RuntimeError(f"{what} has failed on rank {holder}: {text}")
                return message.buffers

    def answer_next(self) -> bool:
        """Answer a request of another rank, if one has arrived. Return whether one had."""
        message = self.messages.poll(lane=Lane.REQUEST)
        if message is not None:
            self.answer(message.source, message.number, message.body, message.buffers)
        return message is not None

    def answer(
        self, source: int, number: int, body: memoryview, buffers: Sequence[np.ndarray]
    ) -> None:
        """Answer one request of another rank."""
        try:
            reply = self.store.answer(Request.parse(body, buffers))
        except Exception as error:  # the rank that asked raises it
            text = f"{type(error).__name__}: {error}".encode()
            self.messages.send(source, Lane.REPLY, FAILED, number, text)
            return
        sending = self.messages.send(source, Lane.REPLY, DONE, number, b"", reply.buffers)
        if reply.lent is not None:
            self.store.lend(reply.lent, sending)


def _private(store: ParameterStore, request: Request) -> Reply:
    """Return the answer of this rank's own store, as copies that share no memory with it."""
    # The store keeps the buffer of a write as the memory of the part, and a read returns that
    # memory. Between ranks, messages copy the data; here we must copy it.
    copies = [np.array(each).reshape(-1).view(np.uint8) for each in request.buffers]
    reply = store.answer(
        Request(
            request.operation,
            request.key,
            request.dtype,
            copies,
            request.how,
            request.start,
            request.count,
            request.extra,
        )
    )
    return Reply([np.array(each).reshape(-1).view(np.uint8) for each in reply.buffers])
