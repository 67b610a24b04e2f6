"""Selection of elements and of batches by number or mask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.arrays import host_view
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import Block, Order, Reordering
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.views import (
    Child,
    Part,
    View,
    borders_between,
    position_borders,
    position_layout,
)
from mpistrat.system.text import brief


class Indices:
    """Numbers of elements, or a mask, which are checked once the number of elements is known."""

    def __init__(self, indices: Any) -> None:
        array = host_view(indices)
        if (array.dtype.kind not in "iub" and array.size) or array.ndim != 1:
            raise TypeError(
                "select needs a sequence of integers, or a mask of bools, with one dimension, not "
                f"{brief(indices)} of dtype {array.dtype} and shape {array.shape}."
            )
        if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
            raise IndexError(f"select: the index {int(array.max())} is too large.")
        # A copy, so that the order does not change if the program changes its array.
        self._given = array.copy() if array.dtype.kind == "b" else array.astype(np.int64)
        self._found: tuple[int, np.ndarray] | None = None

    def __repr__(self) -> str:
        return f"{self._given.dtype} indices {self.digest}, {len(self._given)} of them"

    @cached_property
    def digest(self) -> str:
        """A digest of the indices, as hexadecimal digits."""
        return hashlib.sha256(self._given.tobytes()).hexdigest()[:16]

    @property
    def num_selected(self) -> int:
        """Number of selected elements."""
        if self._given.dtype == np.bool_:
            return int(np.count_nonzero(self._given))
        return len(self._given)

    def of(self, length: int) -> np.ndarray:
        """Return the positions in a dataset of `length` elements."""
        if self._found is None or self._found[0] != length:
            self._found = length, self._checked(length)
        return self._found[1]

    def _checked(self, length: int) -> np.ndarray:
        given = self._given
        if given.dtype == np.bool_:
            if len(given) != length:
                raise IndexError(
                    f"select: the mask has {len(given)} entries, but the dataset has {length} "
                    "elements. Pass one per element."
                )
            return np.flatnonzero(given)
        wrong = np.flatnonzero((given < -length) | (given >= length))
        if len(wrong):
            raise IndexError(
                f"select: index {int(given[wrong[0]])} at position {int(wrong[0])} is out of range "
                f"for a dataset of {length} elements. Use indices in [{-length}, {length - 1}]."
            )
        return np.where(given < 0, given + length, given)


class Selected(View):
    """The elements at given positions of a dataset."""

    name = "select"

    def __init__(self, child: Pipeline, indices: Indices) -> None:
        super().__init__([child])
        self._indices = indices
        if child.source.is_read:
            indices.of(child.known_length)

    def __repr__(self) -> str:
        return f"{self.children[0].calls}.select({self._indices.num_selected} of them)"

    @property
    def described(self) -> str:
        """The indices."""
        return f"select by {self._indices!r}"

    @property
    def num_examples(self) -> int:
        """The number of indices."""
        return len(self.positions((0,)))

    @property
    def file_starts(self) -> np.ndarray:
        """The positions at which the file changes."""
        borders = position_borders(self.children[0])
        return borders_between(np.searchsorted(borders, self.positions((0,)), "right"))

    def positions(self, key: PassKey) -> np.ndarray:
        """Return the position of each element in the pass `key`."""
        return self._indices.of(self.children[0].known_length)

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the selected elements."""
        layout = position_layout(self.children[0], key)
        return None if layout is None else layout.of_numbers(self.positions(key))

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements at the selected positions."""
        return [Part(0, children[0].at(self.positions(key)[numbers], key))]


@dataclass(frozen=True)
class SelectBatches(Reordering):
    """The batches at given positions of the pass."""

    indices: Indices

    def length(self, num_items: int) -> int:
        """Return the number of output items."""
        return self.indices.num_selected

    def blocks(
        self, upstream: Order, key: PassKey, batch_size: int | None, start: int
    ) -> Iterator[Block]:
        """Return the items of the pass `key`, without the first `start`."""
        yield upstream.at(self.indices.of(upstream.length)[start:], key, {})
