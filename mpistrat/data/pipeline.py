"""Pipeline of a data set: a source and its transformations, run when it is iterated."""

from __future__ import annotations

import dataclasses
import reprlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from mpistrat import nests, sharding
from mpistrat.arrays import host_view, is_array, is_number
from mpistrat.data.order import Block, Order, Reader, Source, Transformation
from mpistrat.data.random import MapScope, PassStream
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.spec import ArraySpec, batched, fitted, open_batch, spec_of, with_room_for_text
from mpistrat.data.transforms import Batch, Map, Prefetch
from mpistrat.errors import DataError
from mpistrat.system.threads import in_background

__all__ = ["Pipeline", "Prepare"]

Prepare = Callable[[Any], Any]
"""Takes a batch in host memory, and may begin to copy it to a device."""


def _unchanged(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Pipeline:
    """A source and the transformations applied to it, in order."""

    source: Source
    transformations: tuple[Transformation, ...] = ()
    branch: int = 0
    """The rank where each rank has other examples; for random numbers of maps."""

    def then(self, transformation: Transformation) -> Pipeline:
        """Return the pipeline with one more transformation."""
        return dataclasses.replace(self, transformations=(*self.transformations, transformation))

    def with_batch_size(self, batch_size: int) -> Pipeline:
        """Return the pipeline with other batches."""
        transformations = tuple(
            dataclasses.replace(each, batch_size=batch_size) if isinstance(each, Batch) else each
            for each in self.transformations
        )
        return dataclasses.replace(self, transformations=transformations)

    @property
    def batch(self) -> Batch | None:
        """The transformation that groups examples, if there is one."""
        return next((each for each in self.transformations if isinstance(each, Batch)), None)

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

    @cached_property
    def found_spec(self) -> Any:
        """As `element_spec`, but ``None`` where there is no example."""
        _, batch_maps = self._maps()
        spec, batch = self._example_spec, self.batch
        if spec is None or batch is None:
            return spec
        if not batch_maps:
            return batched(spec, batch.batch_size if batch.drop_remainder else None)
        with closing(self.source.open(0)) as reader:
            first = self._first_item
            if not len(first):
                return None
            return open_batch(spec_of(self._maker(reader, 0).batch(first, slice(1), 0)))

    @cached_property
    def _example_spec(self) -> Any:
        """The nest of `ArraySpec` of one example after its maps; ``None`` without an example."""
        example_maps, _ = self._maps()
        if not example_maps:
            return self.source.element_spec
        with closing(self.source.open(0)) as reader:
            for example in self._maker(reader, 0).examples(self._first_item, 0):
                return with_room_for_text(spec_of(example), self.source.element_spec)
        return None

    @cached_property
    def _first_item(self) -> Block:
        """The first item of the data set as it is before shuffling and batching, or nothing."""
        # Neither the seed nor the pass nor the number of ranks decides what maps are tried on.
        before = [each for each in self._before_batch if not isinstance(each, Shuffle)]
        blocks = Order(self.source, tuple(before)).blocks((0,), None)
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
        order, batch = Order(self.source, self.transformations), self.batch

        def rows_of(block: Block) -> list[Block]:
            if batch is None:
                return [block]
            return [items[sharding.slice_of_rank(len(items), size, rank)] for items in block]

        with closing(self.source.open(window_rows)) as reader:
            make = self._maker(reader, pass_number)
            number = start
            blocks = order.blocks((pass_number,), None, start)
            for block in _look_ahead(blocks, reader, rows_of):
                if batch is None:
                    yield from make.examples(block, number)
                else:
                    for batch_number, items in enumerate(block, number):
                        part = sharding.slice_of_rank(len(items), size, rank)
                        yield prepare(make.batch(items, part, batch_number * batch.batch_size))
                number += len(block)

    def _maker(self, reader: Reader, pass_number: int) -> _ElementMaker:
        stream = PassStream(pass_number, self.branch)
        return _ElementMaker(reader, *self._maps(), lambda: self._example_spec, stream)

    def _maps(self) -> tuple[list[Map], list[Map]]:
        """Return the maps of examples, and those of batches."""
        middle = len(self._before_batch)
        return (
            [each for each in self.transformations[:middle] if isinstance(each, Map)],
            [each for each in self.transformations[middle:] if isinstance(each, Map)],
        )

    @property
    def _before_batch(self) -> tuple[Transformation, ...]:
        """The transformations before `batch`."""
        every, batch = self.transformations, self.batch
        return every[: every.index(batch)] if batch else every


_READ_AHEAD = 256
"""How many examples are read at a time where they are handed out one by one."""


class _ElementMaker:
    """Makes the elements of a data set from the items of its order."""

    def __init__(
        self,
        reader: Reader,
        example_maps: Sequence[Map],
        batch_maps: Sequence[Map],
        example_spec: Callable[[], Any],
        stream: PassStream,
    ) -> None:
        self._reader = reader
        self._example_maps = list(enumerate(example_maps))
        self._batch_maps = list(enumerate(batch_maps, len(example_maps)))
        self._example_spec = example_spec
        self._stream = stream

    def examples(self, block: Block, position: int) -> Iterator[Any]:
        """Yield the example of each item of `block`, the first at `position` of the pass."""
        for start in range(0, len(block), _READ_AHEAD):
            rows = _rows(self._reader.read(block[start : start + _READ_AHEAD]))
            for number, example in enumerate(rows, position + start):
                yield self._apply(self._example_maps, example, (number,), is_batch=False)

    def batch(self, block: Block, part: slice, position: int) -> Any:
        """Return the nest of arrays of the items ``block[part]``; only these are read."""
        mine = block[part]
        first = position + part.indices(len(block))[0]
        if self._example_maps:
            nest = _stack(self.examples(mine, first), self._example_spec())
        elif block.dtype == object and not len(mine):
            # Items that are examples cost nothing to look at, and know their shapes best.
            nest = nests.map_nest(lambda leaf: leaf[:0], self._reader.read(block[:1]))
        else:
            nest = self._reader.read(mine)
        positions = range(first, first + len(mine))
        return self._apply(self._batch_maps, nest, positions, is_batch=True)

    def _apply(
        self, maps: list[tuple[int, Map]], element: Any, positions: Sequence[int], is_batch: bool
    ) -> Any:
        for number, each in maps:
            make_rng = partial(self._stream.generator, each.seed, number)
            element = MapScope(make_rng, positions, is_batch).run(each.fn, element)
        return element


def _rows(nest: Any) -> Iterator[Any]:
    leaves, structure = nests.flatten(nest)
    for row in zip(*leaves, strict=True):
        yield nests.unflatten(structure, row)


def _stack(examples: Iterable[Any], spec: Any) -> Any:
    """Return the nest of stacked `examples`, each of them like `spec` but for its shape."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    paths = [path or "the top" for path in paths]
    columns: list[list[np.ndarray]] = [[] for _ in specs]
    for example in examples:
        leaves, other = nests.flatten(example)
        if other != structure:
            raise DataError(
                f"map gave {other} for one example, but {structure} for the first of the data set."
            )
        for path, column, leaf, each in zip(paths, columns, leaves, specs, strict=True):
            column.append(_cast(leaf, each, path))
    return nests.unflatten(structure, map(_stack_leaf, columns, specs, paths))


def _cast(leaf: Any, spec: ArraySpec, path: str) -> np.ndarray:
    is_plain = is_array(leaf) or is_number(leaf) or isinstance(leaf, np.generic)
    if not is_plain or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"map gave {leaf!r} at {path!r}, but arrays and numbers were expected, so that "
            "examples can be stacked to a batch."
        )
    array = host_view(leaf)
    cast = fitted(array, spec.dtype)
    if cast is None:
        raise DataError(
            f"map gave {reprlib.repr(array.tolist())} of dtype {array.dtype} at {path!r}, which "
            f"does not fit the dtype {spec.dtype} of the first example of the data set. Let the "
            "function return one dtype, for example with numpy.float32(...) or astype(...)."
        )
    return cast


def _stack_leaf(column: list[np.ndarray], spec: ArraySpec, path: str) -> np.ndarray:
    if not column:
        return np.empty((0, *spec._known_shape), spec.dtype)
    shapes = sorted({array.shape for array in column})
    if len(shapes) > 1:
        raise DataError(
            f"map gave arrays of different shapes at {path!r}: {shapes[0]} and {shapes[1]}. The "
            "examples of a batch need one shape."
        )
    return np.stack(column)


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
    too_few = wanted - min(_ROWS_AT_A_TIME, wanted // _SHARE_AT_A_TIME)
    while True:
        is_short = num_ahead < too_few
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
