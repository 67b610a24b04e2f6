"""Exchange of rows between the ranks that use them and the rank that holds them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array, host_view, namespace_of, native
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.sharding import part_lengths


@dataclass(frozen=True)
class Partition:
    """Distribution of rows over ranks: rank k holds part k, and further ranks hold none."""

    num_rows: int
    num_parts: int
    num_ranks: int

    @functools.cached_property
    def ranges(self) -> tuple[range, ...]:
        """Rows of each rank."""
        stops = np.cumsum(part_lengths(self.num_rows, self.num_parts)).tolist()
        stops += [self.num_rows] * (self.num_ranks - self.num_parts)
        return tuple(range(*pair) for pair in zip([0, *stops], stops, strict=False))

    @functools.cached_property
    def _stops(self) -> np.ndarray:
        return np.array([rows.stop for rows in self.ranges])

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the rank that holds each of `rows`."""
        # The owner is the first rank whose stop is above the row. A rank without rows has the stop
        # of the rank before it, so it is never found.
        return np.searchsorted(self._stops, rows, side="right")

    def counts(self, size_of_row: int) -> list[int]:
        """Return the number of elements on each rank."""
        return [len(rows) * size_of_row for rows in self.ranges]


@dataclass(frozen=True)
class _Journey:
    """The rows that this rank asks for or sends, sorted by owner."""

    order: np.ndarray
    """Order of the rows by owner; stable for rows of the same owner."""
    counts: list[int]
    """Number of rows to each rank."""
    incoming: list[int]
    """Number of rows from each rank."""

    @classmethod
    def plan(cls, call: CollectiveCall, partition: Partition, rows: np.ndarray) -> _Journey:
        """Sort `rows` by owner, and tell the owners how many they will get. **Collective**."""
        owners, size = partition.owners(rows), partition.num_ranks
        counts = np.bincount(owners, minlength=size)
        # To exchange parts of different lengths, both sides need the lengths, but so far only the
        # sender knows them.
        incoming = call.channel.transport.all_to_all(counts, [1] * size, [1] * size)
        # NumPy uses radix sort for small integers, which takes less than half the time.
        keys = owners.astype(np.uint16) if size <= 2**16 else owners
        # Stable, because an owner must apply writes to one row in the order of the program.
        return cls(np.argsort(keys, kind="stable"), counts.tolist(), incoming.tolist())

    def to_owners(self, call: CollectiveCall, values: np.ndarray) -> np.ndarray:
        """Send sorted `values` to their owners; return the received ones. **Collective**."""
        return _exchange(call, values, self.counts, self.incoming)

    def from_owners(self, call: CollectiveCall, values: np.ndarray) -> np.ndarray:
        """Send answers to received rows; return the answers for this rank. **Collective**."""
        return _exchange(call, values, self.incoming, self.counts)


def _exchange(
    call: CollectiveCall, values: np.ndarray, counts: list[int], incoming: list[int]
) -> np.ndarray:
    shape = values.shape[1:]
    size = math.prod(shape)
    call.note_moved(values.nbytes, "all_to_all")
    flat = call.channel.transport.all_to_all(
        values.reshape(-1), [n * size for n in counts], [n * size for n in incoming]
    )
    call.show_received([flat])
    return flat.reshape(sum(incoming), *shape)


def fetch_rows(
    call: CollectiveCall, partition: Partition, own: Array, rows: np.ndarray
) -> np.ndarray:
    """Return `rows` in order on the host; `own` holds the rows of this rank. **Collective**.

    Must be called inside a `call` that has been agreed on. All `rows` must exist in the variable.
    """
    with call.moving():
        journey = _Journey.plan(call, partition, rows)
        asked = journey.to_owners(call, rows[journey.order])
        xp = namespace_of(own)
        places = xp.asarray(asked - partition.ranges[call.channel.rank].start)
        # take is faster than indexing.
        answers = journey.from_owners(call, native(host_view(xp.take(own, places, axis=0))))
        # Answers arrive sorted by owner. The inverse of that sort puts them in the order of `rows`.
        inverse = np.empty_like(journey.order)
        inverse[journey.order] = np.arange(inverse.size)
        return np.take(answers, inverse, axis=0)


def send_rows(
    call: CollectiveCall, partition: Partition, owned: np.ndarray, rows: np.ndarray, values: Array
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values that all ranks send for rows of this one, in rank order. **Collective**.

    `values` belong to the numbers `rows`, which are in the rows `owned` of the partition.
    """
    with call.moving():
        journey = _Journey.plan(call, partition, owned)
        numbers = journey.to_owners(call, rows[journey.order])
        return numbers, journey.to_owners(call, native(host_view(values))[journey.order])


def gather_rows(call: CollectiveCall, partition: Partition, own: Array) -> np.ndarray:
    """Return all rows, on the host of every rank. **Collective**."""
    size = math.prod(own.shape[1:])
    with call.moving():
        flat = native(host_view(own)).reshape(-1)
        call.note_moved(flat.nbytes, "all_gather")
        gathered = call.channel.transport.all_gather(flat, partition.counts(size))
    call.show_received([gathered])
    return gathered.reshape(partition.num_rows, *own.shape[1:])


def scatter_rows(call: CollectiveCall, partition: Partition, whole: np.ndarray) -> np.ndarray:
    """Return this rank's rows of the `whole` of rank 0. **Collective**."""
    rank, size = call.channel.rank, math.prod(whole.shape[1:])
    counts = partition.counts(size)
    incoming = [counts[rank], *[0] * (len(counts) - 1)]
    with call.moving():
        outgoing = native(whole).reshape(-1) if rank == 0 else np.empty(0, whole.dtype)
        call.note_moved(outgoing.nbytes, "scatter")
        counts = counts if rank == 0 else [0] * len(counts)
        own = call.channel.transport.all_to_all(outgoing, counts, incoming)
    call.show_received([own])
    return own.reshape(len(partition.ranges[rank]), *whole.shape[1:])


def collect_rows(
    call: CollectiveCall, partition: Partition, own: Array, rows: slice
) -> np.ndarray | None:
    """Return `rows` on rank 0, ``None`` elsewhere. **Collective**."""
    rank, size = call.channel.rank, math.prod(own.shape[1:])
    parts = [(max(rows.start, each.start), min(rows.stop, each.stop)) for each in partition.ranges]
    counts = [max(0, stop - start) * size for start, stop in parts]
    start, stop = (each - partition.ranges[rank].start for each in parts[rank])
    with call.moving():
        # If this rank has none of `rows`, `stop` may be negative, and a slice would count from the
        # end.
        mine = native(host_view(own[start:stop] if start < stop else own[:0])).reshape(-1)
        to_root = [mine.size, *[0] * (len(counts) - 1)]
        incoming = counts if rank == 0 else [0] * len(counts)
        call.note_moved(mine.nbytes, "gather")
        joined = call.channel.transport.all_to_all(mine, to_root, incoming)
    call.show_received([joined])
    return None if rank else joined.reshape(rows.stop - rows.start, *own.shape[1:])
