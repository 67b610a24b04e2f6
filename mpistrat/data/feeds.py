"""What one rank is fed: its elements of a pass, as many as every other rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from mpistrat.data.pipeline import Pipeline, Prepare
from mpistrat.data.signature import position_layout
from mpistrat.data.spec import empty_batch, open_batch
from mpistrat.errors import DataError

__all__ = ["Feed", "OwnFeed", "SplitFeed", "Take"]


Take = Callable[[Iterator[Any]], tuple[Any, bool]]
"""Takes the next element of this rank's iterator: the element, or ``None`` past the end, and
whether any rank has one. May be collective."""


class Feed(Protocol):
    """The elements of one rank."""

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element, with the batch dimension ``None``."""

    @property
    def length(self) -> int:
        """Number of elements of a pass, the same on all ranks, `ENDLESS` or `UNKNOWN`."""

    @property
    def layout(self) -> dict[str, Any]:
        """What must be the same for a position within a pass to be valid again: JSON values."""

    def elements(
        self, pass_number: int, start: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return what `prepare` makes of the elements of a pass from element `start` on."""


@dataclass(frozen=True)
class SplitFeed:
    """One rank's part of each global batch."""

    pipeline: Pipeline
    size: int
    rank: int

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one part."""
        return open_batch(self.pipeline.element_spec)

    @property
    def length(self) -> int:
        """Number of global batches."""
        return self.pipeline.length

    @cached_property
    def layout(self) -> dict[str, Any]:
        """Nothing of the ranks: the batches are the same at any number of them."""
        return position_layout(self.pipeline)

    def elements(
        self, pass_number: int, start: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return the parts of this rank. Local."""
        return self.pipeline.elements(pass_number, start, self.size, self.rank, prepare)


@dataclass(frozen=True)
class OwnFeed:
    """Whole batches of a pipeline of this rank's own, then arrays of length 0.

    Ranks may run out at different times; the pass ends when the last one does.
    """

    pipeline: Pipeline
    size: int
    length: int
    """Number of elements of the longest pipeline, `ENDLESS` or `UNKNOWN`."""
    found_spec: Any
    """The nest of `ArraySpec` of one batch, of another rank where this one has no example to
    find it; ``None`` where no rank has."""
    order: str
    """A digest of what decides the order of the examples of all ranks."""
    take: Take | None
    """How to take each element; ``None`` where `length` is certain."""

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one batch of this rank."""
        if self.found_spec is None:
            raise DataError(
                "The element_spec of data sets with map is found by mapping one example, but the "
                "data sets of all ranks are empty."
            )
        return open_batch(self.found_spec)

    @cached_property
    def layout(self) -> dict[str, Any]:
        """The number of ranks too, because it decides who gets which example."""
        batch = self.pipeline.batch
        batches = {} if batch is None else {"replica_batch_size": batch.batch_size}
        return {"num_replicas": self.size} | batches | {"order": self.order}

    def elements(
        self, pass_number: int, start: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return the batches of this rank. Collective where the length is not certain."""
        nothing: Any = None
        with closing(self.pipeline.elements(pass_number, start, prepare=prepare)) as own:
            for _ in self._steps(start):
                if self.take is None:
                    element = next(own, None)
                else:
                    element, has_any_rank = self.take(own)
                    if not has_any_rank:
                        return
                if element is None:
                    if nothing is None:
                        nothing = prepare(empty_batch(self.element_spec))
                    yield nothing
                else:
                    yield element

    def _steps(self, start: int) -> Iterator[int]:
        if self.length < 0 or self.take is not None:
            return itertools.count(start)
        return iter(range(start, self.length))
