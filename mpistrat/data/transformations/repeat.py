"""Repetitions of a dataset: several, or endlessly many."""

from __future__ import annotations

import itertools
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
    moved_items,
    skip_items,
)
from mpistrat.data.random import PassKey


@dataclass(frozen=True)
class Repeat(Reordering):
    """The items `count` times over; endlessly if `count` is ``None``."""

    count: int | None

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
        if num_items == 0 or self.count == 0:
            return 0
        if self.count is None or num_items == ENDLESS:
            return ENDLESS
        return UNKNOWN if num_items == UNKNOWN else num_items * self.count

    def rows(self, rows: range) -> range | None:
        """Return the output rows."""
        return rows if self.count == 1 else None

    @property
    def num_repetitions(self) -> int | None:  # type: ignore[override]
        """The number of repetitions."""
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
        if length <= 0:  # unknown, so the repetitions to skip must be run through
            return skip_items(self._repetitions(upstream, key, batch_size, 0, 0), start)
        return self._repetitions(upstream, key, batch_size, *divmod(start, length))

    def _repetitions(
        self, upstream: Order, key: PassKey, batch_size: int | None, first: int, start: int
    ) -> Iterator[Block]:
        """Return the repetitions from number `first` on, the first one without `start` items."""
        rounds = itertools.count(first) if self.count is None else range(first, self.count)
        for repetition in rounds:
            empty = True
            for block in upstream.blocks((*key, repetition), batch_size, start):
                empty = empty and not len(block)
                yield moved_items(block, repetition * upstream.span) if repetition else block
            # An empty dataset, repeated endlessly, would never yield and never return.
            if empty:
                return
            start = 0
