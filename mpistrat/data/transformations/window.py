"""Windows: consecutive elements of a dataset, stacked, within one file or across files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import ENDLESS
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.spec import ArraySpec
from mpistrat.data.transformations import shuffle
from mpistrat.data.views import Child, Part, View, position_borders, position_layout
from mpistrat.errors import DataError

_MERGED, _MIN_PIECES = 8, 24
"""Up to `_MERGED` neighbouring chunks are shuffled together, because windows at the end of a chunk
need the next chunk too; but at least `_MIN_PIECES` pieces must be left to mix."""


class Windowed(View):
    """Windows of `size` elements, `dilation` apart; the first elements are `stride` apart."""

    name = "window"

    def __init__(
        self, child: Pipeline, size: int, stride: int, dilation: int, across_files: bool
    ) -> None:
        super().__init__([child])
        self._size, self._stride, self._dilation = size, stride, dilation
        self._across_files = across_files
        self._span = (size - 1) * dilation + 1
        self.rows_per_example = min(stride, self._span)

    def __repr__(self) -> str:
        return f"{self.children[0].calls}.{self.described}"

    @property
    def described(self) -> str:
        """The arguments."""
        across = ", across_files=True" if self._across_files else ""
        return f"window({self._size}, {self._stride}, {self._dilation}{across})"

    @property
    def element_spec(self) -> Any:
        """The specs of the elements with a dimension in front."""
        spec = self.children[0].found_spec
        if spec is None:
            return None
        return nests.map_nest(lambda leaf: ArraySpec((self._size, *leaf.shape), leaf.dtype), spec)

    @cached_property
    def _segments(self) -> tuple[np.ndarray, np.ndarray]:
        """The first element of each file, and the number of windows before the file."""
        length = self.children[0].known_length
        borders = () if self._across_files else position_borders(self.children[0])
        starts = np.array([0, *borders], np.int64)
        lengths = np.diff(np.append(starts, length))
        counts = np.maximum((lengths - self._span) // self._stride + 1, 0)
        return starts, np.cumsum([0, *counts])

    @cached_property
    def num_examples(self) -> int:
        """How many windows fit."""
        if self.children[0].known_length != ENDLESS:
            return int(self._segments[1][-1])
        if not self._across_files:
            position_borders(self.children[0])  # raises ValueError if there are several files
        return ENDLESS

    def _first_elements(self, numbers: np.ndarray) -> np.ndarray:
        """Return the position of the first element of each window."""
        if self.num_examples == ENDLESS:
            return numbers * self._stride
        starts, firsts = self._segments
        if len(starts) == 1:
            return numbers * self._stride
        files = np.searchsorted(firsts, numbers, "right") - 1
        found: np.ndarray = starts[files] + (numbers - firsts[files]) * self._stride
        return found

    @property
    def file_starts(self) -> np.ndarray:
        """The positions at which the windows of the next file begin."""
        firsts = np.unique(self._segments[1])
        return firsts[(firsts > 0) & (firsts < self.num_examples)]

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the first element of each window."""
        layout = position_layout(self.children[0], key)
        if layout is None:
            return None
        most = layout.rows_in(shuffle.WINDOW_BYTES) // _MIN_PIECES
        layout = layout.merged(min(_MERGED * max(layout.rows_per_chunk, self._span), most))
        found = layout.of_numbers(self._first_elements(np.arange(self.num_examples)))
        # Each element is in memory once, and a window also needs elements after its chunk.
        new = min(self._stride, self._span) * layout.bytes_per_row
        return dataclasses.replace(found, bytes_per_row=new + new // _MERGED)

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements of all windows, one window after the other."""
        firsts = self._first_elements(numbers)
        rows = self.children[0].order.rows
        # The rows of a window follow one another, so the reader may copy each window in one piece.
        if rows is not None and rows.step * self._dilation == 1:
            return [Part(0, firsts + rows.start, run_length=self._size)]
        positions = firsts[:, None] + np.arange(self._size) * self._dilation
        return [Part(0, children[0].at(positions.ravel(), key))]

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield the windows of a stream of elements."""
        waiting: list[Any] = []
        skipped = 0
        for element in elements[0]:
            if skipped:
                skipped -= 1
                continue
            waiting.append(element)
            if len(waiting) == self._span:
                flat = [nests.flatten(each) for each in waiting[:: self._dilation]]
                columns = zip(*(leaves for leaves, _ in flat), strict=True)
                yield nests.unflatten(flat[0][1], map(np.stack, columns))
                # If windows are further apart than they are long, the elements in between are
                # skipped.
                skipped = max(self._stride - self._span, 0)
                del waiting[: self._stride]

    def joined(self, num_examples: int, parts: Sequence[Part], columns: Sequence[Any]) -> Any:
        """Return the columns with an additional dimension for the elements of a window."""

        def stacked(column: np.ndarray) -> np.ndarray:
            if column.dtype == object:
                raise DataError(
                    "window stacks elements, which need one shape, but some differ in shape. Bring "
                    "them to one shape with map, before window."
                )
            return column.reshape(num_examples, self._size, *column.shape[1:])

        return nests.map_nest(stacked, columns[0])
