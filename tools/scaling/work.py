"""Work of MPI's collectives: the textbook cost for one rank.

MPI libraries choose their algorithms themselves, and do not say which. These are those of
Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication Operations in MPICH",
2005), with the threshold that MPICH has between short and long messages. No algorithm sends
fewer bytes for a long all-reduction than ``2 n (p - 1) / p`` a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["COLLECTIVES", "Work", "all_reduce", "package_all_reduce"]

_SHORT_BYTES = 2048
"""Algorithms for messages up to this size save messages, those for longer ones save bytes."""

_ROUND_BYTES = 32
"""What the agreement before each collective of this package reduces."""

_FEW_RANKS, _ROOM_BYTES = 4, 32
"""Up to so many ranks gather it instead, with room for a few numbers."""


@dataclass(frozen=True)
class Work:
    """Amounts, each of which has a price in `tools.scaling.model.Constants`."""

    calls: float = 0.0
    """Collective calls of this package: Python, and the record of the call."""
    messages: float = 0.0
    """Messages one after the other, of which the next can begin when the one before has come."""
    bytes_sent: float = 0.0
    """Bytes of those messages."""
    bytes_reduced: float = 0.0
    """Bytes of results of the arithmetic."""

    def __add__(self, other: Work) -> Work:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))


def package_all_reduce(num_ranks: int, num_bytes: int) -> Work:
    """Return the work of one `all_reduce` of this package between nodes with one rank each."""
    # The array is reduced as it lies in memory: there is no packing of a single one.
    if num_ranks > _FEW_RANKS:
        agreement = all_reduce(num_ranks, _ROUND_BYTES)
    else:
        agreement = _all_gather(num_ranks, num_ranks * (_ROUND_BYTES + _ROOM_BYTES))
        if num_bytes <= _ROOM_BYTES:
            results = Work(bytes_reduced=(num_ranks - 1) * num_bytes)
            return Work(calls=1) + agreement + results
    return Work(calls=1) + agreement + all_reduce(num_ranks, num_bytes)


def all_reduce(num_ranks: int, num_bytes: int) -> Work:
    """Return the work of ``MPI_Allreduce``."""
    # Short: recursive doubling. Long: a reduce-scatter by recursive halving and an all-gather by
    # recursive doubling (Rabenseifner). Where the number of ranks is no power of two, those beyond
    # it first give their numbers to a neighbour, and get the result from it at the end.
    power = 1 << (num_ranks.bit_length() - 1)
    rounds = power.bit_length() - 1
    share = (power - 1) / power * num_bytes
    if num_bytes <= _SHORT_BYTES:
        work = Work(0, rounds, rounds * num_bytes, rounds * num_bytes)
    else:
        work = Work(0, 2 * rounds, 2 * share, share)
    return work if power == num_ranks else work + Work(0, 2, 2 * num_bytes, num_bytes)


def _rounds(num_ranks: int) -> int:
    """Return the base-2 logarithm, rounded up."""
    return (num_ranks - 1).bit_length()


def _others(num_ranks: int, num_bytes: int) -> float:
    """Return the bytes that are not this rank's own, of `num_bytes` over all ranks."""
    return (num_ranks - 1) / num_ranks * num_bytes


def _barrier(num_ranks: int, num_bytes: int) -> Work:
    return Work(messages=_rounds(num_ranks))


def _broadcast(num_ranks: int, num_bytes: int) -> Work:
    """Binomial tree where short; where long, a scatter and an all-gather around the ring."""
    if num_bytes <= _SHORT_BYTES or num_ranks == 1:
        return Work(0, _rounds(num_ranks), _rounds(num_ranks) * num_bytes)
    return Work(0, _rounds(num_ranks) + num_ranks - 1, 2 * _others(num_ranks, num_bytes))


def _reduce(num_ranks: int, num_bytes: int) -> Work:
    """Binomial tree where short; where long, a reduce-scatter and a gather."""
    rounds = _rounds(num_ranks)
    if num_bytes <= _SHORT_BYTES:
        return Work(0, rounds, rounds * num_bytes, rounds * num_bytes)
    share = _others(num_ranks, num_bytes)
    return Work(0, 2 * rounds, 2 * share, share)


def _reduce_scatter(num_ranks: int, num_bytes: int) -> Work:
    share = _others(num_ranks, num_bytes)
    return Work(0, _rounds(num_ranks), share, share)


def _all_gather(num_ranks: int, num_bytes: int) -> Work:
    """Recursive doubling; `num_bytes` are those of all ranks."""
    return Work(0, _rounds(num_ranks), _others(num_ranks, num_bytes))


def _linear(num_ranks: int, num_bytes: int) -> Work:
    """Send each other rank a message, or get one; `num_bytes` are those of all ranks."""
    return Work(0, num_ranks - 1, _others(num_ranks, num_bytes))


def _scan(num_ranks: int, num_bytes: int) -> Work:
    rounds = _rounds(num_ranks)
    return Work(0, rounds, rounds * num_bytes, 2 * rounds * num_bytes)


def _message(num_ranks: int, num_bytes: int) -> Work:
    return Work(0, 1, num_bytes)


COLLECTIVES: Mapping[str, Callable[[int, int], Work]] = {
    "Allgather": _all_gather,
    "Allgatherv": _all_gather,
    "Allreduce": all_reduce,
    "Alltoall": _linear,
    "Alltoallv": _linear,
    "Alltoallw": _linear,
    "Barrier": _barrier,
    "Bcast": _broadcast,
    "Exscan": _scan,
    "Gather": _linear,
    "Gatherv": _linear,
    "Reduce": _reduce,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter,
    "Scan": _scan,
    "Scatter": _linear,
    "Scatterv": _linear,
    "Send": _message,
    "Ssend": _message,
    "Rsend": _message,
    "Bsend": _message,
    "Sendrecv": _message,
}
"""From the number of ranks and of bytes to the work of each operation that sends.

The bytes are the largest buffer that the rank gives: for gathers and scatters that of all ranks
together.
"""
