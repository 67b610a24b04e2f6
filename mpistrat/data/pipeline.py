"""Pipeline of a data set: a source and its transformations, run when it is iterated."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import sharding
from mpistrat.data.elements import ElementMaker, examples_to_read
from mpistrat.data.numbering import Numbering
from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    Order,
    Reader,
    Source,
    Transformation,
    span_of,
)
from mpistrat.data.random import PassStream
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.spec import batched, open_batch, spec_of, with_room_for_text
from mpistrat.data.transforms import Batch, Enumerate, Map, Prefetch, SameOrder
from mpistrat.errors import DataError
from mpistrat.system.threads import in_background

__all__ = ["Pipeline", "Prepare", "numbered_steps"]

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


def numbered_steps(transformations: Iterable[Transformation]) -> list[str]:
    """Return each as a text that ranks compare."""
    return [f"{each!r} as step {number}" for number, each in enumerate(transformations, 1)]


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
        if not self.source.is_read:  # files are not opened for this
            return self.calls
        length = {ENDLESS: "endless", UNKNOWN: "unknown length"}.get(self.length, str(self.length))
        unit = "" if self.length < 0 else " examples" if self.batch is None else " batches"
        return f"{self.calls}, {length}{unit}"

    @property
    def calls(self) -> str:
        """The calls that make it, as the user writes them."""
        return ".".join([repr(self.source), *map(_as_call, self.transformations)])

    @property
    def kind(self) -> str:
        """The methods that say what its elements are, with the functions they were given."""
        same = [each for each in self.transformations if isinstance(each, SameOrder)]
        others = [_as_call(each) for each in same if not isinstance(each, Prefetch)]
        return ".".join([self.source.kind, *others])

    @property
    def order(self) -> Order:
        """The order of its elements."""
        return Order(self.source, self.transformations)

    @property
    def source_entries(self) -> list[str]:
        """The number of examples, and what else of the source decides their order, as texts."""
        number = self.source.num_examples
        count = {ENDLESS: "endless", UNKNOWN: "unknown"}.get(number, str(number))
        return [f"{count} examples", *self.source.order_entries]

    @property
    def order_entries(self) -> list[str]:
        """What decides the order of its elements, as texts that ranks compare."""
        steps = [each for each in self.transformations if not isinstance(each, SameOrder)]
        return [*self.source_entries, *numbered_steps(steps)]

    def only(self, fields: tuple[Any, ...]) -> Pipeline | None:
        """Return the data set of tuples of some fields; ``None`` if that would read no less."""
        has_maps = any(isinstance(each, Map) for each in self.transformations)
        source = None if has_maps else self.source.only(fields)
        return None if source is None else Pipeline(source, self.transformations, self.branch)

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
        return self.order.length

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
        has_maps = any(isinstance(each, Map | Enumerate) for each in self._levels[level])
        if not has_maps and level == 0:
            return self.source.element_spec
        below = self._spec(level - 1) if level else None
        if not has_maps:
            batch = self._batches[level - 1]
            length = batch.batch_size if batch.drop_remainder else None
            return None if below is None else batched(below, length)
        stream = PassStream((0,), self.branch)
        with closing(self.open(0, stream)) as reader:
            maker, first = self.maker(reader, stream), self._first_items(level)
            if not len(first):
                return None
            if level:
                return open_batch(spec_of(maker.batch(first, slice(1), level)), level)
            (example,) = maker.examples(first)
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
        stream = PassStream((pass_number,), self.branch)
        elements = self._elements(stream, start, size, rank, prepare)
        prefetches = [each for each in self.transformations if isinstance(each, Prefetch)]
        num_ahead = max((each.num_elements for each in prefetches), default=0)
        return in_background(elements, num_ahead) if num_ahead else elements

    def fixed_elements(self, start: int) -> Generator[Any, None, None]:
        """Return the elements of every pass from `start` on, in which nothing may be random."""
        return self.stream_elements(PassStream((0,), self.branch, is_fixed=True), start)

    def stream_elements(self, stream: PassStream, start: int = 0) -> Generator[Any, None, None]:
        """Return the elements of the pass of `stream` from `start` on."""
        return self._elements(stream, start, 1, 0, _unchanged)

    def _elements(
        self, stream: PassStream, start: int, size: int, rank: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return `elements` without prefetching."""
        order, num_batchings = self.order, len(self._batches)

        def rows_of(block: Block) -> list[Block]:
            if not num_batchings:
                return [block]
            return [
                examples_to_read(
                    items, sharding.slice_of_rank(len(items), size, rank), num_batchings
                )
                for items in block
            ]

        with closing(self.open(self.window_rows, stream)) as reader:
            make = self.maker(reader, stream)
            blocks = order.blocks(stream.key, None, start)
            for block in _look_ahead(blocks, reader, rows_of):
                if not num_batchings:
                    yield from make.examples(block)
                    continue
                for items in block:
                    part = sharding.slice_of_rank(len(items), size, rank)
                    yield prepare(make.batch(items, part, num_batchings))

    @property
    def window_rows(self) -> int:
        """How many rows its shuffles mix at a time."""
        shuffles = [each for each in self.transformations if isinstance(each, Shuffle)]
        layout = self.source.layout if shuffles else None
        return max((each.window_rows(layout) for each in shuffles if layout), default=0)

    @property
    def num_maps(self) -> int:
        """How many maps there are in it."""
        maps = [each for each in self.transformations if isinstance(each, Map)]
        return self.source.num_maps + len(maps)

    @property
    def is_steady(self) -> bool:
        """Whether the element at a position is the same in each pass, random maps aside."""
        return self.source.is_steady and self.source.is_in_order and not any(
            isinstance(each, Shuffle) and each.reshuffle_each_iteration
            for each in self.transformations
        )

    def open(self, window_rows: int, stream: PassStream) -> Reader:
        """Return a reader of the items, also of those of repetitions."""
        repeats = [e.num_repetitions for e in self.transformations if e.num_repetitions != 1]
        reader = self.source.open(
            window_rows, dataclasses.replace(stream, repeats=tuple(repeats))
        )
        is_plain = self.source.is_steady and not self.source.num_maps and not self.source.is_stream
        return _Repeated(reader, span_of(self.source)) if repeats and is_plain else reader

    def maker(self, reader: Reader, stream: PassStream) -> ElementMaker:
        """Return what makes elements of the items of the order."""
        maps: list[list[tuple[Map | Enumerate, Numbering]]] = [[]]
        for number, each in enumerate(self.transformations):
            if isinstance(each, Batch):
                maps.append([])
            elif isinstance(each, Map | Enumerate):
                numbering = Numbering(self.source, self.transformations, number)
                maps[-1].append((each, numbering))
        stream = dataclasses.replace(stream, first_map=stream.first_map + self.source.num_maps)
        return ElementMaker(reader, maps, self._spec, stream)


class _Repeated:
    """A reader of rows that come again, each time with greater numbers."""

    def __init__(self, reader: Reader, span: int) -> None:
        self._reader, self._span = reader, span
        self.lookahead_rows = reader.lookahead_rows
        self.close = reader.close

    def expect(self, block: Block) -> None:
        """Note rows that are going to be read."""
        self._reader.expect(block % self._span)

    def read(self, block: Block) -> Any:
        """Return rows."""
        return self._reader.read(block % self._span)


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
