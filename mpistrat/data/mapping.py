"""Maps of one level of a data set: applied to its elements, in order, in one thread or several."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests, pytorch
from mpistrat.data.batching import Enumerate
from mpistrat.data.numbering import Numbering
from mpistrat.data.order import Block
from mpistrat.data.parallel_map import ParallelMap, num_threads
from mpistrat.data.random import MapScope, PassStream
from mpistrat.data.transforms import Map
from mpistrat.errors import DataError

_Step = tuple[Map | Enumerate, Numbering, Callable[[Any], np.random.Generator], bool]
"""A map, the numbers of its examples, what makes the random numbers of one, and whether it gets
batches."""

Entry = tuple[Any, Sequence[Any] | Block, Sequence[int]]
"""An element, the items that it is made of, and the numbers that it was given."""


class GroupEnd:
    """Stands between the elements of one batch and those of the next, and passes all maps."""

    def __init__(self, *content: Any) -> None:
        self.content = content


class Mapper:
    """Applies the maps of what was batched `level` times."""

    # Each of `steps` is the number of a map among all of the data set, the map, and the numbers of
    # its examples.

    def __init__(
        self,
        steps: Sequence[tuple[int, Map | Enumerate, Numbering]],
        level: int,
        stream: Callable[[], PassStream],
    ) -> None:
        self._steps: list[_Step] = [
            (
                each,
                numbering,
                partial(self._generator, number, each, numbering),
                level > 0 or getattr(each, "num_wraps", 0) > 0,
            )
            for number, each, numbering in steps
        ]
        self._level = level
        self._stream = stream
        self._threads: dict[int, ParallelMap] = {}
        self.is_parallel = any(
            isinstance(each, Map) and each.num_parallel_calls is not None for _, each, _ in steps
        )

    def __bool__(self) -> bool:
        return bool(self._steps)

    def one(self, entry: Entry) -> Any:
        """Return an element after all maps."""
        for step in self._steps:
            entry = self._apply(step, entry)
        return entry[0]

    def each(self, entries: Iterable[Entry]) -> Iterator[Any]:
        """Yield the elements of `entries` after all maps, one after the other."""
        steps, apply = self._steps, self._apply
        for entry in entries:
            for step in steps:
                entry = apply(step, entry)
            yield entry[0]

    def run(self, entries: Iterator[Entry | GroupEnd]) -> Generator[Any, None, None]:
        """Yield the elements of `entries` after all maps, and the ends between them."""
        generators: list[Generator[Any, None, None]] = []
        try:
            for number, step in enumerate(self._steps):
                entries = self._run(number, step, entries)
                generators.append(entries)
            for entry in entries:
                yield entry if isinstance(entry, GroupEnd) else entry[0]
        finally:
            for each in reversed(generators):  # the last one waits for what it has begun
                each.close()

    def _run(
        self, number: int, step: _Step, entries: Iterable[Entry | GroupEnd]
    ) -> Generator[Any, None, None]:
        """Yield `entries` after one map."""
        count = getattr(step[0], "num_parallel_calls", None)
        if count is not None:
            if number not in self._threads:
                self._threads[number] = ParallelMap(num_threads(count))
            yield from self._threads[number].run(partial(self._apply, step), entries, GroupEnd)
            return
        for entry in entries:
            yield entry if isinstance(entry, GroupEnd) else self._apply(step, entry)

    def _apply(self, step: _Step, entry: Entry) -> Entry:
        each, numbering, make_rng, is_batch = step
        element, items, numbers = entry
        if isinstance(each, Enumerate):
            number, *rest = numbers or (each.start,)
            return (np.asarray(number, np.int64), element), items, rest
        num_wraps = each.num_wraps
        try:
            if num_wraps:
                element = _wrapped(element, num_wraps)
            element = MapScope(make_rng, items, is_batch).run(each.fn, element)
            if pytorch.is_loaded():
                element = nests.map_nest(_as_array, element)
            if num_wraps:
                element = _unwrapped(element, num_wraps)
        except Exception as error:
            self._name_example(error, each, numbering, items)
            raise
        return element, items, numbers

    def _generator(
        self, map_number: int, each: Any, numbering: Numbering, item: Any
    ) -> np.random.Generator:
        number, repetitions = numbering(item)
        return self._stream().generator(each.seed, map_number, number, repetitions)

    def _name_example(
        self, error: Exception, each: Map, numbering: Numbering, items: Sequence[Any] | Block
    ) -> None:
        """Add to the error which example the function was given."""
        if not len(items):
            which = "a slice of a batch without examples"
        else:
            number, _ = numbering(items[0])
            which = f"example {number}"
            if self._level:
                which = f"the slice of a batch that begins with {which}"
        note = f"It was raised by {each!r} for {which} of its data set."
        vars(error).setdefault("__notes__", []).append(note)  # as add_note, from Python 3.11 on

    def close(self) -> None:
        """End the threads."""
        for each in self._threads.values():
            each.close()


def _as_array(leaf: Any) -> Any:
    """Return a tensor, as transformations of images give, as an array."""
    return pytorch.host_array(leaf) if pytorch.is_tensor(leaf) else leaf


def _wrapped(element: Any, num_wraps: int) -> Any:
    """Return the batch of one element, for the map of batches that were taken apart again."""
    index = (None,) * num_wraps
    return nests.map_nest(lambda leaf: np.asarray(leaf)[index], element)


def _unwrapped(element: Any, num_wraps: int) -> Any:
    def only(leaf: Any) -> Any:
        shape = np.shape(leaf)[:num_wraps]
        if shape != (1,) * num_wraps:
            raise DataError(
                f"A map of batches before unbatch must keep their length, but made the shape "
                f"{np.shape(leaf)} of a batch of 1."
            )
        return leaf[(0,) * num_wraps]

    return nests.map_nest(only, element)
