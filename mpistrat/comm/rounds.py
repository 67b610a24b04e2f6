"""Rounds: the largest of a few words over all ranks, started by each and then polled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from mpistrat.comm.node import NodeMemory

__all__ = ["NonblockingRound", "PersistentRound", "SharedRound"]

_POLLS = 200
"""About 100 us, before a waiting rank starts to give the core away."""

_TURNS = 4096
"""The same, counted in looks at shared memory."""


class _MpiRound:
    """What is common to rounds that MPI makes progress in when it is polled."""

    start: Callable[[], object]
    done: Callable[[], bool]

    def __init__(self, num_words: int) -> None:
        self.send = np.zeros(num_words, np.uint64)
        self.receive = np.zeros(num_words, np.uint64)

    def meet(self) -> bool:
        """Start, and return whether every rank has come within a moment. Local."""
        self.start()
        done = self.done
        return any(done() for _ in range(_POLLS))


class PersistentRound(_MpiRound):
    """A round over a persistent collective (MPI 4.1, section 6.13), set up once."""

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
    """A round in memory that all ranks share."""

    NUM_WORDS = 4

    def __init__(self, node: NodeMemory) -> None:
        self.send = np.zeros(self.NUM_WORDS, np.uint64)
        self.receive = np.zeros(self.NUM_WORDS, np.uint64)
        self._lane = node.rounds
        lane, send, receive = node.rounds.pointer, self.send.ctypes.data, self.receive.ctypes.data
        library = node.library
        self.start = lambda: library.start_round(lane, send)
        self.done = lambda: bool(library.round_done(lane, receive, 1))
        self.meet = functools.partial(library.meet, lane, send, receive, _TURNS)
