"""Streams: views of data sets whose length nobody knows, such as generators.

Every rank makes all elements and keeps its slices, as it does of a generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import UNKNOWN, Block, PlainSource, Source, skip_items
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey, PassStream
from mpistrat.data.sources import GeneratorSource
from mpistrat.data.views import View


def view_or_stream(view: View) -> Source:
    """Return `view`, or the stream of its examples where they cannot be read at random."""
    return Stream(view) if any(child.source.is_stream for child in view.children) else view


class Stream(PlainSource):
    """The examples of a view, made one after the other."""

    lookahead_rows = 0
    is_stream = True
    layout: ChunkLayout | None = None
    num_examples = UNKNOWN

    def __init__(self, view: View) -> None:
        self._view = view
        self.kind = view.kind
        self.num_maps = view.num_maps

    def __repr__(self) -> str:
        return repr(self._view)

    @property
    def streamed(self) -> tuple[Pipeline, ...]:
        """The datasets whose elements it combines."""
        return self._view.children

    @property
    def order_entries(self) -> list[str]:
        """What decides the order of each data set."""
        return self._view.child_entries

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example."""
        return self._view.element_spec

    @cached_property
    def _checked(self) -> GeneratorSource:
        """What checks and stacks examples."""
        return GeneratorSource(tuple, self.element_spec)

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return one item for each example of the pass `key` from `start` on."""
        return skip_items(self._blocks(key), start)

    def _blocks(self, key: PassKey) -> Iterator[Block]:
        first_map = 0
        with contextlib.ExitStack() as stack:
            elements = []
            for child in self._view.children:
                stream = PassStream(key, child.branch, first_map, (), self._view.is_fixed)
                own = stack.enter_context(contextlib.closing(child.stream_elements(stream)))
                elements.append(own)
                first_map += child.num_maps
            for number, element in enumerate(self._view.streamed(elements)):
                item = np.empty(1, object)
                item[0] = self._checked.example(element, number)
                yield item

    def expect(self, block: Block) -> None:
        """Nothing to prepare: the items are the examples."""

    def open(self, window_rows: int, stream: PassStream) -> Stream:
        """Return the source itself: its items are the examples."""
        return self

    def read(self, block: Block) -> Any:
        """Return the examples of `block`, stacked."""
        return self._checked.read(block)

    def close(self) -> None:
        """Nothing to release."""
