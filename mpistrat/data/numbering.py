"""Numbers of examples: which example of a map's data set an item stands for."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.data.batching import Batch
from mpistrat.data.order import Source, Transformation, span_of
from mpistrat.data.random import PassKey


class Numbering:
    """Gives each item its number in a data set, shuffles aside, and its later repetitions.

    Parameters
    ----------
    source : Source
    transformations : sequence of Transformation
        Those of the whole pipeline.
    num_before : int
        How many of them come before the data set that examples are numbered in.
    """

    # An item is the number of a row, plus the span of the source for each repetition. So it alone
    # says which example it is, wherever shuffles have put it.

    def __init__(
        self, source: Source, transformations: tuple[Transformation, ...], num_before: int
    ) -> None:
        self._span = span_of(source)
        is_in_order = source.is_in_order
        span = self._span
        self._steps: list[tuple[Transformation, int | None]] = []
        self._later: list[int | None] = []
        for number, each in enumerate(transformations):
            count = each.num_repetitions
            is_repeat = count != 1
            if number >= num_before:
                self._later += [count] * is_repeat
                continue
            # After a shuffle, examples that are left out leave the numbers of the others alone.
            is_in_order = (
                is_in_order and not isinstance(each, Batch) and (is_repeat or _keeps_order(each))
            )
            if is_repeat:
                self._steps.append((each, span))
                span *= count or 1
            elif is_in_order:
                self._steps.append((each, None))
                span = each.length(span)

    def __call__(self, item: Any) -> tuple[int, PassKey]:
        """Return the number of an item, and those of the repetitions of the data set."""
        while isinstance(item, np.ndarray):  # of a batch, its first example
            item = item[0]
        repetitions, number = divmod(int(getattr(item, "number", item)), self._span)
        for step, span in self._steps:
            if span is None:
                number = step.renumbered(number)
            else:
                repetitions, repetition = _split(repetitions, step.num_repetitions)
                number += repetition * span
        later = []
        for count in self._later:
            repetitions, repetition = _split(repetitions, count)
            later.append(repetition)
        return number, tuple(reversed(later))


def _keeps_order(transformation: Transformation) -> bool:
    return transformation.rows(range(2, 4)) is not None


def _split(repetitions: int, count: int | None) -> tuple[int, int]:
    return (0, repetitions) if count is None else divmod(repetitions, count)
