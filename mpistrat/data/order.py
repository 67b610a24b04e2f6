"""Order of a pass: which items come one after the other, before anything is read.

A pass is a stream of *blocks*: one-dimensional arrays of items. An item is the number of an
example (for sources that can be read in any order), an example itself (for generators) or,
after batching, the block of a whole batch. Transformations only rearrange items, so every rank
computes the order of all examples cheaply and reads only those of its slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

__all__ = [
    "CHUNK_OVERHEAD_BYTES",
    "ENDLESS",
    "UNKNOWN",
    "Block",
    "ChunkLayout",
    "Order",
    "PassKey",
    "Reader",
    "Source",
    "Transformation",
    "function_name",
    "skip_items",
]

ENDLESS = -1
UNKNOWN = -2

Block = np.ndarray
"""A one-dimensional array of items: int64 numbers of examples, or objects."""

PassKey = tuple[int, ...]
"""The number of the pass, then of each repetition within it."""

CHUNK_OVERHEAD_BYTES = 2048
"""What a chunk in memory needs besides its rows, which counts where chunks are tiny."""

_ROW_OVERHEAD_BYTES = 24
"""What a row of a window needs besides: its number, a random number and its position."""

_BLOCK_LENGTH = 2**16


@dataclass(frozen=True)
class Order:
    """The order of the examples of `source` after `transformations`."""

    source: Source
    transformations: tuple[Transformation, ...] = ()

    @property
    def length(self) -> int:
        """Number of items in a pass, `ENDLESS` or `UNKNOWN`."""
        length = self.source.num_examples
        for each in self.transformations:
            length = each.length(length)
        return length

    @property
    def rows(self) -> range | None:
        """The items as a range of row numbers, where the order is as simple as that."""
        if self.source.num_examples == UNKNOWN:
            return None
        rows: range | None = range(self.source.num_examples)
        for each in self.transformations:
            rows = None if rows is None else each.rows(rows)
        return rows

    def blocks(self, key: PassKey, batch_size: int | None, start: int = 0) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        # A shuffle may use `batch_size`, the global one that its items will be grouped by.
        rows = self.rows
        if rows is not None:
            return _blocks_of_range(rows[start:])
        if not self.transformations:
            return skip_items(self.source.stream(), start)
        upstream = Order(self.source, self.transformations[:-1])
        return self.transformations[-1].blocks(upstream, key, batch_size, start)


class Transformation(Protocol):
    """A transformation of the order."""

    def length(self, num_items: int) -> int:
        """Return how many items leave where `num_items`, `ENDLESS` or `UNKNOWN` enter."""

    def rows(self, rows: range) -> range | None:
        """Return the rows that leave where `rows` enter; ``None`` if they form no range."""

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""


@dataclass(frozen=True)
class ChunkLayout:
    """The rows that are read and decoded together."""

    starts: np.ndarray
    """First row of each chunk, ascending, and at the end the number of rows."""
    bytes_per_row: int
    """Size of one decoded example, all fields together."""

    @cached_property
    def rows_per_chunk(self) -> int:
        """Length of the longest chunk."""
        return int(np.diff(self.starts).max(initial=1))

    def rows_in(self, num_bytes: int) -> int:
        """Return how many rows a window of `num_bytes` of memory holds."""
        overhead = _ROW_OVERHEAD_BYTES + CHUNK_OVERHEAD_BYTES // self.rows_per_chunk
        return num_bytes // (self.bytes_per_row + overhead)


class Source(Protocol):
    """Where examples come from."""

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example."""

    @property
    def num_examples(self) -> int:
        """Number of examples, or `UNKNOWN`."""

    @property
    def layout(self) -> ChunkLayout | None:
        """The chunks, or ``None`` where rows cost the same in any order."""

    @property
    def kind(self) -> str:
        """The method of `Dataset` that makes it, with the function it was given."""

    @property
    def order_entries(self) -> list[str]:
        """What decides the order besides the number of examples, as texts that ranks compare."""

    def stream(self) -> Iterator[Block]:
        """Return the items where their number is `UNKNOWN`."""

    def open(self, window_rows: int) -> Reader:
        """Return a reader that expects rows in disorder within windows of this length."""


class Reader(Protocol):
    """Turns items into arrays, for one iteration and one thread at a time."""

    @property
    def lookahead_rows(self) -> int:
        """How many rows in advance it wants to know what will be read; 0 for none at all."""

    def expect(self, block: Block) -> None:
        """Record that the items `block` are going to be read, after those noted before."""

    def read(self, block: Block) -> Any:
        """Return the nest of arrays, each of shape ``(len(block), *shape)``."""

    def close(self) -> None:
        """Release files and memory."""


def _blocks_of_range(rows: range) -> Iterator[Block]:
    for start in range(0, len(rows), _BLOCK_LENGTH):
        part = rows[start : start + _BLOCK_LENGTH]
        yield np.arange(part.start, part.stop, part.step, dtype=np.int64)


def skip_items(blocks: Iterator[Block], count: int) -> Iterator[Block]:
    """Return the blocks without the first `count` items."""
    # Mostly nothing is skipped, and a generator in between would cost time at each block.
    return _skip_items(blocks, count) if count else blocks


def _skip_items(blocks: Iterator[Block], count: int) -> Iterator[Block]:
    for block in blocks:
        if count < len(block):
            yield block[count:]
        count = max(count - len(block), 0)


def function_name(fn: Callable[..., Any]) -> str:
    """Return the qualified name of `fn`, or of its class, the same on all ranks of a program."""
    if isinstance(fn, functools.partial):
        return f"partial of {function_name(fn.func)}"
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
