"""Batches of a data set: items in groups, taken apart again, and numbered."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.order import (
    UNKNOWN,
    Block,
    Order,
    Transformation,
    skip_items,
)
from mpistrat.data.random import PassKey
from mpistrat.data.sources import RangeSource
from mpistrat.data.spec import batched
from mpistrat.data.stacking import Column, stacked
from mpistrat.data.transforms import Map, Reordering
from mpistrat.sharding import ceil_div


@dataclass(frozen=True)
class Batch(Reordering):
    """Items in groups of `batch_size`: each becomes one item."""

    batch_size: int
    drop_remainder: bool

    @property
    def known_length(self) -> int | None:
        """The length of every batch, where it is one."""
        return self.batch_size if self.drop_remainder else None

    def spec_of(self, element_spec: Any, is_mapped: bool) -> Any:
        """Return the nest of specs of a batch of elements, also of those that a map made."""
        return batched(element_spec, self.known_length)

    def stack(self, column: Column, structure: nests.Structure, number: int) -> Any:
        """Return a column, leaf `number` of the elements' `structure`, as one value."""
        return stacked(column, self.batch_size)

    @property
    def needs_one_shape(self) -> bool:
        """Whether all elements of a batch must have one shape."""
        return type(self) is Batch

    def length(self, num_items: int) -> int:
        """Return how many items leave."""
        if num_items < 0:
            return num_items
        if self.drop_remainder:
            return num_items // self.batch_size
        return ceil_div(num_items, self.batch_size)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return one item, a block, for each batch of the pass `key`."""
        blocks = upstream.blocks(key, self.batch_size, start * self.batch_size)
        for group in regroup(blocks, self.batch_size):
            if self.drop_remainder and len(group) < self.batch_size:
                return
            item = np.empty(1, object)
            item[0] = group
            yield item


@dataclass(frozen=True)
class WholeBatches(Reordering):
    """The items that fill batches of `batch_size`, without those left over."""

    batch_size: int

    def length(self, num_items: int) -> int:
        """Return how many items leave."""
        return num_items if num_items < 0 else num_items // self.batch_size * self.batch_size

    def rows(self, rows: range) -> range | None:
        """Return the rows that leave."""
        return rows[: self.length(len(rows))]

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        first = start // self.batch_size
        blocks = upstream.blocks(key, batch_size, first * self.batch_size)
        groups = regroup(blocks, self.batch_size)
        whole = itertools.takewhile(lambda group: len(group) == self.batch_size, groups)
        return skip_items(whole, start % self.batch_size)


@dataclass(frozen=True)
class Unbatch(Reordering):
    """The items of batches, one by one."""

    batch_size: int
    are_whole: bool
    """Whether no batch is shorter."""

    _known: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Numbers of items that leave, by the number of items that the batches are made of."""

    def length(self, num_items: int) -> int:
        """Return how many items leave; a short batch may be among those taken or repeated."""
        if num_items <= 0:
            return num_items
        return num_items * self.batch_size if self.are_whole else UNKNOWN

    def length_of(self, upstream: Order) -> int:
        """Return how many items leave, `UNKNOWN` where that depends on the pass."""
        length = self.length(upstream.length)
        if length != UNKNOWN:
            return length
        place = _place_of_batch(upstream.transformations)
        num_items = Order(upstream.source, upstream.transformations[:place]).length
        if num_items <= 0:
            return UNKNOWN if num_items else 0
        if num_items not in self._known:
            self._known[num_items] = self._count(num_items, upstream.transformations[place + 1 :])
        return self._known[num_items]

    def _count(self, num_items: int, later: tuple[Transformation, ...]) -> int:
        """Return how many of `num_items` are in the batches that `later` leaves."""
        num_batches = ceil_div(num_items, self.batch_size)
        batches = Order(RangeSource(num_batches), later)
        if batches.length < 0:
            return batches.length
        counts = np.zeros(num_batches, np.int64)
        for block in batches.blocks((0,), None):
            counts += np.bincount(block % num_batches, minlength=num_batches)
        of_last = num_items - (num_batches - 1) * self.batch_size
        is_fixed = not any(each.depends_on_pass for each in later)
        if not is_fixed and of_last < self.batch_size and (counts != counts[0]).any():
            return UNKNOWN  # the short batch may be among those that are left out
        return int(counts[:-1].sum() * self.batch_size + counts[-1] * of_last)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        first = start // self.batch_size if self.are_whole else 0
        batches = upstream.blocks(key, None, first)
        items = (np.asarray(item) for block in batches for item in block)
        return skip_items(items, start - first * self.batch_size)


def _place_of_batch(transformations: Sequence[Transformation]) -> int:
    """Return the place of the last `Batch` that no `Unbatch` has taken apart."""
    num_undone = 0
    for place in reversed(range(len(transformations))):
        if isinstance(transformations[place], Unbatch):
            num_undone += 1
        elif isinstance(transformations[place], Batch):
            if not num_undone:
                return place
            num_undone -= 1
    raise ValueError("unbatch undoes a batch, but this dataset was not batched.")


class NumberedBatch(np.ndarray):
    """The items of a batch that has been enumerated."""

    numbers: tuple[int, ...] = ()
    """Those that each `Enumerate` has given it."""

    def __array_finalize__(self, source: Any) -> None:
        self.numbers = getattr(source, "numbers", ())


@dataclass(frozen=True)
class Enumerate(Reordering):
    """Each batch with its number, from `start` on."""

    start: int

    def length(self, num_items: int) -> int:
        """Return the same number."""
        return num_items

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        numbers = itertools.count(self.start + start)
        for block in upstream.blocks(key, batch_size, start):
            numbered = np.empty_like(block)
            for place, item in enumerate(block):
                numbered[place] = item.view(NumberedBatch)
                numbered[place].numbers = (*getattr(item, "numbers", ()), next(numbers))
            yield numbered


def wrapped(transformation: Transformation) -> Transformation:
    """Return a transformation of batches as one of their elements."""
    if not isinstance(transformation, Map):
        return transformation
    return dataclasses.replace(transformation, num_wraps=transformation.num_wraps + 1)


def refuse_numbered(transformations: Sequence[Transformation]) -> None:
    """Raise ValueError where batches that are to be taken apart were enumerated."""
    if any(isinstance(each, Enumerate) for each in transformations):
        raise ValueError(
            "unbatch takes apart arrays along their first dimension, which the number that "
            "enumerate gives a batch does not have. Call enumerate after unbatch, or before batch."
        )


def regroup(blocks: Iterator[Block], length: int) -> Iterator[Block]:
    """Return the same items in blocks of `length`; the last one may be shorter."""
    waiting: list[Block] = []
    missing = length
    for block in blocks:
        if not waiting and len(block) == length:
            yield block
            continue
        start = 0
        while len(block) - start >= missing:
            waiting.append(block[start : start + missing])
            yield waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
            waiting, start, missing = [], start + missing, length
        if start < len(block):
            waiting.append(block[start:])
            missing -= len(block) - start
    if waiting:
        yield np.concatenate(waiting)
