"""Transformations that choose elements by their positions: take, skip and shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    KnownPasses,
    Order,
    Reordering,
)
from mpistrat.data.random import PassKey


@dataclass(frozen=True)
class Take(Reordering):
    """The first `count` items."""

    count: int

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
        if num_items == UNKNOWN:
            return UNKNOWN if self.count else 0
        return self.count if num_items == ENDLESS else min(self.count, num_items)

    def rows(self, rows: range) -> range | None:
        """Return the output rows."""
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
            # One more block may take a slow generator long, or never arrive.
            if missing <= 0:
                return


@dataclass(frozen=True)
class Skip(Reordering):
    """All items but the first `count`."""

    count: int

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
        return num_items if num_items < 0 else max(num_items - self.count, 0)

    def rows(self, rows: range) -> range | None:
        """Return the output rows."""
        return rows[self.count :]

    def renumbered(self, number: int) -> int:
        """Return the output number of an example."""
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
        """Return the number of output items."""
        if num_items < 0:
            return num_items
        return len(range(self.index, num_items, self.num_shards))

    def rows(self, rows: range) -> range | None:
        """Return the output rows."""
        return rows[self.index :: self.num_shards]

    def renumbered(self, number: int) -> int:
        """Return the output number of an example."""
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
