"""Batches: stack elements to arrays, take batches apart again, and number them."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from mpistrat import nests
from mpistrat.arrays import host_view, is_array, is_number
from mpistrat.data.order import (
    UNKNOWN,
    Block,
    Order,
    Reordering,
    Transformation,
    skip_items,
)
from mpistrat.data.random import PassKey
from mpistrat.data.sources.memory import RangeSource
from mpistrat.data.spec import (
    ArraySpec,
    batched,
    empty_rows,
    fitted,
    has_open_shape,
    is_open_text,
    object_column,
)
from mpistrat.errors import DataError
from mpistrat.sharding import ceil_div


@dataclass(frozen=True)
class Column:
    """One leaf of all elements of a batch."""

    values: np.ndarray
    """An array of shape ``(n, *shape)``, or of dtype object with one array per element."""
    spec: ArraySpec
    """The spec of one element. After a map, the spec of the dataset's first example."""
    path: str
    items: Block
    """The items of the elements, by which errors name them."""
    is_mapped: bool
    """Whether the elements come from a map, so that shapes may differ from the spec."""

    @property
    def is_ragged(self) -> bool:
        """Whether shapes may differ; all ranks get the same answer."""
        return has_open_shape(self.spec) or (self.is_mapped and bool(self.spec.shape))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each element."""
        return [np.shape(row) for row in self.values]

    def name(self, number: int) -> str:
        """Return the name of an element for error messages."""
        item = self.items[number]
        if isinstance(item, np.ndarray):
            return f"the batch in place {number}"
        return f"example {int(getattr(item, 'number', item))}"

    def refuse(self, number: int, other: str, shape: tuple[int | None, ...]) -> NoReturn:
        """Raise DataError for an element that cannot be stacked with `other`, of shape `shape`."""
        raise DataError(
            f"A batch needs elements of one shape, but those at {self.path!r} have the shapes "
            f"{shape} and {np.shape(self.values[number])}: {other} and {self.name(number)}. Ways "
            "out: padded_batch, which fills up to the longest, ragged_batch, which joins them "
            "along the first axis, or a map to one shape."
        )


def stacked(column: Column, batch_size: int) -> np.ndarray:
    """Return a column as one array, if all its elements have one shape."""
    # After a map, every rank compares with the shape of the first example of the dataset, so that a
    # batch raises the error on any number of ranks.
    shapes = column.shapes if column.values.dtype == object else [column.values.shape[1:]]
    for number, shape in enumerate(shapes if len(column.values) else ()):
        if shape != shapes[0]:
            column.refuse(number, column.name(0), shapes[0])
        if column.is_mapped and batch_size > 1 and not _matches(shape, column.spec.shape):
            column.refuse(number, "the first example of the dataset", column.spec.shape)
    if column.values.dtype != object:
        return column.values
    if not len(column.values):
        return empty_rows(column.spec)
    return np.stack(list(column.values))


def _matches(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    lengths = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(want in (None, got) for got, want in lengths)


class Columns:
    """Columns of `count` elements, which have the nest `spec` except for their shapes.

    Each element is copied at once, while it is in the processor's cache.
    """

    def __init__(self, spec: Any, count: int) -> None:
        paths, specs, self._structure = nests.flatten_with_paths(spec)
        self._columns = [_GrowingColumn(each, count) for each in specs]
        self._paths = [path or "the top" for path in paths]

    def add(self, element: Any) -> None:
        """Copy the next element."""
        leaves, structure = nests.flatten(element)
        if structure != self._structure:
            raise _other_structure(structure, self._structure)
        for path, column, leaf in zip(self._paths, self._columns, leaves, strict=True):
            column.add(_cast(leaf, column.spec, path))

    def nest(self) -> Any:
        """Return the nest of the columns."""
        return nests.unflatten(self._structure, [each.values() for each in self._columns])


class _GrowingColumn:
    """One leaf of the elements: an array as long as all shapes are equal, then a list."""

    def __init__(self, spec: ArraySpec, count: int) -> None:
        self.spec, self._count = spec, count
        self._num_rows = 0
        self._array: np.ndarray | None = None
        self._rows: list[np.ndarray] | None = None
        if has_open_shape(spec) or is_open_text(spec):
            self._rows = []

    def add(self, row: np.ndarray) -> None:
        if self._rows is not None:
            self._rows.append(row)
            return
        if self._array is None:
            self._array = np.empty((self._count, *row.shape), self.spec.dtype)
        if row.shape != self._array.shape[1:]:
            # Rows of different shapes do not fit into one array, so they become a list.
            self._rows = [*self._array[: self._num_rows], row]
            return
        self._array[self._num_rows] = row
        self._num_rows += 1

    def values(self) -> np.ndarray:
        if self._array is not None and self._rows is None:
            return self._array
        if not self._rows:
            return empty_rows(self.spec)
        are_alike = not has_open_shape(self.spec) and len({row.shape for row in self._rows}) == 1
        return np.stack(self._rows) if are_alike else object_column(self._rows)


def columns_of(elements: Iterable[Any], spec: Any, count: int) -> Any:
    """Return the nest of the columns of `count` elements."""
    columns = Columns(spec, count)
    for element in elements:
        columns.add(element)
    return columns.nest()


def rows_of(element: Any, spec: Any) -> list[np.ndarray]:
    """Return the leaves of one element as arrays with the dtypes of the nest `spec`."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    leaves, other = nests.flatten(element)
    if other != structure:
        raise _other_structure(other, structure)
    return [
        _cast(leaf, each, path or "the top")
        for leaf, each, path in zip(leaves, specs, paths, strict=True)
    ]


def _other_structure(structure: nests.Structure, expected: nests.Structure) -> DataError:
    return DataError(f"map returned {structure} for one element, but {expected} for the first one.")


_SCALARS = (np.generic, str, bytes)


def _cast(leaf: Any, spec: ArraySpec, path: str) -> np.ndarray:
    if type(leaf) is np.ndarray and leaf.dtype == spec.dtype:  # most leaves
        return leaf
    array = np.asarray(leaf) if isinstance(leaf, _SCALARS) else _as_array(leaf, path)
    cast = fitted(array, spec.dtype)
    if cast is None:
        raise DataError(
            f"map returned {reprlib.repr(array.tolist())} of dtype {array.dtype} at {path!r}, "
            f"which does not fit the dtype {spec.dtype} of the first element of the dataset. Let "
            "the function return one dtype, for example with numpy.float32(...) or astype(...)."
        )
    return cast


def _as_array(leaf: Any, path: str) -> np.ndarray:
    if not (is_array(leaf) or is_number(leaf)) or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"map gave {leaf!r} at {path!r}, but arrays and numbers were expected, so that "
            "elements can be stacked to a batch."
        )
    return host_view(leaf)


@dataclass(frozen=True)
class Batch(Reordering):
    """Items in groups of `batch_size`; each group becomes one item."""

    batch_size: int
    drop_remainder: bool

    @property
    def known_length(self) -> int | None:
        """The length of every batch, ``None`` if the last one may be shorter."""
        return self.batch_size if self.drop_remainder else None

    def spec_of(self, element_spec: Any, is_mapped: bool) -> Any:
        """Return the nest of specs of a batch; `is_mapped` says whether a map made the elements."""
        return batched(element_spec, self.known_length)

    def stack(self, column: Column, structure: nests.Structure, number: int) -> Any:
        """Return a column as one value; it is leaf `number` in the `structure` of elements."""
        return stacked(column, self.batch_size)

    @property
    def needs_one_shape(self) -> bool:
        """Whether all elements of a batch must have one shape."""
        return type(self) is Batch

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
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
            # NumPy would turn a list of groups of the same length into an array of two dimensions.
            item = np.empty(1, object)
            item[0] = group
            yield item


@dataclass(frozen=True)
class WholeBatches(Reordering):
    """The items that fill batches of `batch_size`, without the remainder."""

    batch_size: int

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
        return num_items if num_items < 0 else num_items // self.batch_size * self.batch_size

    def rows(self, rows: range) -> range | None:
        """Return the output rows."""
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
    """Numbers of output items, by the number of items in the batches."""

    def length(self, num_items: int) -> int:
        """Return the number of output items, `UNKNOWN` if a short batch may be among them."""
        if num_items <= 0:
            return num_items
        return num_items * self.batch_size if self.are_whole else UNKNOWN

    def length_of(self, upstream: Order) -> int:
        """Return the number of output items, `UNKNOWN` if it depends on the pass."""
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
        """Return the number of items in the batches that the transformations `later` keep."""
        num_batches = ceil_div(num_items, self.batch_size)
        batches = Order(RangeSource(num_batches), later)
        if batches.length < 0:
            return batches.length
        counts = np.zeros(num_batches, np.int64)
        for block in batches.blocks((0,), None):
            # Each repetition adds the number of batches to its items, so the remainder of the
            # division is the number of the batch.
            counts += np.bincount(block % num_batches, minlength=num_batches)
        of_last = num_items - (num_batches - 1) * self.batch_size
        is_fixed = not any(each.depends_on_pass for each in later)
        if not is_fixed and of_last < self.batch_size and (counts != counts[0]).any():
            return UNKNOWN  # the short batch may be left out in some passes
        return int(counts[:-1].sum() * self.batch_size + counts[-1] * of_last)

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        # If batches may be shorter, all must be counted through to find the one with item `start`.
        first = start // self.batch_size if self.are_whole else 0
        batches = upstream.blocks(key, None, first)
        items = (np.asarray(item) for block in batches for item in block)
        return skip_items(items, start - first * self.batch_size)


def _place_of_batch(transformations: Sequence[Transformation]) -> int:
    """Return the position of the last `Batch` without a later `Unbatch`."""
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
    """One number from each `Enumerate`."""

    def __array_finalize__(self, source: Any) -> None:
        # NumPy calls this also for each view and slice, so a part of a batch keeps the numbers.
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


def refuse_numbered(transformations: Sequence[Transformation]) -> None:
    """Raise ValueError if batches that `unbatch` takes apart were enumerated."""
    if any(isinstance(each, Enumerate) for each in transformations):
        raise ValueError(
            "unbatch splits arrays along their first dimension, but the number of a batch that "
            "enumerate adds has none. Call enumerate after unbatch, or before batch."
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
