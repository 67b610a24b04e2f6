"""Transformations of the order: take, skip, shard, repeat, map, prefetch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    KnownPasses,
    Order,
    Transformation,
    function_name,
    moved_items,
    skip_items,
)
from mpistrat.data.random import PassKey


class Reordering(Transformation):
    """A transformation of the order: what most of these have in common."""

    num_repetitions = 1

    @property
    def depends_on_pass(self) -> bool:
        """Whether the items leave in a different order in each pass."""
        return False

    def length_of(self, upstream: Order) -> int:
        """Return how many items leave where those of `upstream` enter."""
        return self.length(upstream.length)

    def rows(self, rows: range) -> range | None:
        """Return ``None``: what leaves are no rows, or form no range."""
        return None

    def renumbered(self, number: int) -> int:
        """Return the same number."""
        return number

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`. All are computed."""
        return upstream.then(self).found_at(positions, key, known)


@dataclass(frozen=True)
class Take(Reordering):
    """The first `count` items."""

    count: int

    def length(self, num_items: int) -> int:
        """Return how many items leave."""
        if num_items == UNKNOWN:
            return UNKNOWN if self.count else 0
        return self.count if num_items == ENDLESS else min(self.count, num_items)

    def rows(self, rows: range) -> range | None:
        """Return the rows that leave."""
        return rows[: self.count]

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`."""
        return upstream.at(positions, key, known)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        missing = self.count - start
        if missing <= 0:
            return
        for block in upstream.blocks(key, batch_size, start):
            yield block[:missing]
            missing -= len(block)
            # Asking for one block more could cost a generator's time, or never return.
            if missing <= 0:
                return


@dataclass(frozen=True)
class Skip(Reordering):
    """All items but the first `count`."""

    count: int

    def length(self, num_items: int) -> int:
        """Return how many items leave."""
        return num_items if num_items < 0 else max(num_items - self.count, 0)

    def rows(self, rows: range) -> range | None:
        """Return the rows that leave."""
        return rows[self.count :]

    def renumbered(self, number: int) -> int:
        """Return the number of an example among those that leave."""
        return number - self.count

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`."""
        return upstream.at(positions + self.count, key, known)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        return upstream.blocks(key, batch_size, self.count + start)


@dataclass(frozen=True)
class Shard(Reordering):
    """Every `num_shards`-th item, from item `index` on."""

    num_shards: int
    index: int

    def length(self, num_items: int) -> int:
        """Return how many items leave."""
        if num_items < 0:
            return num_items
        return len(range(self.index, num_items, self.num_shards))

    def rows(self, rows: range) -> range | None:
        """Return the rows that leave."""
        return rows[self.index :: self.num_shards]

    def renumbered(self, number: int) -> int:
        """Return the number of an example among those that leave."""
        return (number - self.index) // self.num_shards

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`."""
        return upstream.at(positions * self.num_shards + self.index, key, known)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        position = start * self.num_shards
        for block in upstream.blocks(key, batch_size, position):
            yield block[(self.index - position) % self.num_shards :: self.num_shards]
            position += len(block)


@dataclass(frozen=True)
class Repeat(Reordering):
    """The items `count` times over, endlessly where it is ``None``."""

    count: int | None

    def length(self, num_items: int) -> int:
        """Return how many items leave."""
        if num_items == 0 or self.count == 0:
            return 0
        if self.count is None or num_items == ENDLESS:
            return ENDLESS
        return UNKNOWN if num_items == UNKNOWN else num_items * self.count

    def rows(self, rows: range) -> range | None:
        """Return the rows that leave."""
        return rows if self.count == 1 else None

    @property
    def num_repetitions(self) -> int | None:  # type: ignore[override]
        """How often all items come again."""
        return self.count

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`."""
        length = upstream.length
        if length <= 0:
            return super().at(upstream, positions, key, known)
        rounds, positions = np.divmod(positions, length)
        items = np.empty(len(positions), np.int64)
        for each in np.unique(rounds).tolist():
            mine = rounds == each
            found = upstream.at(positions[mine], (*key, each), known)
            items[mine] = found + each * upstream.span
        return items

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        length = upstream.length
        if length <= 0:  # unknown: the repetitions to leave out are found by repeating
            return skip_items(self._repetitions(upstream, key, batch_size, 0, 0), start)
        return self._repetitions(upstream, key, batch_size, *divmod(start, length))

    def _repetitions(
        self, upstream: Order, key: PassKey, batch_size: int | None, first: int, start: int
    ) -> Iterator[Block]:
        """Return the repetitions from number `first` on, that one without its first `start`."""
        rounds = itertools.count(first) if self.count is None else range(first, self.count)
        for repetition in rounds:
            empty = True
            for block in upstream.blocks((*key, repetition), batch_size, start):
                empty = empty and not len(block)
                yield moved_items(block, repetition * upstream.span) if repetition else block
            if empty:
                return
            start = 0


class SameOrder(Reordering):
    """A transformation of elements that leaves their order alone."""

    def length(self, num_items: int) -> int:
        """Return the same number."""
        return num_items

    def rows(self, rows: range) -> range | None:
        """Return the same rows."""
        return rows

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`."""
        return upstream.at(positions, key, known)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        return upstream.blocks(key, batch_size, start)


@dataclass(frozen=True, repr=False)
class Map(SameOrder):
    """`fn` of each element, with random numbers of `seed`."""

    fn: Callable[..., Any]
    seed: int = 0
    num_parallel_calls: int | None = None
    """In how many threads; ``None`` for that of the iterator."""
    num_wraps: int = 0
    """How many batches it was a map of that were taken apart again."""

    def __repr__(self) -> str:
        # The number of threads changes no element, so ranks may differ in it.
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Map(fn={function_name(self.fn)}{seed})"


@dataclass(frozen=True)
class Prefetch(SameOrder):
    """Up to `num_elements` elements prepared ahead, in a thread."""

    num_elements: int
