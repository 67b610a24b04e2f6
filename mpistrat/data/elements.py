"""Elements of a dataset: examples read ahead, mapped and stacked to batches, also repeatedly."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.order import Block, Reader
from mpistrat.data.random import PassKey, PassStream
from mpistrat.data.spec import has_open_shape, known_bytes
from mpistrat.data.transformations.batch import Batch, Column, Columns, Enumerate, columns_of
from mpistrat.data.transformations.map import Entry, GroupEnd, Map, Mapper, Numbering
from mpistrat.errors import DataError

_READ_AHEAD = 256
"""Number of examples read at a time if they are yielded one by one."""

_FIRST_ROWS = 2**10
"""Rows announced to a reader before the first element, so that it need not wait for all."""

_ROWS_AT_A_TIME = 2**12
_SHARE_AT_A_TIME = 8
"""Rows of several batches are announced together, because each call keeps the threads from
decoding: at most this many rows, and at most this part of the rows that the reader asks for."""

_BYTES_TOGETHER = 2**18
_MAX_TOGETHER = 64
"""Limits of bytes and batches per read: small batches are read several at a time."""

Group = tuple[Block, slice]
"""The items of a batch, and which of them are this rank's."""


def examples_to_read(items: Block, part: slice, level: int, needs_first: bool) -> Block:
    """Return the examples that are read for ``items[part]`` of a batch, batched `level` times."""
    read = _items_to_read(items, part, level, needs_first)
    for _ in range(level - 1):
        read = np.concatenate(read)
    return read


def _items_to_read(items: Block, part: slice, level: int, needs_first: bool = False) -> Block:
    # The shape of inner batches is known only from one of them, so a rank without any reads one. If
    # examples may differ in shape, each rank compares its own with the first one of the batch.
    items = np.asarray(items)
    mine = items[part]
    if level == 1:
        is_first_extra = needs_first and (part.start or 0) > 0
        return np.concatenate([items[:1], mine]) if is_first_extra else mine
    return mine if len(mine) else items[:1]


def look_ahead(
    blocks: Iterator[Block], reader: Reader, rows_of: Callable[[Block], list[Block]]
) -> Iterator[Block]:
    """Yield `blocks`, and announce this rank's rows to `reader` as far ahead as it asks for."""
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
            # Take no more blocks than needed: they may come from a slow generator.
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


class ElementMaker:
    """Creates the elements of a dataset from the items of its order.

    Parameters
    ----------
    reader : Reader
        The reader of the source.
    maps : sequence of sequences of pairs of Map or Enumerate, and Numbering
        The maps of examples, of batches, of batches of batches, and so on, each with the numbers
        of its examples.
    batches : sequence of Batch
        The transformations that create batches of examples, batches of batches, and so on.
    are_mapped : sequence of bool
        Whether the elements that each of `batches` stacks come from a map.
    spec_of_level : callable
        Returns the nest of `ArraySpec` of elements that were batched this many times.
    stream : PassStream
        The random numbers for maps.
    """

    def __init__(
        self,
        reader: Reader,
        maps: Sequence[Sequence[tuple[Map | Enumerate, Numbering]]],
        batches: Sequence[Batch],
        are_mapped: Sequence[bool],
        spec_of_level: Callable[[int], Any],
        stream: PassStream,
    ) -> None:
        self._reader = reader
        numbers = itertools.count()
        self._mappers = [
            Mapper(
                [(next(numbers) if isinstance(each[0], Map) else 0, *each) for each in steps],
                level,
                lambda: self._stream,
            )
            for level, steps in enumerate(maps)
        ]
        self._batch_steps, self._are_mapped = batches, are_mapped
        self._spec_of_level = spec_of_level
        self._stream = stream
        self._flat_specs: dict[int, Any] = {}

    def enter(self, key: PassKey) -> None:
        """Create elements of the pass `key` from now on."""
        if key != self._stream.key:
            self._stream = dataclasses.replace(self._stream, key=key)

    def close(self) -> None:
        """End the threads of maps."""
        for each in self._mappers:
            each.close()

    def examples(self, block: Block) -> Generator[Any, None, None]:
        """Yield the example of each item of `block`."""
        mapper = self._mappers[0]
        entries = self._unmapped_examples(block)
        yield from mapper.run(entries) if mapper.is_parallel else mapper.each(entries)

    def _unmapped_examples(self, block: Block) -> Iterator[Entry]:
        for start in range(0, len(block), _READ_AHEAD):
            part = block[start : start + _READ_AHEAD]
            # Each row with a tuple of its item.
            rows, items = _rows(self._reader.read(part)), zip(part, strict=True)
            yield from zip(rows, items, itertools.repeat((), len(part)), strict=True)

    def columns(self, items: Block) -> Any:
        """Return the nest of columns of the examples `items`."""
        if self._mappers[0]:
            return columns_of(self.examples(items), self._spec_of_level(0), len(items))
        return self._reader.read(items)

    def batches(self, groups: Iterable[Group], level: int) -> Generator[Any, None, None]:
        """Yield this rank's part of each group, like `batch`; maps in threads run ahead."""
        if not any(each.is_parallel for each in self._mappers):
            if level == 1 and self._reads_together:
                yield from self._small_batches(groups)
                return
            for items, part in groups:
                yield self.batch(items, part, level)
            return
        unmapped: Generator[Entry, None, None]
        if level == 1 and self._mappers[0].is_parallel:
            unmapped = self._stacked_ahead(groups)
        else:
            unmapped = (self._unmapped(items, part, level) for items, part in groups)
        # Contexts end in reverse order: the threads of the map end before the generator that they
        # read from is closed, because a running generator cannot be closed.
        with closing(unmapped), closing(self._mappers[level].run(unmapped)) as elements:
            yield from elements

    @cached_property
    def _reads_together(self) -> int:
        """Number of rows of small batches that are read in one call; 0: one call per batch."""
        # The overhead of a call is as large as the time to copy many kibibytes.
        if any(self._mappers) or not hasattr(self._reader, "check"):
            return 0
        if getattr(self._reader, "fills_given_memory", False):  # separate memory per batch
            return 0
        if type(self._batch_steps[0]) is not Batch or self._are_mapped[0] or self.needs_first:
            return 0
        specs = self._specs(0)[1]
        if any(has_open_shape(spec) or spec.dtype.hasobject for spec in specs):
            return 0
        row_bytes = sum(known_bytes(spec) for spec in specs)
        return int(_BYTES_TOGETHER // max(row_bytes, 1))

    def _small_batches(self, groups: Iterable[Group]) -> Generator[Any, None, None]:
        """Yield this rank's part of each group; several small ones are read in one call."""
        waiting: list[Block] = []
        num_waiting, most = 0, self._reads_together
        for items, part in groups:
            mine = np.asarray(items)[part]
            if num_waiting + len(mine) > most:
                yield from self._read_together(waiting)
                waiting, num_waiting = [], 0
            waiting.append(mine)
            num_waiting += len(mine)
            # The next group is taken only if it will fit: it may have to be decoded first.
            if num_waiting + len(mine) > most or len(waiting) == _MAX_TOGETHER:
                yield from self._read_together(waiting)
                waiting, num_waiting = [], 0
        yield from self._read_together(waiting)

    def _read_together(self, parts: Sequence[Block]) -> Iterator[Any]:
        """Yield batches of examples, all read in one call; each is a slice of the same memory."""
        nest = None
        if len(parts) > 1:
            with contextlib.suppress(Exception):  # a later batch may have caused the error
                nest = self._reader.read(np.concatenate(parts))
        if nest is None:
            for part in parts:
                yield self._reader.read(part)
            return
        leaves, structure = nests.flatten(nest)
        check: Any = getattr(self._reader, "check", None)
        start = 0
        for part in parts:
            # The rows were read together with earlier batches, and the file may have changed since.
            check(part)
            stop = start + len(part)
            yield nests.unflatten(structure, [leaf[start:stop] for leaf in leaves])
            start = stop

    def _stacked_ahead(self, groups: Iterable[Group]) -> Generator[Entry, None, None]:
        """Yield batches of examples, while threads map examples of later batches."""
        # `entries` runs ahead of the loop below, so the lengths of batches wait here, in order.
        lengths: deque[int] = deque()

        def entries() -> Iterator[Entry | GroupEnd]:
            for items, part in groups:
                mine = np.asarray(items)[part]
                lengths.append(len(mine))
                yield from self._unmapped_examples(mine)
                yield GroupEnd(mine, getattr(items, "numbers", ()))

        columns = None
        with closing(self._mappers[0].run(entries())) as mapped:
            for example in mapped:
                # Examples are copied one by one, so that the threads need not wait for a batch.
                columns = columns or Columns(self._spec_of_level(0), lengths.popleft())
                if not isinstance(example, GroupEnd):
                    columns.add(example)
                    continue
                mine, numbers = example.content
                nest, columns = self._stacked(columns.nest(), mine, 1), None
                yield nest, mine, numbers

    def batch(self, items: Block, part: slice, level: int = 1) -> Any:
        """Return ``items[part]`` of a batch, stacked to arrays; only these items are read.

        Each item is an example if `level` is 1, else a batch that was batched `level` - 1 times.
        """
        return self._mappers[level].one(self._unmapped(items, part, level))

    def _unmapped(self, items: Block, part: slice, level: int) -> Entry:
        """Return `batch` before its maps."""
        numbers = getattr(items, "numbers", ())
        items = np.asarray(items)
        mine = items[part]
        if level > 1:
            nest = self._batches(items, part, level)
        elif self._mappers[0]:
            nest = self._stacked(self.columns(mine), mine, 1)
        else:
            read = _items_to_read(items, part, 1, self.needs_first)
            nest = self._stacked(self._reader.read(read), read, 1)
            if len(read) > len(mine):
                # The first example of the batch was read for the comparison of shapes only.
                nest = nests.map_nest(lambda leaf: leaf[1:], nest)
        return nest, mine, numbers

    @cached_property
    def needs_first(self) -> bool:
        """Whether each rank compares its examples with the first one of the batch."""
        if not self._batch_steps or self._mappers[0]:
            return False
        if not self._batch_steps[0].needs_one_shape or self._spec_of_level(0) is None:
            return False
        return any(has_open_shape(each) for each in self._specs(0)[1])

    def _specs(self, level: int) -> tuple[list[str], list[Any], nests.Structure]:
        """Return the paths, specs and structure of elements that were batched `level` times."""
        if level not in self._flat_specs:
            paths, specs, structure = nests.flatten_with_paths(self._spec_of_level(level))
            self._flat_specs[level] = [path or "the top" for path in paths], specs, structure
        found: tuple[list[str], list[Any], nests.Structure] = self._flat_specs[level]
        return found

    def _stacked(self, nest: Any, items: Block, level: int) -> Any:
        """Return the batch of the columns in `nest`."""
        batch, is_mapped = self._batch_steps[level - 1], self._are_mapped[level - 1]
        if batch.needs_one_shape and not is_mapped:
            are_arrays = type(nest) is tuple and set(map(type, nest)) == {np.ndarray}
            columns = nest if are_arrays else nests.flatten(nest)[0]
            # The loop runs once per batch. `hasobject` is faster than a comparison with `object`.
            if not any(column.dtype.hasobject for column in columns):
                return nest
        columns, structure = nests.flatten(nest)
        paths, specs, _ = self._specs(level - 1)
        leaves = [
            batch.stack(Column(values, spec, path, items, is_mapped), structure, number)
            for number, (values, spec, path) in enumerate(zip(columns, specs, paths, strict=True))
        ]
        return nests.unflatten(structure, leaves)

    def _batches(self, items: Block, part: slice, level: int) -> Any:
        """Return the batches ``items[part]``, stacked."""
        lengths = sorted({len(item) for item in items})
        is_plain = self._batch_steps[level - 1].needs_one_shape
        if len(lengths) > 1 and is_plain:
            raise DataError(
                f"A batch holds batches of {lengths[0]} and of {lengths[-1]} elements, but they "
                "must be equally long. Leave the shorter ones out with batch(..., "
                "drop_remainder=True), in all calls but the last."
            )
        read = _items_to_read(items, part, level)
        is_plain = is_plain and self._batch_steps[0].needs_one_shape
        # All inner batches have the same length and no maps, so one read serves them all.
        if level == 2 and is_plain and not any(self._mappers[:2]) and not self.needs_first:
            nest = self._reader.read(np.concatenate(read))
            nest = nests.map_nest(lambda a: a.reshape(len(read), *lengths, *a.shape[1:]), nest)
        else:
            mapper = self._mappers[level - 1]
            batches = (self._unmapped(each, slice(None), level - 1) for each in read)
            mapped = mapper.run(batches) if mapper.is_parallel else map(mapper.one, batches)
            nest = columns_of(mapped, self._spec_of_level(level - 1), len(read))
            nest = self._stacked(nest, read, level)
        num_mine = len(items[part])
        # A rank without items has read one to find the shapes.
        return nest if num_mine else nests.map_nest(lambda a: a[:0], nest)


def _rows(nest: Any) -> Iterator[Any]:
    leaves, structure = nests.flatten(nest)
    if len(leaves) == 1 and leaves[0] is nest:
        return iter(nest)
    rows = zip(*leaves, strict=True)
    is_flat = type(nest) is tuple and len(nest) == len(leaves)
    if is_flat and all(map(operator.is_, nest, leaves)):
        return rows
    return (nests.unflatten(structure, row) for row in rows)
