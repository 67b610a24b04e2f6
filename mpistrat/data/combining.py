"""Combinations of data sets: zip, concatenation and enumeration of examples."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.batching import Batch
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import ENDLESS, Block, blocks_of_range
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.spec import ArraySpec, describe
from mpistrat.data.transforms import Repeat, SameOrder, Skip, Take
from mpistrat.data.views import (
    Child,
    Part,
    View,
    count_from,
    position_borders,
    position_layout,
)
from mpistrat.errors import DataError


class Zipped(View):
    """Nests of the elements at one position in several data sets."""

    name = "zip"

    def __init__(self, structure: nests.Structure, children: Sequence[Pipeline]) -> None:
        super().__init__(children)
        self._structure = structure

    @property
    def described(self) -> str:
        """The structure."""
        return f"zip as {nests.signature(self._structure)}"

    @property
    def element_spec(self) -> Any:
        """The nest of the specs of all data sets."""
        specs = [child.found_spec for child in self.children]
        return None if None in specs else nests.unflatten(self._structure, specs)

    def only(self, fields: tuple[Any, ...]) -> View | None:
        """Return the tuples of some of the data sets."""
        nest = nests.unflatten(self._structure, self.children)
        try:
            chosen = [nest[field] for field in fields]
        except (KeyError, IndexError, TypeError):
            return None  # the one who asked says what is wrong
        # The others may be shorter, so elements are those of the shortest of all.
        if not all(isinstance(child, Pipeline) for child in chosen):
            return None
        take = Take(self.num_examples) if self.num_examples != ENDLESS else Skip(0)
        _, structure = nests.flatten((0,) * len(chosen))
        return Zipped(structure, [child.then(take) for child in chosen])

    @cached_property
    def num_examples(self) -> int:
        """Length of the shortest data set."""
        lengths = [child.known_length for child in self.children]
        return min((length for length in lengths if length != ENDLESS), default=ENDLESS)

    @property
    def file_starts(self) -> np.ndarray:
        """Where any of the data sets begins a file."""
        borders = functools.reduce(np.union1d, map(position_borders, self.children))
        return borders[borders < self.num_examples].astype(np.int64)

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the data set with the largest elements."""
        found = [position_layout(child, key) for child in self.children]
        layouts = [layout for layout in found if layout is not None]
        if not layouts:
            return None
        widest = max(layouts, key=lambda layout: layout.bytes_per_row)
        total = sum(layout.bytes_per_row for layout in layouts)
        return dataclasses.replace(widest.of_range(range(self.num_examples)), bytes_per_row=total)

    def child_window(self, window_rows: int, child: Pipeline) -> int:
        """Return as many: each example has one element of each data set."""
        return window_rows

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements at the positions `numbers` of each data set."""
        return [Part(number, child.at(numbers, key)) for number, child in enumerate(children)]

    def joined(self, num_examples: int, parts: Sequence[Part], columns: Sequence[Any]) -> Any:
        """Return the nest of all columns."""
        return nests.unflatten(self._structure, columns)

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield nests of one element of each data set."""
        for leaves in zip(*elements, strict=False):
            yield nests.unflatten(self._structure, leaves)


class Concatenated(View):
    """The elements of several data sets, one after the other."""

    # An example keeps the number that it has without shuffles, so maps of it are the same
    # wherever the shuffles of a data set have put it.

    name = "concatenate"
    needs_one_spec = True

    def __init__(self, children: Sequence[Pipeline]) -> None:
        super().__init__(children)
        # The shuffles of each are a part of this one's order.
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
        if ENDLESS in lengths:  # what comes after it never comes
            lengths = lengths[: lengths.index(ENDLESS)]
        return list(itertools.accumulate(lengths, initial=0))

    @cached_property
    def num_examples(self) -> int:
        """The sum of all lengths."""
        return self._starts[-1] if len(self._starts) > len(self.children) else ENDLESS

    @property
    def file_starts(self) -> np.ndarray:
        """Where a data set or one of its files begins."""
        pairs = zip(self.children, self._starts, strict=False)
        starts = [position_borders(child) + start for child, start in pairs]
        if self.is_of_files:
            starts.append(np.array(self._starts[1:-1], np.int64))
        return np.unique(np.concatenate(starts)).astype(np.int64)

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of all data sets."""
        found = []
        for child in self.children:
            rows = unshuffled_rows(child)
            layout = None if rows is None else child.source.layout_of(key)
            found.append(None if layout is None or rows is None else layout.of_range(rows))
        known = [layout for layout in found if layout is not None]
        if not known:
            return None
        length = max(layout.rows_per_chunk for layout in known)
        return ChunkLayout.joined(
            ChunkLayout(np.append(np.arange(0, child.known_length, length), child.known_length), 0)
            if layout is None
            else layout
            for child, layout in zip(self.children, found, strict=True)
        )

    def child_window(self, window_rows: int, child: Pipeline) -> int:
        """Return as many: a window may lie in one data set."""
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
        """Return the elements of each data set among `numbers`."""
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
        """Yield the elements of each data set."""
        return itertools.chain.from_iterable(elements)


def permutes_rows(pipeline: Pipeline) -> bool:
    """Return whether shuffles do not choose which rows of the source are left."""
    is_shuffled = not pipeline.source.is_in_order
    for each in pipeline.transformations:
        if isinstance(each, Shuffle):
            is_shuffled = True
        elif isinstance(each, Batch | Repeat) or (is_shuffled and not isinstance(each, SameOrder)):
            return False
    return True


def unshuffled_rows(pipeline: Pipeline) -> range | None:
    """Return the rows of elements without the shuffles; ``None`` where these choose the rows."""
    length = pipeline.source.num_examples
    if length < 0 or not permutes_rows(pipeline):
        return None
    rows: range | None = range(length)
    for each in pipeline.transformations:
        if rows is not None and not isinstance(each, Shuffle):
            rows = each.rows(rows)
    return rows


def _has_order(pipeline: Pipeline) -> bool:
    """Return whether a pass has its own order, of rows that no shuffle chooses."""
    is_shuffled = any(isinstance(each, Shuffle) for each in pipeline.transformations)
    return permutes_rows(pipeline) and (is_shuffled or not pipeline.source.is_in_order)


def common_spec(name: str, children: Sequence[Pipeline]) -> Any:
    """Return the spec of elements of any of `children`, ``None`` where dimensions differ."""
    found = enumerate(child.found_spec for child in children)
    known = [(number, spec) for number, spec in found if spec is not None]
    if not known:
        return None
    first, spec = known[0]
    for number, other in known[1:]:
        united = _united(spec, other)
        if united is None:
            raise DataError(
                f"{name} needs data sets of one element_spec, but data set {first} has "
                f"{describe(spec)}, and data set {number} {describe(other)}. Bring them to one "
                "structure, shape and dtype with map."
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
