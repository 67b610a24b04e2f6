"""A source and its steps, carried out: what a data set does when it is iterated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import sharding
from mpistrat.data.background import in_background
from mpistrat.data.elements import ElementMaker
from mpistrat.data.lookahead import look_ahead
from mpistrat.data.order import Block, Order, Reader, Source, Step
from mpistrat.data.random_numbers import PassStream
from mpistrat.data.shuffle import Shuffle
from mpistrat.data.spec import batched, open_batch, spec_of, with_room_for_text
from mpistrat.data.transforms import Batch, Map, Prefetch
from mpistrat.errors import DataError

__all__ = ["Pipeline", "Prepare"]

Prepare = Callable[[Any], Any]
"""Takes a batch in host memory, and may begin to bring it elsewhere."""


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Pipeline:
    """A source and the steps applied to it, in order."""

    source: Source
    steps: tuple[Step, ...] = ()
    branch: int = 0
    """The rank where each rank has examples of its own; for random numbers of maps."""

    def then(self, step: Step) -> Pipeline:
        """Return the pipeline with one more step. Local."""
        return dataclasses.replace(self, steps=(*self.steps, step))

    def with_batch_size(self, batch_size: int) -> Pipeline:
        """Return the pipeline with other batches. Local."""
        steps = tuple(
            dataclasses.replace(step, batch_size=batch_size) if isinstance(step, Batch) else step
            for step in self.steps
        )
        return dataclasses.replace(self, steps=steps)

    @property
    def batch(self) -> Batch | None:
        """The step that groups examples, if there is one."""
        return next((step for step in self.steps if isinstance(step, Batch)), None)

    @property
    def length(self) -> int:
        """Number of elements of a pass, `ENDLESS` or `UNKNOWN`."""
        return Order(self.source, self.steps).length

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element.

        Raises
        ------
        DataError
            If there are maps and no example to try them on.
        """
        spec = self.found_spec
        if spec is None:
            raise DataError(
                "The element_spec of a data set with map is found by mapping one example, but the "
                "data set is empty."
            )
        return spec

    @cached_property
    def found_spec(self) -> Any:
        """As `element_spec`, but ``None`` where there is no example."""
        _, batch_maps = self._maps()
        spec, batch = self._example_spec, self.batch
        if spec is None or batch is None:
            return spec
        if not batch_maps:
            return batched(spec, batch.batch_size if batch.drop_remainder else None)
        with closing(self.source.open(0)) as reader:
            first = self._first_item
            if not len(first):
                return None
            return open_batch(spec_of(self._maker(reader, 0).batch(first, slice(1), 0)))

    @cached_property
    def _example_spec(self) -> Any:
        """The nest of `ArraySpec` of one example after its maps; ``None`` without an example."""
        example_maps, _ = self._maps()
        if not example_maps:
            return self.source.element_spec
        with closing(self.source.open(0)) as reader:
            for example in self._maker(reader, 0).examples(self._first_item, 0):
                return with_room_for_text(spec_of(example), self.source.element_spec)
        return None

    @cached_property
    def _first_item(self) -> Block:
        """The first item of the data set as it is before shuffling and batching, or nothing.

        So neither the seed nor the pass nor the number of ranks decides what maps are tried on.
        """
        before = [step for step in self._example_steps if not isinstance(step, Shuffle)]
        blocks = Order(self.source, tuple(before)).blocks((0,), None)
        return next((block[:1] for block in blocks if len(block)), np.empty(0, np.int64))

    def elements(
        self,
        pass_number: int,
        start: int = 0,
        size: int = 1,
        rank: int = 0,
        prepare: Prepare = _as_it_is,
    ) -> Generator[Any, None, None]:
        """Return the elements of a pass: of each batch, the part of `rank`. Local.

        Parameters
        ----------
        pass_number : int
        start : int
            How many elements to pass over, without reading them.
        size, rank : int
            Into how many parts each batch is split, and which of them to return.
        prepare : callable
            Applied to each batch once it is there, by the thread that runs ahead if one does.
        """
        elements = self._elements(pass_number, start, size, rank, prepare)
        ahead = max((s.num_elements for s in self.steps if isinstance(s, Prefetch)), default=0)
        return in_background(elements, ahead) if ahead else elements

    def _elements(
        self, pass_number: int, start: int, size: int, rank: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return `elements` without prefetching."""
        layout = self.source.layout
        window_rows = max(
            (s.window_rows(layout) for s in self.steps if isinstance(s, Shuffle) and layout),
            default=0,
        )
        order, batch = Order(self.source, self.steps), self.batch

        def rows_of(block: Block) -> list[Block]:
            if batch is None:
                return [block]
            return [items[sharding.slice_of_rank(len(items), size, rank)] for items in block]

        with closing(self.source.open(window_rows)) as reader:
            make = self._maker(reader, pass_number)
            number = start
            blocks = order.blocks((pass_number,), None, start)
            for block in look_ahead(blocks, reader, rows_of):
                if batch is None:
                    yield from make.examples(block, number)
                else:
                    for batch_number, items in enumerate(block, number):
                        part = sharding.slice_of_rank(len(items), size, rank)
                        yield prepare(make.batch(items, part, batch_number * batch.batch_size))
                number += len(block)

    def _maker(self, reader: Reader, pass_number: int) -> ElementMaker:
        stream = PassStream(pass_number, self.branch)
        return ElementMaker(reader, *self._maps(), lambda: self._example_spec, stream)

    def _maps(self) -> tuple[list[Map], list[Map]]:
        """Return the maps of examples, and those of batches."""
        middle = len(self._example_steps)
        return (
            [step for step in self.steps[:middle] if isinstance(step, Map)],
            [step for step in self.steps[middle:] if isinstance(step, Map)],
        )

    @property
    def _example_steps(self) -> tuple[Step, ...]:
        """The steps before `batch`."""
        return self.steps[: self.steps.index(self.batch)] if self.batch else self.steps
