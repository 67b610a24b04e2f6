"""Rounds: the largest of a few words over all ranks, started by each and then polled."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpistrat.comm.functions import compiled_function
from mpistrat.comm.node import ROUND_BYTES, NodeMemory
from mpistrat.options import ReduceOp

__all__ = ["NonblockingRound", "PersistentRound", "SharedRound"]

_MASK = 2**64 - 1
_WORDS = struct.Struct("=4Q")

_POLLS = 200
"""About 100 us, before a waiting rank looks at limits and losses too."""

_TURNS = 4096
"""The same, counted in looks at shared memory."""

_ROOM_OF_ALL = 2**15
"""Every rank reads the numbers of all: more of them are reduced faster slice by slice."""


class _MpiRound:
    """What is common to rounds that MPI makes progress in when it is polled."""

    start: Callable[[], object]
    done: Callable[[], bool]

    def __init__(self, num_words: int) -> None:
        self.send = np.zeros(num_words, np.uint64)
        self.receive = np.zeros(num_words, np.uint64)
        self._outgoing, self._incoming = self.send.data.cast("B"), self.receive.data.cast("B")

    def meet(self, first: int, second: int) -> int:
        """Bring two numbers, and return what is known after a moment. Local."""
        _WORDS.pack_into(self._outgoing, 0, first, _MASK - first, second, _MASK - second)
        self.start()
        done = self.done
        for _ in range(_POLLS):
            if done():
                return 2 if self._incoming == self._outgoing else 1
            os.sched_yield()
        return 0


class PersistentRound(_MpiRound):
    """A round over a persistent collective (MPI 4.1, section 6.13), set up once.

    Its messages are short enough for libraries to send them without waiting for their arrival. With
    longer ones, MPICH over TCP ends a rank that has sent to another one that was killed, before
    anything can be said of that one.
    """

    def __init__(self, comm: MPI.Intracomm, num_words: int) -> None:
        super().__init__(num_words)
        request = comm.Allreduce_init(self.send, self.receive, MPI.MAX)
        self.start = request.Start
        self.done = request.Test


class NonblockingRound(_MpiRound):
    """The same for libraries older than MPI 4.0."""

    def __init__(self, comm: MPI.Intracomm, num_words: int) -> None:
        super().__init__(num_words)
        request = MPI.REQUEST_NULL

        def start() -> None:
            nonlocal request
            request = comm.Iallreduce(self.send, self.receive, MPI.MAX)

        self.start = start
        self.done = lambda: request.Test()


class SharedRound:
    """A round in memory that all ranks share, with room for a few numbers.

    Parameters
    ----------
    node : NodeMemory

    Attributes
    ----------
    room : int
        How many bytes may travel with it.
    """

    NUM_WORDS = 4

    def __init__(self, node: NodeMemory) -> None:
        self.send = np.zeros(self.NUM_WORDS, np.uint64)
        self.receive = np.zeros(self.NUM_WORDS, np.uint64)
        self._lane = node.rounds
        lane, send, receive = node.rounds.pointer, self.send.ctypes.data, self.receive.ctypes.data
        library = node.library
        self.start = functools.partial(library.round_start, lane, send)
        self.done = functools.partial(library.round_done, lane, receive, 1)
        self.meet = functools.partial(library.round_meet, lane, send, receive, _TURNS)
        self.room = min(ROUND_BYTES, _ROOM_OF_ALL // node.size)
        self._size = node.size
        self.board = functools.partial(library.round_board, lane)
        self._collect = functools.partial(library.round_collect, lane)

    def collect(self, op: ReduceOp, target: np.ndarray) -> None:
        """Write the reduction of what travelled with the last round to `target`. Local."""
        function = compiled_function(op, target.dtype)
        assert function is not None
        divisor = self._size if op is ReduceOp.MEAN else 1
        self._collect(function[0], divisor, function[1], target)
