"""Concatenation: the elements of several datasets, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import ENDLESS, Block, blocks_of_range
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.spec import ArraySpec, describe
from mpistrat.data.transformations.shuffle import Shuffle
from mpistrat.data.views import (
    Child,
    Part,
    View,
    count_from,
    permutes_rows,
    position_borders,
    unshuffled_rows,
)
from mpistrat.errors import DataError


class Concatenated(View):
    """The elements of several datasets, one after the other."""

    # An example keeps the number that it has without shuffles, so random maps give the same result
    # wherever a shuffle has put it.

    name = "concatenate"
    needs_one_spec = True

    def __init__(self, children: Sequence[Pipeline]) -> None:
        super().__init__(children)
        # The shuffles of each dataset are a part of the order of the concatenation.
        self.is_steady = all(
            child.source.is_steady if permutes_rows(child) else child.is_steady
            for child in children
        )
        self.is_in_order = not any(map(_has_order, children))

    @cached_property
    def element_spec(self) -> Any:
        """The common spec."""
        return common_spec(self.name, self.children)

    @cached_property
    def _starts(self) -> list[int]:
        lengths = [child.known_length for child in self.children]
        if ENDLESS in lengths:  # the datasets after an endless one are never reached
            lengths = lengths[: lengths.index(ENDLESS)]
        return list(itertools.accumulate(lengths, initial=0))

    @cached_property
    def num_examples(self) -> int:
        """The sum of all lengths."""
        return self._starts[-1] if len(self._starts) > len(self.children) else ENDLESS

    @property
    def file_starts(self) -> np.ndarray:
        """The positions at which a dataset or one of its files begins."""
        pairs = zip(self.children, self._starts, strict=False)
        starts = [position_borders(child) + start for child, start in pairs]
        if self.is_of_files:
            starts.append(np.array(self._starts[1:-1], np.int64))
        return np.unique(np.concatenate(starts)).astype(np.int64)

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of all datasets."""
        found = []
        for child in self.children:
            rows = unshuffled_rows(child)
            layout = None if rows is None else child.source.layout_of(key)
            found.append(None if layout is None or rows is None else layout.of_range(rows))
        known = [layout for layout in found if layout is not None]
        if not known:
            return None
        # A dataset without chunks is cut into pieces as long as the longest chunk, so that a
        # shuffle can treat all datasets the same way.
        length = max(layout.rows_per_chunk for layout in known)
        return ChunkLayout.joined(
            ChunkLayout(np.append(np.arange(0, child.known_length, length), child.known_length), 0)
            if layout is None
            else layout
            for child, layout in zip(self.children, found, strict=True)
        )

    def child_window(self, window_rows: int, child: Pipeline) -> int:
        """Return the same number: a window may be within one dataset."""
        return window_rows

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the numbers of the pass `key` from position `start` on."""
        if self.is_in_order:
            yield from super().blocks(key, batch_size, start)
            return
        for child, first in zip(self.children, self._starts, strict=False):
            length = child.known_length
            if 0 <= length <= start:
                start -= length
                continue
            rows = unshuffled_rows(child) if _has_order(child) else None
            if rows is not None:
                for items in child.order.blocks(key, batch_size, start):
                    yield first + (items - rows.start) // rows.step
            elif length == ENDLESS:
                yield from count_from(first + start)
            else:
                yield from blocks_of_range(range(first + start, first + length))
            start = 0

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements of each dataset among `numbers`."""
        owners = np.searchsorted(self._starts[: len(children)], numbers, "right") - 1
        present = np.unique(owners).tolist() or [0]
        parts = []
        for owner in present:
            places = None if len(present) == 1 else np.flatnonzero(owners == owner)
            own = (numbers if places is None else numbers[places]) - self._starts[owner]
            rows = unshuffled_rows(self.children[owner])
            items = children[owner].at(own, key) if rows is None else rows.start + rows.step * own
            parts.append(Part(owner, items, places))
        return parts

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield the elements of each dataset."""
        return itertools.chain.from_iterable(elements)


def _has_order(pipeline: Pipeline) -> bool:
    """Return whether a pass has its own order, and shuffles do not choose its rows."""
    is_shuffled = any(isinstance(each, Shuffle) for each in pipeline.transformations)
    return permutes_rows(pipeline) and (is_shuffled or not pipeline.source.is_in_order)


def common_spec(name: str, children: Sequence[Pipeline]) -> Any:
    """Return the common spec of the elements of `children`; lengths that differ are ``None``."""
    found = enumerate(child.found_spec for child in children)
    known = [(number, spec) for number, spec in found if spec is not None]
    if not known:
        return None
    first, spec = known[0]
    for number, other in known[1:]:
        united = _united(spec, other)
        if united is None:
            raise DataError(
                f"{name} needs datasets of one element_spec, but dataset {first} has "
                f"{describe(spec)}, and dataset {number} has {describe(other)}. Use map to convert "
                "them to the same structure, shape and dtype."
            )
        spec = united
    return spec


def _united(spec: Any, other: Any) -> Any:
    leaves, structure = nests.flatten(spec)
    others, other_structure = nests.flatten(other)
    pairs = list(zip(leaves, others, strict=False))
    if structure != other_structure or not all(itertools.starmap(_fit_together, pairs)):
        return None
    shapes = [zip(a.shape, b.shape, strict=True) for a, b in pairs]
    united = [[x if x == y else None for x, y in shape] for shape in shapes]
    dtypes = [leaf.dtype for leaf in leaves]
    return nests.unflatten(structure, map(ArraySpec, united, dtypes))


def _fit_together(a: ArraySpec, b: ArraySpec) -> bool:
    """Return whether dtypes are equal, and shapes too, except for open lengths."""
    return (
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(x == y or None in (x, y) for x, y in zip(a.shape, b.shape, strict=True))
    )
