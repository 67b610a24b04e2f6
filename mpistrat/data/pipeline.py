"""Pipeline of a data set: a source and its transformations, run when it is iterated."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import sharding
from mpistrat.data.elements import ElementMaker, examples_to_read
from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    Order,
    Reader,
    Source,
    Transformation,
)
from mpistrat.data.random import PassStream
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.spec import batched, open_batch, spec_of, with_room_for_text
from mpistrat.data.transforms import Batch, Map, Prefetch
from mpistrat.errors import DataError
from mpistrat.system.threads import in_background

__all__ = ["Pipeline", "Prepare"]

Prepare = Callable[[Any], Any]
"""Takes a batch in host memory, and may begin to copy it to a device."""


def _unchanged(batch: Any) -> Any:
    return batch


_USUAL = ("drop_remainder=False", "reshuffle_each_iteration=True", "window=None")


def _as_call(transformation: Transformation) -> str:
    """Return the call that adds it, without the arguments that are usual."""
    name, _, rest = repr(transformation).partition("(")
    given = [each for each in rest[:-1].split(", ") if each not in _USUAL]
    return f"{name.lower()}({', '.join(given)})"


@dataclass(frozen=True)
class Pipeline:
    """A source and the transformations applied to it, in order."""

    source: Source
    transformations: tuple[Transformation, ...] = ()
    branch: int = 0
    """The rank where each rank has other examples; for random numbers of maps."""
    _specs: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `_spec` has found."""

    def __str__(self) -> str:
        calls = [repr(self.source), *map(_as_call, self.transformations)]
        if not getattr(self.source, "is_read", True):  # files are not opened for this
            return ".".join(calls)
        length = {ENDLESS: "endless", UNKNOWN: "unknown length"}.get(self.length, str(self.length))
        unit = "" if self.length < 0 else " examples" if self.batch is None else " batches"
        return f"{'.'.join(calls)}, {length}{unit}"

    def then(self, transformation: Transformation) -> Pipeline:
        """Return the pipeline with one more transformation."""
        return dataclasses.replace(self, transformations=(*self.transformations, transformation))

    def with_batch_size(self, batch_size: int) -> Pipeline:
        """Return the pipeline with other batches; batches within them stay."""
        transformations = tuple(
            dataclasses.replace(each, batch_size=batch_size) if each is self.batch else each
            for each in self.transformations
        )
        return dataclasses.replace(self, transformations=transformations)

    @property
    def batch(self) -> Batch | None:
        """The transformation that makes global batches: the last one that groups items."""
        return self._batches[-1] if self._batches else None

    @cached_property
    def _batches(self) -> list[Batch]:
        """The transformations that group items: the first one examples, each other one batches."""
        return [each for each in self.transformations if isinstance(each, Batch)]

    @cached_property
    def _levels(self) -> list[tuple[Transformation, ...]]:
        """The transformations of examples, then those of the batches that each `Batch` makes."""
        levels: list[tuple[Transformation, ...]] = [()]
        for each in self.transformations:
            if isinstance(each, Batch):
                levels.append(())
            else:
                levels[-1] += (each,)
        return levels

    @property
    def length(self) -> int:
        """Number of elements of a pass, `ENDLESS` or `UNKNOWN`."""
        return Order(self.source, self.transformations).length

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element."""
        spec = self.found_spec
        if spec is None:
            raise DataError(
                "The element_spec of a data set with map is found by mapping one example, but the "
                "data set is empty."
            )
        return spec

    @property
    def found_spec(self) -> Any:
        """As `element_spec`, but ``None`` where there is no example."""
        return self._spec(len(self._batches))

    def _spec(self, level: int) -> Any:
        """Return the spec of what was batched `level` times; ``None`` without an example."""
        # Batches ask for it once for each element.
        if level not in self._specs:
            self._specs[level] = self._found_spec(level)
        return self._specs[level]

    def _found_spec(self, level: int) -> Any:
        """Return the spec of what was batched `level` times, found by trying where it has maps."""
        has_maps = any(isinstance(each, Map) for each in self._levels[level])
        if not has_maps and level == 0:
            return self.source.element_spec
        below = self._spec(level - 1) if level else None
        if not has_maps:
            batch = self._batches[level - 1]
            length = batch.batch_size if batch.drop_remainder else None
            return None if below is None else batched(below, length)
        with closing(self.source.open(0)) as reader:
            maker, first = self._maker(reader, 0), self._first_items(level)
            if not len(first):
                return None
            if level:
                return open_batch(spec_of(maker.batch(first, slice(1), 0, level)), level)
            (example,) = maker.examples(first, 0)
            return with_room_for_text(spec_of(example), self.source.element_spec)

    def _first_items(self, level: int) -> Block:
        """Return the first item that is batched `level` times, without shuffling, or nothing."""
        # Neither the seed nor the pass nor the number of ranks decides what maps are tried on.
        before: list[Transformation] = list(self._levels[0])
        for batch, others in zip(
            self._batches[: max(level - 1, 0)], self._levels[1:], strict=False
        ):
            before += [batch, *others]
        order = Order(self.source, tuple(e for e in before if not isinstance(e, Shuffle)))
        blocks = order.blocks((0,), None)
        return next((block[:1] for block in blocks if len(block)), np.empty(0, np.int64))

    def elements(
        self,
        pass_number: int,
        start: int = 0,
        size: int = 1,
        rank: int = 0,
        prepare: Prepare = _unchanged,
    ) -> Generator[Any, None, None]:
        """Return the elements of a pass from `start` on: of each batch, the part of `rank`."""
        # The thread that makes an element also calls `prepare`.
        elements = self._elements(pass_number, start, size, rank, prepare)
        prefetches = [each for each in self.transformations if isinstance(each, Prefetch)]
        num_ahead = max((each.num_elements for each in prefetches), default=0)
        return in_background(elements, num_ahead) if num_ahead else elements

    def _elements(
        self, pass_number: int, start: int, size: int, rank: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return `elements` without prefetching."""
        layout = self.source.layout
        shuffles = [each for each in self.transformations if isinstance(each, Shuffle)]
        window_rows = max((each.window_rows(layout) for each in shuffles if layout), default=0)
        order, num_batchings = Order(self.source, self.transformations), len(self._batches)

        def rows_of(block: Block) -> list[Block]:
            if not num_batchings:
                return [block]
            return [
                examples_to_read(
                    items, sharding.slice_of_rank(len(items), size, rank), num_batchings
                )
                for items in block
            ]

        with closing(self.source.open(window_rows)) as reader:
            make = self._maker(reader, pass_number)
            number = start
            blocks = order.blocks((pass_number,), None, start)
            for block in _look_ahead(blocks, reader, rows_of):
                if not num_batchings:
                    yield from make.examples(block, number)
                else:
                    for batch_number, items in enumerate(block, number):
                        part = sharding.slice_of_rank(len(items), size, rank)
                        yield prepare(make.batch(items, part, batch_number, num_batchings))
                number += len(block)

    def _maker(self, reader: Reader, pass_number: int) -> ElementMaker:
        maps = [[each for each in level if isinstance(each, Map)] for level in self._levels]
        batch_sizes = [each.batch_size for each in self._batches]
        stream = PassStream(pass_number, self.branch)
        return ElementMaker(reader, maps, batch_sizes, self._spec, stream)


_FIRST_ROWS = 2**10
"""Of so many rows a reader knows before the first element, or that would wait for all others."""

_ROWS_AT_A_TIME = 2**12
_SHARE_AT_A_TIME = 8
"""Rows of several batches are announced together, or announcing keeps the threads from decoding: at
most so many rows, and a part of those that the reader wants to know."""


def _look_ahead(
    blocks: Iterator[Block], reader: Reader, rows_of: Callable[[Block], list[Block]]
) -> Iterator[Block]:
    """Yield `blocks`; of the rows of this rank in them `reader` knows as many as it wants ahead."""
    ahead: deque[tuple[Block, int]] = deque()
    num_ahead = 0
    wanted = reader.lookahead_rows
    if not wanted:
        yield from blocks
        return
    most, wanted = wanted, min(wanted, _FIRST_ROWS)
    while True:
        is_short = num_ahead < wanted - min(_ROWS_AT_A_TIME, wanted // _SHARE_AT_A_TIME)
        waiting: list[Block] = []
        num_waiting = 0
        while not ahead or (is_short and num_ahead < wanted):
            # No block more than needed: a generator behind it may take its time.
            block = next(blocks, None)
            if block is None:
                break
            parts = rows_of(block)
            count = sum(map(len, parts))
            ahead.append((block, count))
            num_ahead += count
            waiting += parts
            num_waiting += count
            if num_waiting >= _ROWS_AT_A_TIME:
                reader.expect(np.concatenate(waiting))
                waiting, num_waiting = [], 0
        if waiting:
            reader.expect(np.concatenate(waiting))
        if not ahead:
            return
        block, count = ahead.popleft()
        num_ahead -= count
        yield block
        wanted = min(2 * wanted, most)
