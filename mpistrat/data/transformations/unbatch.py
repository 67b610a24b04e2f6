"""Unbatch: the rows of elements that are arrays, such as the frames of recordings.

`Unbatch`, which takes the batches of `Dataset.batch` apart again, is in `batch.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nests, sharding
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.fingerprint import check_same
from mpistrat.data.order import Block
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey, PassStream
from mpistrat.data.spec import ArraySpec, holds_ragged, known_bytes
from mpistrat.data.views import (
    Child,
    Part,
    View,
    position_borders,
    position_layout,
    scattered,
    unshuffled_rows,
    without_shuffles,
)
from mpistrat.errors import DataError
from mpistrat.options import AutoShardPolicy

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

_LEAST_AHEAD = 2**10
"""At least this many rows are announced ahead, so that elements are read ahead of their use."""


class Rows(View):
    """The rows of the elements of a dataset, which are nests of arrays of one length."""

    # A row has the number that it has without the shuffles of the dataset, so shuffles change only
    # the order of rows, not their numbers.

    name = "unbatch"
    is_fixed = True

    def __init__(self, child: Pipeline) -> None:
        super().__init__([child])
        self._settle_order(child)
        self._lengths: np.ndarray | None = None

    def __repr__(self) -> str:
        return f"{self.children[0].calls}.unbatch()"

    @property
    def kind(self) -> str:
        """The name of the method, with the kind of the dataset."""
        return f"{self.children[0].kind}.unbatch()"

    @property
    def described(self) -> str:
        """A description with a digest of the number of rows of each element."""
        digest = hashlib.sha256(self.lengths.tobytes()).hexdigest()[:16]
        return f"unbatch to {self.num_examples} rows of {len(self.lengths)} elements, {digest}"

    @property
    def is_read(self) -> bool:
        """Whether it is known how many rows each element has."""
        return self._lengths is not None and super().is_read

    @cached_property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one row."""
        spec = self.children[0].found_spec
        if spec is None:
            return None
        paths, leaves, structure = nests.flatten_with_paths(spec)
        for path, leaf in zip(paths, leaves, strict=True):
            if not leaf.shape or holds_ragged(leaf):
                raise ValueError(
                    f"unbatch returns the rows of arrays one by one, but {path or 'the element'} "
                    f"of {self.children[0].calls} is {leaf}, without a first dimension."
                )
        return nests.unflatten(structure, [ArraySpec(e.shape[1:], e.dtype) for e in leaves])

    @property
    def num_examples(self) -> int:
        """The number of all rows."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """The number of rows of each element; counts them on this rank if necessary."""
        if self._lengths is None:
            known = self.known_lengths
            self.take_lengths(self.evaluate(1, 0) if known is None else known)
        assert self._lengths is not None
        return self._lengths

    def take_lengths(self, lengths: np.ndarray) -> None:
        """Use `lengths`, which the ranks have found together."""
        self._lengths = lengths
        self._layouts.clear()
        # cached_property stores its value in the instance dict. If it is removed, it is computed
        # again.
        vars(self).pop("offsets", None)

    @cached_property
    def offsets(self) -> np.ndarray:
        """The number of the first row of each element; the last entry is the number of rows."""
        return np.cumsum([0, *self.lengths])

    @property
    def known_lengths(self) -> np.ndarray | None:
        """The number of rows of each element, ``None`` if only the elements themselves show it."""
        pipeline = self._unshuffled
        spec = pipeline.found_spec
        if spec is None:
            return np.empty(0, np.int64)
        _ = self.element_spec  # raises an error if there are no rows
        if pipeline.num_maps:
            return None
        first = {leaf.shape[0] for leaf in nests.flatten(spec)[0]}
        if len(first) == 1 and None not in first:
            return np.full(pipeline.known_length, first.pop(), np.int64)
        of_source = pipeline.source.row_lengths()
        if of_source is None:
            return None
        items = pipeline.order.at(np.arange(pipeline.known_length), (0,), {})
        return np.asarray(of_source[items], np.int64)

    def evaluate(self, size: int, rank: int) -> np.ndarray:
        """Return the number of rows of each element in the share of `rank`."""
        pipeline = self._unshuffled
        part = sharding.slice_of_rank(pipeline.known_length, size, rank)
        found = np.zeros(part.stop - part.start, np.int64)
        with closing(pipeline.fixed_elements(part.start)) as elements:
            for place in range(len(found)):
                found[place] = self._length_of(next(elements), part.start + place)
        return found

    def _length_of(self, element: Any, number: int) -> int:
        paths, leaves, _ = nests.flatten_with_paths(element)
        shapes = {path: np.shape(leaf) for path, leaf in zip(paths, leaves, strict=True)}
        if () in shapes.values() or len({shape[0] for shape in shapes.values()}) > 1:
            found = ", ".join(f"{path or 'it'}: {shape}" for path, shape in shapes.items())
            raise DataError(
                f"unbatch needs arrays of the same length in each element, but element {number} "
                f"has the shapes {found}. Leave out the others, or use map to make their lengths "
                "equal."
            )
        return int(next(iter(shapes.values()))[0])

    @property
    def _unshuffled(self) -> Pipeline:
        """The dataset in the order of its numbers, if these mean the same in each pass."""
        child = self.children[0]
        if not self.is_steady:
            raise ValueError(
                f"unbatch numbers the rows of all elements, but {child.calls} has other elements "
                "in each pass. Call unbatch before repeat and sample, and before take, skip, shard "
                "or zip of shuffled data."
            )
        return without_shuffles(child)

    @property
    def file_starts(self) -> np.ndarray:
        """The numbers of the first rows of all files but the first."""
        starts = self.offsets[position_borders(self._unshuffled)]
        return np.unique(starts[(starts > 0) & (starts < self.num_examples)])

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the elements as chunks, or the chunks of the dataset, which hold several."""
        if not self.num_examples:
            return None
        layout = position_layout(self._unshuffled, key)
        starts = self.offsets
        if layout is not None and layout.order is None:
            starts = self.offsets[layout.starts]
        # Elements without rows would be chunks of length 0.
        starts = np.append(starts[:-1][np.diff(starts) > 0], starts[-1])
        return ChunkLayout(starts, self._row_bytes(layout))

    def _row_bytes(self, layout: ChunkLayout | None) -> int:
        if layout is not None:
            return -(-layout.bytes_per_row * len(self.lengths) // self.num_examples)
        leaves = nests.flatten(self.element_spec)[0]
        sizes = [known_bytes(e) for e in leaves]
        return max(sum(sizes), 1)

    def child_window(self, window_rows: int, child: Pipeline) -> int:
        """Return the number of elements for the rows of a window."""
        return -(-window_rows * len(self.lengths) // max(self.num_examples, 1))

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the numbers of the pass `key` from position `start` on."""
        if self.is_in_order:
            yield from super().blocks(key, batch_size, start)
            return
        rows = unshuffled_rows(self.children[0])
        assert rows is not None
        for items in self.children[0].order.blocks(key, batch_size):
            elements = (items - rows.start) // rows.step
            numbers = _ranges(self.offsets[elements], self.lengths[elements])
            if start < len(numbers):
                yield numbers[start:]
            start = max(start - len(numbers), 0)

    def open_child(self, pipeline: Pipeline, window_rows: int, stream: PassStream) -> Child:
        """Return a reader of rows, which keeps the elements that the rows belong to."""
        return _RowsOfElements(self, pipeline, window_rows, stream)

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the rows themselves."""
        return [Part(0, numbers)]

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield the rows of a stream of elements."""
        for number, element in enumerate(elements[0]):
            leaves, structure = nests.flatten(element)
            for row in range(self._length_of(element, number)):
                yield nests.unflatten(structure, [leaf[row] for leaf in leaves])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the numbers in several ranges, one range after the other."""
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    numbers: np.ndarray = np.arange(total) + (starts - (ends - lengths)).repeat(lengths)
    return numbers


class _RowsOfElements(Child):
    """Reads rows by number; an element is read once and kept while its rows are expected."""

    def __init__(
        self, view: Rows, pipeline: Pipeline, window_rows: int, stream: PassStream
    ) -> None:
        super().__init__(pipeline, window_rows, stream)
        self._view, self._pipeline = view, pipeline
        self._num_elements_ahead = self.lookahead_rows
        rows_of_window = -(-window_rows * view.num_examples // max(len(view.lengths), 1))
        self.lookahead_rows = max(2 * rows_of_window, _LEAST_AHEAD)
        self._changes = pipeline.num_maps > 0
        self._expected: Counter[tuple[PassKey, int]] = Counter()
        """Number of rows of each element that will be read."""
        self._kept: OrderedDict[tuple[PassKey, int], list[np.ndarray]] = OrderedDict()
        """The leaves of elements."""
        self._structure: Any = None

    def expect(self, part: Part, key: PassKey) -> None:
        """Announce that the rows of `part` will be read in the pass `key`."""
        elements, counts = np.unique(self._elements(part.items), return_counts=True)
        new = []
        for element, count in zip(elements.tolist(), counts.tolist(), strict=True):
            place = self._place(element, key)
            if not self._expected[place] and place not in self._kept:
                new.append(element)
            self._expected[place] += count
        if new and self._num_elements_ahead:
            items = self._items(np.array(new), key)
            self._reader_expects(items, key)

    def read(self, part: Part, key: PassKey) -> Any:
        """Return the nest of columns of the rows of `part` in the pass `key`."""
        numbers = part.items
        owners = self._elements(numbers)
        within = numbers - self._view.offsets[owners]
        elements, inverse = np.unique(owners, return_inverse=True)
        missing = [e for e in elements.tolist() if self._place(e, key) not in self._kept]
        if missing:
            self._make(np.array(missing), key)
        order = np.argsort(inverse, kind="stable")
        groups = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
        nests_of_elements = []
        for element, places in zip(elements.tolist(), groups, strict=True):
            leaves = self._kept[self._place(element, key)]
            rows = within[places]
            nest = nests.unflatten(self._structure, [leaf[rows] for leaf in leaves])
            nests_of_elements.append(nest)
        self._drop(elements, np.bincount(inverse), key)
        # All rows belong to one element and are in order, so no copy is needed.
        if len(groups) == 1 and (np.diff(groups[0]) == 1).all():
            return nests_of_elements[0]
        return scattered(len(numbers), groups, nests_of_elements)

    def _make(self, missing: np.ndarray, key: PassKey) -> None:
        """Read elements, and keep them."""
        nest = super().read(Part(0, self._items(missing, key)), key)
        columns, self._structure = nests.flatten(nest)
        for number, element in enumerate(missing.tolist()):
            leaves = [np.asarray(column[number]) for column in columns]
            length = int(self._view.lengths[element])
            if any(not leaf.ndim or len(leaf) != length for leaf in leaves):
                raise DataError(
                    f"unbatch: element {element} had {length} rows when they were counted, and now "
                    f"has arrays of the shapes {[leaf.shape for leaf in leaves]}. A function of "
                    "map must return the same number of rows each time."
                )
            if len(missing) > 1:  # otherwise one element would keep all others in memory
                leaves = [leaf.copy() for leaf in leaves]
            self._kept[self._place(element, key)] = leaves

    def _drop(self, elements: np.ndarray, counts: np.ndarray, key: PassKey) -> None:
        """Forget elements without further expected rows, except for the last one."""
        for element, count in zip(elements.tolist(), counts.tolist(), strict=True):
            place = self._place(element, key)
            self._expected[place] -= count
            if self._expected[place] <= 0:
                del self._expected[place]
        last = self._place(int(elements[-1]), key)
        for place in [each for each in self._kept if each not in self._expected]:
            if place != last:
                del self._kept[place]

    def _elements(self, numbers: np.ndarray) -> np.ndarray:
        """Return the element of each row."""
        return np.searchsorted(self._view.offsets, numbers, "right") - 1

    def _items(self, elements: np.ndarray, key: PassKey) -> Block:
        rows = unshuffled_rows(self._pipeline)
        return self.at(elements, key) if rows is None else rows.start + rows.step * elements

    def _place(self, element: int, key: PassKey) -> tuple[PassKey, int]:
        # Without maps an element is the same in every epoch, so one copy is enough.
        return (key if self._changes else (), element)

    def _reader_expects(self, items: Block, key: PassKey) -> None:
        ahead, self.lookahead_rows = self.lookahead_rows, self._num_elements_ahead
        super().expect(Part(0, items), key)
        self.lookahead_rows = ahead

    def close(self) -> None:
        """Forget all elements, and close their reader."""
        self._kept.clear()
        super().close()


def count_rows(source: Rows, policy: AutoShardPolicy, collectives: Collectives, kind: str) -> None:
    """Count the rows of all elements; each rank counts a share. **Collective**."""
    check_same(source.children[0], policy, collectives, kind)
    # This may open files and fail on one rank, which would then not take part in the gather below.
    with collectives.all_or_none(kind):
        is_known = source.is_read or source.known_lengths is not None
    # If any rank does not know the lengths, all take part in counting: it is collective.
    if all(collectives.gather_json(is_known, kind)):
        return
    with collectives.all_or_none(kind):
        own = source.evaluate(collectives.size, collectives.rank)
    with collectives.call(kind) as call:
        (lengths,) = AllGather(0).forward(call, [own])
    source.take_lengths(np.asarray(lengths))
