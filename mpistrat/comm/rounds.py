"""Rounds of agreement, over MPI or in shared memory."""

from __future__ import annotations

import functools
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import address_of
from mpistrat.comm.ops import combine, compiled_function
from mpistrat.comm.shared_memory import NodeMemory
from mpistrat.native import native_library
from mpistrat.options import ReduceOp

_MASK = 2**64 - 1
_VALUES = struct.Struct("=4Q")

_NUM_VALUES = 4
"""Number of values that each rank contributes to a round: two numbers and their complements."""

_POLLS = 200
"""Polls in about 100 us; after them a waiting rank also checks limits and losses."""

_PATIENT_POLLS = 24
"""Polls in the few microseconds by which ranks usually differ. Yielding takes as long."""

_TURNS = 4096
"""Checks of shared memory in about the same time."""

_LONG_S = 0.01
"""How long a wait over MPI keeps the core: MPI cannot wake a sleeping rank."""
_REST_S = 0.0002

_ROOM_OF_ALL = 2**15
"""Bytes of all ranks together. Every rank reads all of them: larger arrays are faster in slices."""


class MpiRound:
    """Base of the rounds in which MPI makes progress when it is polled."""

    start: Callable[[], object]
    test: Callable[[], bool]
    """Returns whether all messages have arrived."""
    free: Callable[[], object] = bool
    withdraw: Callable[[], object] = bool
    """Does nothing: MPI cannot cancel a collective."""
    is_busy = True
    """Whether waits keep the core until they are long."""

    def __init__(self) -> None:
        self.send, self.receive = np.zeros((2, _NUM_VALUES), np.uint64)
        self._outgoing, self._incoming = self.send.data.cast("B"), self.receive.data.cast("B")

    def meet(self, first: int, second: int) -> int:
        """Contribute two numbers, and return the result if it is complete within `_POLLS`."""
        _VALUES.pack_into(self._outgoing, 0, first, _MASK - first, second, _MASK - second)
        self.start()
        test = self.test
        for turn in range(_POLLS):
            if test():
                return self._end()
            if turn >= _PATIENT_POLLS:
                os.sched_yield()
        return 0

    def done(self) -> bool:
        """Return whether every rank has started this round."""
        # `_end` never returns 0. It is called to fill in `receive`. A request that is done is null
        # or inactive, and testing it again returns true (MPI 4.1, section 3.7.3).
        return self.test() and bool(self._end())

    def _end(self) -> int:
        """Return the result of `meet` for a round that is complete."""
        return 2 if self._incoming == self._outgoing else 1

    def rest(self, waited_s: float) -> None:
        """Leave the core to others for a moment."""
        if self.is_busy and waited_s < _LONG_S:
            os.sched_yield()
        else:
            time.sleep(_REST_S)

    def expect(self, limit_ns: int, number: int) -> bool:
        """Return False: MPI cannot tell before the round."""
        return False


class _PersistentRound(MpiRound):
    """A round over a persistent collective (MPI 4.1, section 6.13)."""

    # Its messages are short enough for libraries to send them without waiting for their arrival.
    # With longer messages, MPICH over TCP ends a rank that has sent to a killed rank, before
    # mpistrat can report the killed rank.

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__()
        request = comm.Allreduce_init(self.send, self.receive, MPI.MAX)
        self.start = request.Start
        self.test = request.Test
        self.free = request.Free


class _NonblockingRound(MpiRound):
    """A round over a nonblocking collective, for libraries older than MPI 4.0."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__()
        request = MPI.REQUEST_NULL

        def start() -> None:
            nonlocal request
            request = comm.Iallreduce(self.send, self.receive, MPI.MAX)

        self.start = start
        # Not `request.Test` itself: each `start` creates a new request.
        self.test = lambda: request.Test()


class GatheredRound(MpiRound):
    """A round of few ranks, which gather the values of all, with space for a few numbers."""

    # Not a MAX, which has no space for numbers that need a different reduction.

    room = 32
    """How many bytes can be sent with a round."""
    MOST_RANKS = 4
    """Limit that keeps every message within two blocks: see `_PersistentRound`."""
    is_shared = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__()
        head = self.send.nbytes
        self._size, length = comm.size, head + self.room
        own, gathered = np.zeros(length, np.uint8), np.zeros((comm.size, length), np.uint8)
        self.send = own[:head].view(np.uint64)
        self._outgoing = self.send.data.cast("B")
        self._values = gathered[:, :head].view(np.uint64)
        self._others = [
            gathered[each, :head].data for each in range(comm.size) if each != comm.rank
        ]
        self._own_room, self._rooms = own[head:], gathered[:, head:]
        own_place, places = address_of(self._own_room), address_of(self._rooms)
        self.parameters: dict[str, int] = {"values": own_place, "largest": places, "turns": length}
        """Parameters, by name, with which compiled code finds the data of a round."""
        request: Any
        try:
            request = comm.Allgather_init(own, gathered)
        except NotImplementedError:
            request = MPI.REQUEST_NULL

            def start() -> None:
                nonlocal request
                request = comm.Iallgather(own, gathered)

            self.start = start
            # As above: each `start` creates a new request.
            self.test = lambda: request.Test()
        else:
            self.start, self.test, self.free = request.Start, request.Test, request.Free

    def _end(self) -> int:
        own = self._outgoing
        # Almost always all are equal, and comparing bytes is faster than a MAX.
        for each in self._others:
            if each != own:
                self._values.max(axis=0, out=self.receive)
                return 1
        self._incoming[:] = own
        return 2

    def attach(self, source: np.ndarray) -> None:
        """Send `source` with the next round."""
        self._own_room[: source.nbytes] = source.reshape(-1).view(np.uint8)

    def brought(self) -> Sequence[memoryview]:
        """Return, by rank, the bytes sent with the last round; they are valid until the next."""
        return [each.data for each in self._rooms]

    def result(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray], object]:
        """Return a function that writes the reduction of the last round's numbers to an array."""
        function, library = compiled_function(op, dtype), native_library()
        if function is not None and library is not None:
            divisor = self._size if op is ReduceOp.MEAN else 1
            rows = self.parameters["largest"], self.parameters["turns"], self._size
            how = function[0], divisor, function[1], *rows
            return functools.partial(library.combine_rows, *how)

        def write(target: np.ndarray) -> None:
            # A copy, because `combine` overwrites its rows.
            rows = self._rooms[:, : target.nbytes].copy().view(dtype)
            target.reshape(-1)[...] = combine(op, rows)

        return write


class SharedRound:
    """A round in memory that all ranks share, with space for a few numbers."""

    is_shared = True

    def __init__(self, node: NodeMemory) -> None:
        self.send, self.receive = np.zeros((2, _NUM_VALUES), np.uint64)
        self._rounds = node.rounds  # the C structure lives as long as this object
        pointer, library = node.rounds.pointer, node.library
        send, receive = self.send.ctypes.data, self.receive.ctypes.data
        self.start = functools.partial(library.round_start, pointer, send)
        self.done = functools.partial(library.round_done, pointer, receive, 1)
        self._rest = functools.partial(library.round_rest, pointer, receive)
        self.expect = functools.partial(library.round_expect, pointer)
        # After this, a rank that arrives later does not find all ranks there: it waits, and learns
        # why.
        self.withdraw = functools.partial(library.reduce_withdraw, pointer)
        self.parameters: dict[str, int] = {
            "rounds": pointer,
            "values": send,
            "largest": receive,
            "turns": _TURNS,
        }
        """Parameters, by name, with which compiled code runs a round."""
        # `parameters` has the parameters of `round_meet`, in its order.
        self.meet = functools.partial(library.round_meet, *self.parameters.values())
        self.room = min(node.ROUND_BYTES, _ROOM_OF_ALL // node.size)
        """How many bytes can be sent with a round."""
        self._size = node.size
        self._node = weakref.ref(node)  # the end of the transport frees its memory
        self.attach = functools.partial(library.round_contribute, pointer, 0)
        self._result = functools.partial(library.round_result, pointer)

    def rest(self, waited_s: float) -> None:
        """Leave the core to others for a moment, or until another rank has arrived."""
        self._rest()

    def brought(self) -> Sequence[memoryview]:
        """Return, by rank, the bytes sent with the last round; they are valid until the next."""
        node = self._node()
        assert node is not None
        return node.brought()

    def result(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray], object]:
        """Return a function that writes the reduction of the last round's numbers to an array."""
        function = compiled_function(op, dtype)
        assert function is not None
        divisor = self._size if op is ReduceOp.MEAN else 1
        return functools.partial(self._result, function[0], divisor, function[1], 0, 0)


def mpi_round(comm: MPI.Intracomm) -> MpiRound:
    """Return a new round over `comm`. **Collective**, without waiting."""
    # Only the size decides, which is equal on all ranks: different collectives would not match.
    if comm.size <= GatheredRound.MOST_RANKS:
        return GatheredRound(comm)
    try:
        return _PersistentRound(comm)
    except NotImplementedError:
        return _NonblockingRound(comm)
