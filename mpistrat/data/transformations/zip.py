"""Zip: nests of the elements at one position of several datasets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import ENDLESS
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey
from mpistrat.data.transformations.take import Skip, Take
from mpistrat.data.views import (
    Child,
    Part,
    View,
    position_borders,
    position_layout,
)


class Zipped(View):
    """Nests of the elements at one position in several datasets."""

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
        """The nest of the specs of all datasets."""
        specs = [child.found_spec for child in self.children]
        return None if None in specs else nests.unflatten(self._structure, specs)

    def only(self, fields: tuple[Any, ...]) -> View | None:
        """Return the tuples of some of the datasets."""
        nest = nests.unflatten(self._structure, self.children)
        try:
            chosen = [nest[field] for field in fields]
        except (KeyError, IndexError, TypeError):
            return None  # the caller raises an error that names the missing field
        # The other datasets may be shorter, so the length is still the length of the shortest.
        if not all(isinstance(child, Pipeline) for child in chosen):
            return None
        take = Take(self.num_examples) if self.num_examples != ENDLESS else Skip(0)
        _, structure = nests.flatten((0,) * len(chosen))
        return Zipped(structure, [child.then(take) for child in chosen])

    @cached_property
    def num_examples(self) -> int:
        """Length of the shortest dataset."""
        lengths = [child.known_length for child in self.children]
        return min((length for length in lengths if length != ENDLESS), default=ENDLESS)

    @property
    def file_starts(self) -> np.ndarray:
        """The positions at which a file of any dataset begins."""
        borders = functools.reduce(np.union1d, map(position_borders, self.children))
        return borders[borders < self.num_examples].astype(np.int64)

    def find_layout(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the dataset with the largest elements."""
        found = [position_layout(child, key) for child in self.children]
        layouts = [layout for layout in found if layout is not None]
        if not layouts:
            return None
        widest = max(layouts, key=lambda layout: layout.bytes_per_row)
        total = sum(layout.bytes_per_row for layout in layouts)
        return dataclasses.replace(widest.of_range(range(self.num_examples)), bytes_per_row=total)

    def child_window(self, window_rows: int, child: Pipeline) -> int:
        """Return the same number: each example has one element of each dataset."""
        return window_rows

    def parts(self, numbers: np.ndarray, key: PassKey, children: Sequence[Child]) -> list[Part]:
        """Return the elements at the positions `numbers` of each dataset."""
        return [Part(number, child.at(numbers, key)) for number, child in enumerate(children)]

    def joined(self, num_examples: int, parts: Sequence[Part], columns: Sequence[Any]) -> Any:
        """Return the nest of all columns."""
        return nests.unflatten(self._structure, columns)

    def streamed(self, elements: Sequence[Iterator[Any]]) -> Iterator[Any]:
        """Yield nests of one element of each dataset."""
        for leaves in zip(*elements, strict=False):
            yield nests.unflatten(self._structure, leaves)
