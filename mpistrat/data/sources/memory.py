"""Sources in memory: ranges, arrays and Python generators."""

from __future__ import annotations

import reprlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import arrays, nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import (
    ENDLESS,
    UNKNOWN,
    Block,
    Example,
    PlainSource,
    blocks_of_range,
    function_name,
    skip_items,
)
from mpistrat.data.random import PassKey, PassStream
from mpistrat.data.spec import ArraySpec, empty_rows, fits, fitted, has_open_shape, object_column
from mpistrat.errors import DataError
from mpistrat.system.text import array_type
from mpistrat.system.xxh3 import digest_of_values, mixed_digest


class _InMemory(PlainSource):
    """A source that reads rows in any order at the same low cost."""

    lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Nothing to prepare."""

    layout: ChunkLayout | None = None

    def close(self) -> None:
        """Nothing to release: the source is its own reader."""


@dataclass(frozen=True)
class RangeSource(_InMemory):
    """The integers from 0 to `num_examples` - 1."""

    num_examples: int
    kind = "range"

    def __repr__(self) -> str:
        return f"range({self.num_examples})"

    @property
    def element_spec(self) -> Any:
        """The spec of an int64 scalar."""
        return ArraySpec((), np.int64)

    def open(self, window_rows: int, stream: PassStream) -> RangeSource:
        """Return the source itself."""
        return self

    def read(self, block: Block) -> Any:
        """Return the integers."""
        return block.astype(np.int64)


@dataclass(frozen=True)
class CountSource(_InMemory):
    """The integers from `start` on."""

    start: int
    kind = "count"
    num_examples = ENDLESS

    def __repr__(self) -> str:
        return f"count({self.start})"

    @property
    def element_spec(self) -> Any:
        """The spec of an int64 scalar."""
        return ArraySpec((), np.int64)

    @property
    def order_entries(self) -> list[str]:
        """The first number."""
        return [f"from {self.start}"]

    def open(self, window_rows: int, stream: PassStream) -> CountSource:
        """Return the source itself."""
        return self

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the numbers of the examples from `start` on."""
        return blocks_of_range(range(start, 2**62))

    def read(self, block: Block) -> Any:
        """Return the integers."""
        return block + self.start


class ArraySource(_InMemory):
    """The rows of arrays in host memory."""

    kind = "from_arrays"

    def __init__(self, nest: Any) -> None:
        paths, leaves, self._structure = nests.flatten_with_paths(nest)
        self._arrays = [arrays.host_view(leaf) for leaf in leaves]
        if not leaves:
            raise DataError("from_arrays needs at least one array, but the nest is empty.")
        for path, leaf, array in zip(paths, leaves, self._arrays, strict=True):
            where = f"the array {path!r}" if path else "the array"
            if array.dtype.hasobject:
                raise DataError(f"from_arrays: {where} has the dtype object; use a fixed one.")
            if isinstance(leaf, np.ma.MaskedArray):
                raise DataError(
                    f"from_arrays: {where} is masked, which batches cannot be. Fill it first: "
                    "array.filled(value)."
                )
            if not array.ndim:
                raise DataError(
                    f"from_arrays: {where} is 0-d ({array!r}), but a first dimension, the "
                    "examples, was expected. Lists are nests here: pass numpy.array(list)."
                )
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) > 1:
            found = ", ".join(
                f"{path or 'array'}: {length}" for path, length in zip(paths, lengths, strict=True)
            )
            raise DataError(f"from_arrays needs arrays of the same length, not {found}.")
        self.num_examples = lengths[0]

    def __repr__(self) -> str:
        return f"from_arrays({', '.join(map(array_type, self._arrays))})"

    def digest(self) -> int:
        """Return a 64-bit digest of the values of all arrays."""
        return mixed_digest([digest_of_values(array) for array in self._arrays])

    def only(self, fields: tuple[Any, ...]) -> ArraySource | None:
        """Return the source of tuples of some fields."""
        nest = nests.unflatten(self._structure, self._arrays)
        try:
            return ArraySource(tuple(nest[field] for field in fields))
        except (KeyError, IndexError, TypeError):
            return None  # the caller raises an error that names the missing field

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one row."""
        specs = [
            ArraySpec(array.shape[1:], array.dtype.newbyteorder("=")) for array in self._arrays
        ]
        return nests.unflatten(self._structure, specs)

    def open(self, window_rows: int, stream: PassStream) -> ArraySource:
        """Return the source itself."""
        return self

    def read(self, block: Block) -> Any:
        """Return copies of the rows."""
        # Indexing by an array copies the rows, so a program may write into its batches.
        return nests.unflatten(
            self._structure, [arrays.native(array[block]) for array in self._arrays]
        )


_NUM_COMPARED = 1024
"""Number of elements of a generator that ranks compare: different orders differ early."""


def generators_of(source: Any) -> list[GeneratorSource]:
    """Return the generators that a source reads, in an order that is the same on all ranks."""
    own = [source] if isinstance(source, GeneratorSource) else []
    below = getattr(source, "children", getattr(source, "streamed", ()))
    return own + [found for child in below for found in generators_of(child.source)]


class GeneratorSource(PlainSource):
    """The elements of ``fn()``, which is called again for each pass."""

    lookahead_rows = 0
    is_stream = True
    layout: ChunkLayout | None = None

    def __init__(self, fn: Callable[[], Iterable[Any]], element_spec: Any) -> None:
        if not callable(fn):
            raise TypeError(
                f"from_generator needs a function that returns an iterable, not {fn!r}."
            )
        self._paths, self._specs, self._structure = nests.flatten_with_paths(element_spec)
        for spec in self._specs:
            if not isinstance(spec, ArraySpec):
                raise TypeError(f"element_spec must be a nest of ArraySpec, not of {spec!r}.")
            if spec.dtype.hasobject:
                raise TypeError(f"element_spec must have fixed dtypes, not object: {spec!r}.")
        self._fn = fn
        self._last: weakref.ref[Any] | None = None
        self.seen = 0, ""
        """The number of elements compared in the last pass, and their digest."""
        self.element_spec = element_spec

    def __repr__(self) -> str:
        return self.kind

    num_examples = UNKNOWN

    @property
    def kind(self) -> str:
        """The name of the method, with the name of the function."""
        return f"from_generator({function_name(self._fn)})"

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return one item for each element of a new generator from `start` on."""
        return skip_items(self._stream(), start)

    def _stream(self) -> Iterator[Block]:
        count, digest = 0, 0
        try:
            for number, element in enumerate(self._new_iterator()):
                item = np.empty(1, object)
                item[0] = example = self.example(element, number)
                if number < _NUM_COMPARED:
                    count = number + 1
                    digest = mixed_digest([digest, *map(digest_of_values, example)])
                yield item
        finally:
            self.seen = count, f"{digest:016x}"

    def example(self, element: Any, number: int) -> Example:
        """Return `element` as an item; raise DataError if it does not fit the spec."""
        example = Example(self._checked(element, number))
        example.number = number
        return example

    def _new_iterator(self) -> Iterator[Any]:
        elements = self._fn()
        try:
            iterator = iter(elements)
        except TypeError:
            raise DataError(
                f"{self.kind}: the function returned {elements!r} of type "
                f"{type(elements).__name__}, but an iterable was expected."
            ) from None
        if iterator is elements and isinstance(iterator, Generator):
            if self._last is not None and self._last() is iterator:
                raise DataError(
                    f"{self.kind}: the function returned the same generator as for the "
                    "previous epoch, which is used up. It must create a new one in each call."
                )
            # A weak reference, not an id: a new generator may get the address of a deleted one.
            self._last = weakref.ref(iterator)
        return iterator

    def _checked(self, element: Any, number: int) -> list[np.ndarray]:
        leaves, structure = nests.flatten(element)
        if structure != self._structure:
            raise DataError(
                f"from_generator: element {number} is {structure}, but element_spec is "
                f"{self._structure}."
            )
        return [
            self._checked_leaf(leaf, spec, path, number)
            for leaf, spec, path in zip(leaves, self._specs, self._paths, strict=True)
        ]

    def _checked_leaf(self, leaf: Any, spec: ArraySpec, path: str, number: int) -> np.ndarray:
        # The generator may write to the same array again, so the example keeps a copy.
        array = np.array(arrays.host_view(leaf))
        cast = None if isinstance(leaf, np.ma.MaskedArray) else fitted(array, spec.dtype)
        if cast is None or not fits(spec, cast):
            raise DataError(
                f"from_generator: {path or 'the array'!r} of element {number} is "
                f"{reprlib.repr(array.tolist())}, of dtype {array.dtype} and shape {array.shape}, "
                f"which does not fit the element_spec {spec}."
            )
        return cast

    def expect(self, block: Block) -> None:
        """Nothing to prepare: the items are the examples."""

    def open(self, window_rows: int, stream: PassStream) -> GeneratorSource:
        """Return the source itself: its items are the examples."""
        return self

    def read(self, block: Block) -> Any:
        """Return the examples of `block`, stacked."""
        columns = zip(*block, strict=True) if len(block) else [()] * len(self._specs)
        stacked = [
            self._stacked(column, spec) for column, spec in zip(columns, self._specs, strict=True)
        ]
        return nests.unflatten(self._structure, stacked)

    def _stacked(self, column: tuple[np.ndarray, ...], spec: ArraySpec) -> np.ndarray:
        if not column:
            return empty_rows(spec)
        return object_column(column) if has_open_shape(spec) else np.stack(column)

    def close(self) -> None:
        """Nothing to release."""
