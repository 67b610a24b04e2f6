"""Datasets without the elements that raise an error when they are read or mapped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import numpy as np

from mpistrat import sharding
from mpistrat.data.order import Block
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassStream
from mpistrat.data.transformations.filter import Filtered

_logger = logging.getLogger("mpistrat")

_MAX_NAMED = 5
"""Number of elements that the warning names."""

_AT_A_TIME = 256


class ValidElements(Filtered):
    """The elements of a dataset that can be read and mapped without an error."""

    name = "ignore_errors"
    is_fixed = False  # maps are tried with the random numbers of the first pass

    def __init__(self, child: Pipeline, logs: bool) -> None:
        super().__init__(child, _always, None)
        self._logs = logs
        self._errors: list[str] = []

    def __repr__(self) -> str:
        return f"{self.children[0].calls}.ignore_errors()"

    @property
    def kind(self) -> str:
        """The name of the method, with the kind of the dataset."""
        return f"{self.children[0].kind}.ignore_errors()"

    def evaluate(self, size: int, rank: int) -> np.ndarray:
        """Return for each element in the share of `rank` whether it raises no error."""
        pipeline = self._unshuffled
        part = sharding.slice_of_rank(pipeline.known_length, size, rank)
        self._errors = []
        kept = np.ones(part.stop - part.start, np.bool_)
        stream = PassStream((0,), pipeline.branch)
        with (
            closing(pipeline.open(0, stream)) as reader,
            closing(pipeline.maker(reader, stream)) as maker,
        ):
            for start in range(0, len(kept), _AT_A_TIME):
                numbers = part.start + np.arange(start, min(start + _AT_A_TIME, len(kept)))
                items = pipeline.order.at(numbers, stream.key, {})
                self._try(maker.examples, items, numbers, kept[start : start + len(items)])
        return kept

    def _try(
        self, make: Callable[[Block], Any], items: Block, numbers: np.ndarray, kept: np.ndarray
    ) -> None:
        """Try to create elements, and set `kept` to false for those that raise an error."""
        # Several are read together. After an error, which any of them may have caused, the next one
        # is tried by itself.
        place, is_alone = 0, False
        while place < len(items):
            stop = place + 1 if is_alone else len(items)
            made = place
            try:
                with closing(make(items[place:stop])) as examples:
                    for _ in examples:
                        made += 1
            # Lack of memory is not a fault of the element, so it must not be left out.
            except MemoryError:
                raise
            except Exception as error:
                if is_alone:
                    self._note(error, int(numbers[place]))
                    kept[place] = False
                    made, is_alone = place + 1, False
                else:
                    is_alone = True
            else:
                is_alone = False
            place = made

    def _note(self, error: Exception, number: int) -> None:
        text = " ".join(str(error).split())[:200]
        self._errors.append(f"element {number} ({type(error).__name__}: {text})")

    @property
    def notes(self) -> Any:
        """The number of errors on this rank, and the first ones, as JSON values."""
        return [len(self._errors), self._errors[:_MAX_NAMED]]

    def report(self, notes: Iterable[Any]) -> None:
        """Warn of the errors of all ranks; `notes` are in rank order."""
        counts, named = zip(*notes, strict=True)
        if not (self._logs and any(counts)):
            return
        shown = [each for of_rank in named for each in of_rank][:_MAX_NAMED]
        more = sum(counts) - len(shown)
        _logger.warning(
            "ignore_errors leaves out %d of %d elements: %s%s.",
            sum(counts),
            len(self.mask),
            ", ".join(shown),
            f", and {more} more" if more else "",
        )


def _always(*element: Any) -> bool:
    return True
