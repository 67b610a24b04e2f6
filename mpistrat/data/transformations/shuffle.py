"""Shuffled order of a pass: a pure function of rows, chunks, seed, pass and batch size.

Files are shuffled in two stages. The chunks are put into random order and divided into partitions.
A partition mixes the rows of a few chunks at a time and supplies a fixed part of each global
batch. The window, that is, the rows of those chunks in all partitions, limits the memory of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import ENDLESS, Block, Order, Reordering, skip_items
from mpistrat.data.random import PassKey
from mpistrat.data.transformations.batch import regroup
from mpistrat.sharding import ceil_div

WINDOW_BYTES = 48 * 2**20
"""Size of the default window for files. The next window is decoded at the same time, so a rank
needs twice as much memory."""

_ROWS_AT_A_TIME = 2**13
"""Rows for several batches are collected at a time, because there may be thousands of
partitions."""


@dataclass(frozen=True)
class Shuffle(Reordering):
    """Items in random order: rows of files as described above, other items within windows."""

    seed: int
    reshuffle_each_iteration: bool
    window: int | None
    """Number of items mixed at a time; ``None``: `WINDOW_BYTES` for files, else the whole pass."""

    @property
    def depends_on_pass(self) -> bool:
        """Whether each pass has its own order."""
        return self.reshuffle_each_iteration

    def length(self, num_items: int) -> int:
        """Return the same number."""
        return num_items

    def window_rows(self, layout: ChunkLayout) -> int:
        """Return the number of rows that are mixed at a time."""
        window = self.window or layout.rows_in(WINDOW_BYTES)
        return max(window, layout.rows_per_chunk)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        drawn_for = key if self.reshuffle_each_iteration else ()
        rows, layout = upstream.rows, upstream.source.layout_of(key)
        if rows is not None and layout is not None:
            blocks = self._chunk_blocks(rows, layout, drawn_for, batch_size or 1)
            # For skipped batches only numbers are drawn; none of their rows is read.
            return skip_items(blocks, start)
        window = self.window if layout is None else self.window_rows(layout)
        if window is None and upstream.length == ENDLESS:
            raise ValueError(
                "shuffle needs a window if the dataset before it is endless. Pass window=..., or "
                "call shuffle before repeat."
            )
        # Each window has its own key, so nothing is drawn for the windows before `start`.
        first, rest = (0, start) if window is None else divmod(start, window)
        begun = upstream.blocks(key, batch_size, first * (window or 0))
        return skip_items(self._window_blocks(begun, window, drawn_for, first), rest)

    def _window_blocks(
        self, blocks: Iterator[Block], window: int | None, key: PassKey, first: int
    ) -> Iterator[Block]:
        """Return the windows from number `first` on, each in its own random order."""
        if window is None:
            everything = list(blocks)
            blocks = iter([np.concatenate(everything)] if everything else [])
        else:
            blocks = regroup(blocks, window)
        for number, block in enumerate(blocks, first):
            yield block[_RandomStream(self.seed, (*key, number)).permutation(0, len(block))]

    def _chunk_blocks(
        self, rows: range, layout: ChunkLayout, key: PassKey, batch_size: int
    ) -> Iterator[Block]:
        """Return the global batches of rows, one block per batch, from chunks in random order."""
        if not len(rows):
            return
        part = layout.of_range(rows)
        starts, lengths = part.starts[:-1], np.diff(part.starts)
        stream = _RandomStream(self.seed, key)
        shuffled = stream.permutation(0, len(starts))
        starts, lengths = starts[shuffled], lengths[shuffled]
        window = self.window_rows(layout)
        plan = Partitions.plan(len(starts), len(rows), batch_size, window // layout.rows_per_chunk)
        mixing = _Mixing(
            starts,
            lengths,
            np.cumsum(plan.lengths(len(rows))),
            window // plan.count,
            _RAMP if self.window is None else 1,
            # The numbers after those that ordered the chunks. The number at position i belongs to
            # row i of the shuffled chunks, so it does not matter when, or in which order, the
            # partitions draw.
            stream.part(len(starts), len(rows)),
        )
        num_full, rest = divmod(len(rows), batch_size)
        at_a_time = max(_ROWS_AT_A_TIME // batch_size, 1)
        groups = [
            (min(at_a_time, num_full - first), batch_size)
            for first in range(0, num_full, at_a_time)
        ]
        for count, length in groups + [(1, rest)] * bool(rest):
            places = mixing.take(count, np.diff(plan.bounds(length)))
            numbers = places if part.order is None else part.order[places]
            yield from rows.start + rows.step * numbers


_PARTITION_COUNTS = (1, 2, 4, 12, 24, 60, 120, 240, 720, 2520, 5040)
"""Numbers with many divisors, so that partitions divide evenly over common numbers of ranks."""

_FEW_PARTITIONS = 4
"""For up to this many partitions, two pieces each are enough, so that a few ranks share the
work."""

_MIN_PIECES_PER_PARTITION = 8
"""With fewer pieces a partition would mix badly, and too many pieces would be cut in two."""

_RAMP = 8
"""A pass begins with the window divided by this, because the first batch waits for the chunks that
it is drawn from. A window that the user has chosen has its full size from the first batch on."""

_MIN_EXAMPLES_PER_PARTITION = 64
"""In a partition with fewer examples, neighbours would often stay together."""


@dataclass(frozen=True)
class Partitions:
    """The arithmetic by which the partitions of a pass supply its global batches."""

    count: int
    batch_size: int

    @classmethod
    def plan(
        cls, num_pieces: int, num_examples: int, batch_size: int, window_pieces: int
    ) -> Partitions:
        """Return the partitions of a pass over `num_pieces` chunks."""
        # A partition fills a fixed, contiguous part of every global batch from its own chunks.
        # Their number L does not depend on the number of ranks N, so the order does not either. A
        # chunk is needed by one rank if N divides L, by fewer than two on average if N is smaller
        # than L, and by about N / L if N is larger, because then several ranks share a partition.
        limit = min(
            max(num_pieces // _MIN_PIECES_PER_PARTITION, min(num_pieces // 2, _FEW_PARTITIONS)),
            num_examples // _MIN_EXAMPLES_PER_PARTITION,
            batch_size,
            window_pieces // 2,  # a partition needs two of the pieces in memory to mix them
        )
        return cls(max(each for each in _PARTITION_COUNTS if each <= max(limit, 1)), batch_size)

    def bounds(self, num_examples: int) -> list[int]:
        """Return the position of each partition in a batch of `num_examples`, and its end."""
        return [ceil_div(each * num_examples, self.count) for each in range(self.count + 1)]

    def lengths(self, num_examples: int) -> list[int]:
        """Return how many examples each partition supplies in a pass of `num_examples`."""
        num_full, rest = divmod(num_examples, self.batch_size)
        full, last = self.bounds(self.batch_size), self.bounds(rest)
        return [
            num_full * (full[each + 1] - full[each]) + last[each + 1] - last[each]
            for each in range(self.count)
        ]


_PERIOD = 2**128
"""Period of PCG64. A step back is a step forward by the rest of the period."""


_DRAWN_AT_ONCE = 2**17
"""If at most this many numbers are needed, all are drawn at once, which is faster than to skip."""


class _RandomStream:
    """The random numbers of a pass; each partition draws its own range of them."""

    def __init__(self, seed: int, key: PassKey) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
        self._position = 0

    def raw(self, first: int, length: int) -> np.ndarray:
        """Return the `length` numbers from `first` on."""
        self._bits.advance((first - self._position) % _PERIOD)
        self._position = first + length
        # Raw bits are the one stream that NumPy promises not to change between versions.
        return self._bits.random_raw(length)

    def permutation(self, first: int, length: int) -> np.ndarray:
        """Return a random order of `length` items, from the `length` numbers after `first`."""
        # Generator.permutation may change between versions of NumPy (NEP 19). A stable sort of raw
        # bits cannot, not even if two of them are equal.
        return self.raw(first, length).argsort(kind="stable")

    def part(self, first: int, length: int) -> Callable[[int, int], np.ndarray]:
        """Return `raw` for the `length` numbers from `first` on, counted from there."""
        if length > _DRAWN_AT_ONCE:
            return lambda begin, count: self.raw(first + begin, count)
        drawn = self.raw(first, length)
        return lambda begin, count: drawn[begin : begin + count]


class _Mixing:
    """The places of examples, mixed within each partition, and taken a few at a time.

    The chunks, which have `starts` and `lengths`, are cut at the ends of the partitions, so that
    each partition has exactly the examples that it supplies. A chunk at the border of two
    partitions belongs to both. A partition mixes pieces of `window` rows at a time: first a
    `ramp`-th part of that, then twice as much each time. All partitions that need new examples mix
    together, because there may be many of them.
    """

    def __init__(
        self,
        starts: np.ndarray,
        lengths: np.ndarray,
        ends: np.ndarray,
        window: int,
        ramp: int,
        random_bits: Callable[[int, int], np.ndarray],
    ) -> None:
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        stops = lengths.cumsum()
        # If a partition ends within a chunk, the chunk is cut in two.
        cuts = np.unique(ends[stops[stops.searchsorted(ends)] != ends])
        places = stops.searchsorted(cuts)
        self._stops = np.insert(stops, places, cuts)  # of pieces, in shuffled order
        begins = np.concatenate([[0], self._stops[:-1]])
        starts = np.insert(starts, places, starts[places])
        stops = np.insert(stops, places, stops[places])
        lengths = np.insert(lengths, places, lengths[places])
        self._starts = starts + begins - (stops - lengths)
        self._lengths = self._stops - begins
        # For each partition: the range of its pieces that are not mixed yet, and their first place.
        self._last = self._stops.searchsorted(ends, "right")
        self._first = np.concatenate([[0], self._last])[:-1]
        self._done = np.concatenate([[0], ends])[:-1]
        self._window = window
        self._sizes = np.full(len(ends), ceil_div(window, ramp))
        self._random_bits = random_bits
        self._mixed = [np.empty(0, np.int64)] * len(ends)  # but not taken
        self._num_mixed = np.zeros(len(ends), np.int64)

    def take(self, num_batches: int, widths: np.ndarray) -> Block:
        """Return places of shape ``(num_batches, sum(widths))``; each partition fills its width."""
        counts = num_batches * widths
        while len(short := np.flatnonzero(self._num_mixed < counts)):
            self._mix(short)
        self._num_mixed -= counts
        taken = []
        for number, (count, width) in enumerate(zip(counts.tolist(), widths.tolist(), strict=True)):
            mixed = self._mixed[number]
            taken.append(mixed[:count].reshape(num_batches, width))
            self._mixed[number] = mixed[count:]
        return np.concatenate(taken, axis=1)

    def _mix(self, partitions: np.ndarray) -> None:
        """Mix the next pieces of some partitions."""
        firsts, done = self._first[partitions], self._done[partitions]
        sizes = self._sizes[partitions]
        # Take at least one piece, even if it is longer than the window, or `take` would not end.
        stops = np.maximum(self._stops.searchsorted(done + sizes, "right"), firsts + 1)
        stops = np.minimum(stops, self._last[partitions])
        ends = self._stops[stops - 1]
        self._first[partitions], self._done[partitions] = stops, ends
        self._sizes[partitions] = np.minimum(2 * sizes, self._window)
        self._num_mixed[partitions] += ends - done
        pieces = _expand(firsts, stops - firsts)
        places = _expand(self._starts[pieces], self._lengths[pieces])
        begin = 0
        for number, first, length in zip(
            partitions.tolist(), done.tolist(), (ends - done).tolist(), strict=True
        ):
            order = self._random_bits(first, length).argsort(kind="stable")
            mixed, rest = places[begin : begin + length][order], self._mixed[number]
            self._mixed[number] = np.concatenate([rest, mixed]) if len(rest) else mixed
            begin += length


def _expand(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return all positions within the pieces, one piece after the other."""
    ends = lengths.cumsum()
    positions: np.ndarray = np.arange(ends[-1]) + (starts - (ends - lengths)).repeat(lengths)
    return positions
