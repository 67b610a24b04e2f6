"""Sources in memory: a range of integers, and arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import arrays, nests
from mpistrat.data.order import Block, ChunkLayout
from mpistrat.data.spec import ArraySpec
from mpistrat.errors import DataError

__all__ = ["ArraySource", "RangeSource"]


class _InMemory:
    """What sources in memory share: rows cost the same in any order, and reading is cheap."""

    lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Nothing to prepare. Local."""

    @property
    def layout(self) -> ChunkLayout | None:
        return None

    @property
    def parts(self) -> list[str]:
        return []

    def stream(self) -> Iterator[Block]:
        raise AssertionError("a source of known length is read by row numbers")

    def close(self) -> None:
        """Nothing to release: the source is its own reader."""


@dataclass(frozen=True)
class RangeSource(_InMemory):
    """The integers from 0 to `num_examples` - 1."""

    num_examples: int
    kind = "range"

    @property
    def element_spec(self) -> Any:
        """An integer."""
        return ArraySpec((), np.int64)

    def open(self, window_rows: int) -> RangeSource:
        """Return the source itself. Local."""
        return self

    def read(self, block: Block) -> Any:
        """Return the integers. Local."""
        return block.astype(np.int64)


class ArraySource(_InMemory):
    """The rows of arrays in host memory.

    Raises
    ------
    DataError
        If there are no arrays, one has no first dimension or a mask, or their lengths differ.
    """

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
            raise DataError(f"from_arrays needs arrays of one length, but came {found}.")
        self.num_examples = lengths[0]

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one row."""
        specs = [
            ArraySpec(array.shape[1:], array.dtype.newbyteorder("=")) for array in self._arrays
        ]
        return nests.unflatten(self._structure, specs)

    def open(self, window_rows: int) -> ArraySource:
        """Return the source itself. Local."""
        return self

    def read(self, block: Block) -> Any:
        """Return copies of the rows. Local."""
        # Indexing by an array copies, so that a program may write into its batches.
        return nests.unflatten(
            self._structure, [arrays.native(array[block]) for array in self._arrays]
        )
