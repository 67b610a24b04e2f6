"""Order of a pass: the sequence of items, computed before anything is read.

A pass is a stream of *blocks*: one-dimensional arrays of items. An item is the number of an
example (for sources that can be read in any order), an example itself (for generators) or,
after batching, the block of a whole batch. Transformations only rearrange items, so every rank
computes the order of all examples cheaply and reads only the examples of its slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.random import PassKey, PassStream

ENDLESS = -1
UNKNOWN = -2

Block = np.ndarray
"""A one-dimensional array of items: int64 numbers of examples, or objects."""

_BLOCK_LENGTH = 2**16


@dataclass(frozen=True)
class Order:
    """The order of the examples of `source` after `transformations`."""

    source: Source
    transformations: tuple[Transformation, ...] = ()

    @property
    def length(self) -> int:
        """Number of items per pass, or `ENDLESS` or `UNKNOWN`."""
        if not self.transformations:
            return self.source.num_examples
        return self.transformations[-1].length_of(self._upstream)

    @property
    def rows(self) -> range | None:
        """The items as a range of row numbers; ``None`` if the order is not a range."""
        if self.source.num_examples < 0 or not self.source.is_in_order:
            return None
        rows: range | None = range(self.source.num_examples)
        for each in self.transformations:
            rows = None if rows is None else each.rows(rows)
        return rows

    @property
    def span(self) -> int:
        """A number greater than all items, which each further repetition adds to its items."""
        span = span_of(self.source)
        for each in self.transformations:
            span *= each.num_repetitions or 1
        return span

    def blocks(self, key: PassKey, batch_size: int | None, start: int = 0) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        # `batch_size` is the global size of the batches to come, which a shuffle may use.
        rows = self.rows
        if rows is not None:
            # A range can start anywhere, so resuming costs nothing.
            return blocks_of_range(rows[start:])
        if not self.transformations:
            return self.source.blocks(key, batch_size, start)
        return self.transformations[-1].blocks(self._upstream, key, batch_size, start)

    @cached_property
    def _upstream(self) -> Order:
        return Order(self.source, self.transformations[:-1])

    def at(self, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`; `known` keeps computed items."""
        rows = self.rows
        if rows is not None:
            return rows.start + rows.step * positions
        if self.transformations:
            return self.transformations[-1].at(self._upstream, positions, key, known)
        if self.source.num_examples == ENDLESS and self.source.is_in_order:
            return positions
        return self.found_at(positions, key, known)

    def found_at(self, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`; computes all items before them."""
        depth = len(self.transformations)
        found = known.get((depth, key))
        count = int(positions.max(initial=-1)) + 1
        if found is None or len(found) < count:
            found = _extended(found, self.blocks, key, count if self.length == ENDLESS else None)
            while len(known) >= _MAX_KNOWN_PASSES:
                del known[next(iter(known))]
            known[depth, key] = found
        items: Block = found[positions]
        return items

    def then(self, transformation: Transformation) -> Order:
        """Return the order with one more transformation."""
        return Order(self.source, (*self.transformations, transformation))


def _extended(
    found: Block | None,
    blocks: Callable[[PassKey, int | None, int], Iterator[Block]],
    key: PassKey,
    count: int | None,
) -> Block:
    """Return the items `found` and the items after them, at least `count` in all, or all."""
    parts = [] if found is None else [found]
    start = num_found = sum(map(len, parts))
    for block in blocks(key, None, start):
        parts.append(block)
        num_found += len(block)
        # The number of items at least doubles, so repeated calls take little time in total.
        if count is not None and num_found >= max(count, 2 * start):
            break
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


KnownPasses = dict[tuple[int, PassKey], Block]
"""The items of whole passes, by the number of transformations and the key."""

_MAX_KNOWN_PASSES = 4
_MAX_KNOWN_SPAN = 2**48


def span_of(source: Source) -> int:
    """Return a number that is greater than every item of `source`."""
    return source.num_examples if source.num_examples >= 0 else _MAX_KNOWN_SPAN


class Transformation(Protocol):
    """A transformation of the order."""

    num_repetitions: int | None
    """How often all items are repeated, each time increased by the span; ``None``: endlessly."""

    @property
    def depends_on_pass(self) -> bool:
        """Whether the items leave in a different order in each pass."""

    def length(self, num_items: int) -> int:
        """Return the number of output items for `num_items`, `ENDLESS` or `UNKNOWN` input items."""

    def length_of(self, upstream: Order) -> int:
        """Return the number of output items for the items of `upstream`."""

    def rows(self, rows: range) -> range | None:
        """Return the output rows for the input `rows`; ``None`` if they do not form a range."""

    def renumbered(self, number: int) -> int:
        """Return the output number of the example with the input number `number`."""

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`."""


class Reordering(Transformation):
    """Base class of transformations that change the order."""

    num_repetitions = 1

    @property
    def depends_on_pass(self) -> bool:
        """Whether the items leave in a different order in each pass."""
        return False

    def length_of(self, upstream: Order) -> int:
        """Return the number of output items for the items of `upstream`."""
        return self.length(upstream.length)

    def rows(self, rows: range) -> range | None:
        """Return ``None``: the output items are not rows, or do not form a range."""
        return None

    def renumbered(self, number: int) -> int:
        """Return the same number."""
        return number

    def at(self, upstream: Order, positions: np.ndarray, key: PassKey, known: KnownPasses) -> Block:
        """Return the items at `positions` of the pass `key`; computes all items before them."""
        return upstream.then(self).found_at(positions, key, known)


class SameOrder(Reordering):
    """Base class of transformations that keep the order of elements."""

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


class Source(Protocol):
    """The source of the examples of a dataset."""

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example."""

    @property
    def num_examples(self) -> int:
        """Number of examples, `ENDLESS` or `UNKNOWN`."""

    @property
    def layout(self) -> ChunkLayout | None:
        """The chunks, or ``None`` if rows can be read in any order at the same cost."""

    def layout_of(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks in the pass `key`."""

    @property
    def kind(self) -> str:
        """The method of `Dataset` that creates it, with the function that was passed."""

    @property
    def order_entries(self) -> list[str]:
        """Strings that ranks compare: all that decides the order except the number of examples."""

    @property
    def file_starts(self) -> np.ndarray:
        """The numbers of the first examples of all files but the first."""

    @property
    def is_read(self) -> bool:
        """Whether length and spec are known without opening a file or calling a function."""

    @property
    def is_stream(self) -> bool:
        """Whether items are examples, which are created one after the other."""

    @property
    def is_in_order(self) -> bool:
        """Whether the items of a pass are 0, 1, 2 and so on."""

    @property
    def is_of_files(self) -> bool:
        """Whether examples are stored in files."""

    @property
    def is_steady(self) -> bool:
        """Whether a number means the same example in each pass, except for random maps."""

    @property
    def num_maps(self) -> int:
        """Number of maps inside the source."""

    def only(self, fields: tuple[Any, ...]) -> Source | None:
        """Return the source of tuples of some fields; ``None`` if that would read no less."""

    def row_lengths(self) -> np.ndarray | None:
        """Return the common length of the arrays of each example; ``None`` if it is not known."""

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""

    def open(self, window_rows: int, stream: PassStream) -> Reader:
        """Return a reader for rows that are shuffled within windows of `window_rows`."""


class PlainSource:
    """Base class of sources that do not read from a different dataset."""

    is_in_order = is_steady = True
    is_stream = is_of_files = False
    num_maps = 0
    num_examples: int

    @property
    def is_read(self) -> bool:
        """True: the source is in memory."""
        return True

    @property
    def layout(self) -> ChunkLayout | None:
        """``None``: rows can be read in any order at the same cost."""
        return None

    @property
    def file_starts(self) -> np.ndarray:
        """Empty: there is at most one file."""
        return np.empty(0, np.int64)

    @property
    def order_entries(self) -> list[str]:
        """Empty: only the number of examples decides the order."""
        return []

    def layout_of(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks, which are the same in every pass."""
        return self.layout

    def only(self, fields: tuple[Any, ...]) -> Source | None:
        """Return ``None``: reading some fields of an example costs as much as all of them."""
        return None

    def row_lengths(self) -> np.ndarray | None:
        """Return ``None``: the length of the arrays is not known before an example is created."""
        return None

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the numbers of the examples from `start` on."""
        return blocks_of_range(range(self.num_examples)[start:])


class Reader(Protocol):
    """Turns items into arrays, for one iteration and one thread at a time."""

    @property
    def lookahead_rows(self) -> int:
        """How many rows the caller should announce before they are read; 0 for none at all."""

    def expect(self, block: Block) -> None:
        """Record that the items `block` will be read, after those announced before."""

    def read(self, block: Block) -> Any:
        """Return the nest of arrays, each of shape ``(len(block), *shape)``."""

    def close(self) -> None:
        """Release files and memory."""


class Example(list[Any]):
    """An item that is itself an example: the list of its arrays, with its number."""

    number = 0


def moved_items(block: Block, offset: int) -> Block:
    """Return the items of a later repetition, whose numbers are greater by `offset`."""
    if block.dtype != object:
        return block + offset
    moved = np.empty_like(block)
    for place, item in enumerate(block):
        if isinstance(item, Example):
            moved[place] = Example(item)
            moved[place].number = item.number + offset
        else:
            moved[place] = moved_items(item, offset)
    return moved


def blocks_of_range(rows: range) -> Iterator[Block]:
    """Return the numbers of `rows`, many at a time."""
    for start in range(0, len(rows), _BLOCK_LENGTH):
        part = rows[start : start + _BLOCK_LENGTH]
        yield np.arange(part.start, part.stop, part.step, dtype=np.int64)


def skip_items(blocks: Iterator[Block], count: int) -> Iterator[Block]:
    """Return the blocks without the first `count` items."""
    # Usually nothing is skipped, and one more generator would cost time for each block.
    return _skip_items(blocks, count) if count else blocks


def _skip_items(blocks: Iterator[Block], count: int) -> Iterator[Block]:
    for block in blocks:
        if count < len(block):
            yield block[count:]
        count = max(count - len(block), 0)


def function_name(fn: Callable[..., Any]) -> str:
    """Return the qualified name of `fn`, or of its class, the same on all ranks of a program."""
    # A partial has no name, and its repr has an address, which differs between ranks.
    if isinstance(fn, functools.partial):
        return f"partial of {function_name(fn.func)}"
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
