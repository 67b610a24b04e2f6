"""Maps: functions that are called on elements, in order, in one thread or several."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests, pytorch
from mpistrat.arrays import Device
from mpistrat.data.order import (
    Block,
    SameOrder,
    Source,
    Transformation,
    function_name,
    span_of,
)
from mpistrat.data.random import MapScope, PassKey, PassStream
from mpistrat.data.transformations.batch import Batch, Enumerate
from mpistrat.errors import DataError
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.system.background import clean_up

AUTOTUNE = -1
"""Value of `num_parallel_calls` that means this rank's share of the cores."""


@dataclass(frozen=True, repr=False)
class Map(SameOrder):
    """`fn` of each element, with random numbers from `seed`."""

    fn: Callable[..., Any]
    seed: int = 0
    num_parallel_calls: int | None = None
    """Number of threads; ``None`` means the thread of the iterator."""
    num_wraps: int = 0
    """Number of calls of `unbatch` that have turned this map of batches into a map of elements."""

    def __repr__(self) -> str:
        # The number of threads does not change the elements, so it may differ between ranks.
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Map(fn={function_name(self.fn)}{seed})"


class Numbering:
    """Returns the number of each item in a dataset before shuffling, and its later repetitions.

    Parameters
    ----------
    source : Source
        The source of the pipeline.
    transformations : sequence of Transformation
        All transformations of the pipeline.
    num_before : int
        Number of transformations before the dataset in which examples are numbered.
    """

    # An item is the number of a row, plus the span of the source per repetition. So the item is
    # enough to identify the example, wherever shuffles have put it.

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
            # After a shuffle, leaving out examples does not change the numbers of the others.
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
        """Return the number of an item, and the numbers of the repetitions of the dataset."""
        while isinstance(item, np.ndarray):  # for a batch, use its first example
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


_Step = tuple[Map | Enumerate, Numbering, Callable[[Any], np.random.Generator], bool]
"""A map, the numbers of its examples, a function that creates the random generator of an example,
and whether the map gets batches."""

Entry = tuple[Any, Sequence[Any] | Block, Sequence[int]]
"""An element, its items, and the numbers that `Enumerate` has assigned to it."""


class GroupEnd:
    """Marks the end of a batch in a stream of elements; maps pass it on unchanged."""

    def __init__(self, *content: Any) -> None:
        self.content = content


class Mapper:
    """Applies the maps of elements that were batched `level` times."""

    # Each of `steps` has the number of a map among all maps of the dataset, the map, and the
    # numbers of its examples.

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
        """Yield the elements of `entries` after all maps, and the `GroupEnd` objects unchanged."""
        generators: list[Generator[Any, None, None]] = []
        try:
            for number, step in enumerate(self._steps):
                entries = self._run(number, step, entries)
                generators.append(entries)
            for entry in entries:
                yield entry if isinstance(entry, GroupEnd) else entry[0]
        finally:
            for each in reversed(generators):  # the last one waits for the calls that it has begun
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
        """Add a note to the error that says for which example the function was called."""
        if not len(items):
            which = "a slice of a batch without examples"
        else:
            number, _ = numbering(items[0])
            which = f"example {number}"
            if self._level:
                which = f"the slice of a batch that begins with {which}"
        note = f"It was raised by {each!r} for {which} of its dataset."
        vars(error).setdefault("__notes__", []).append(note)  # as add_note, from Python 3.11 on

    def close(self) -> None:
        """End the threads."""
        for each in self._threads.values():
            each.close()


def _as_array(leaf: Any) -> Any:
    """Return a PyTorch tensor, as from torchvision, as an array; other leaves as they are."""
    return pytorch.host_array(leaf) if pytorch.is_tensor(leaf) else leaf


def _wrapped(element: Any, num_wraps: int) -> Any:
    """Return a batch of one element, for a map of batches that `unbatch` has taken apart."""
    index = (None,) * num_wraps
    return nests.map_nest(lambda leaf: np.asarray(leaf)[index], element)


def _unwrapped(element: Any, num_wraps: int) -> Any:
    def only(leaf: Any) -> Any:
        shape = np.shape(leaf)[:num_wraps]
        if shape != (1,) * num_wraps:
            raise DataError(
                f"A map of batches before unbatch must keep their length, but it returned the "
                f"shape {np.shape(leaf)} for a batch of 1."
            )
        return leaf[(0,) * num_wraps]

    return nests.map_nest(only, element)


def wrapped(transformation: Transformation) -> Transformation:
    """Return a transformation of batches as a transformation of their elements."""
    if not isinstance(transformation, Map):
        return transformation
    return dataclasses.replace(transformation, num_wraps=transformation.num_wraps + 1)


_RESULTS_PER_THREAD = 2
"""Limit of finished and running calls per thread, because results that wait need memory."""


def num_threads(num_parallel_calls: int) -> int:
    """Return the number of threads that `num_parallel_calls` means on this rank."""
    return cores_of_rank() if num_parallel_calls == AUTOTUNE else num_parallel_calls


class ParallelMap:
    """Threads that map the elements of successive iterations."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(
        self, fn: Callable[[Any], Any], elements: Iterable[Any], passes: type
    ) -> Generator[Any, None, None]:
        """Yield `fn` of each element in order; elements of the type `passes` are not changed."""
        # The thread that takes the results also takes the elements, so that their reader needs no
        # lock. An error in one call cancels the calls after it.
        waiting: deque[_Task] = deque()
        most = _RESULTS_PER_THREAD * self._count
        source = iter(elements)
        is_at_end = False
        try:
            while True:
                # Tasks are added several at a time, because this thread would otherwise take the
                # processor from the others after each result.
                is_short = len(waiting) <= self._count
                while is_short and not is_at_end and len(waiting) < most:
                    element = next(source, _END)
                    if element is _END:
                        is_at_end = True
                        break
                    waiting.append(self._begin(fn, element, passes))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.is_cancelled = True
            clean_up(partial(_call_each, [task.wait for task in waiting]))

    def _begin(self, fn: Callable[[Any], Any], element: Any, passes: type) -> _Task:
        task = _Task(fn, element)
        if isinstance(element, passes):
            task.finish(element)
            return task
        if len(self._threads) < self._count:
            thread = threading.Thread(
                target=_work, args=(self._tasks, Device.for_threads()), name="mpistrat-map"
            )
            thread.daemon = True
            thread.start()
            self._threads.append(thread)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the threads."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        clean_up(partial(_call_each, [thread.join for thread in threads]))


_END = object()


def _call_each(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()


class _Task:
    """One call; its lock is released when the call has ended."""

    __slots__ = ("_done", "_element", "_error", "_fn", "_result", "is_cancelled")

    def __init__(self, fn: Callable[[Any], Any], element: Any) -> None:
        self._fn, self._element = fn, element
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_cancelled = False
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        try:
            if not self.is_cancelled:
                self._result = self._fn(self._element)
        except BaseException as error:
            self._error = error
        finally:
            self._element = None
            self._done.release()

    def finish(self, result: Any) -> None:
        self._result = result
        self._done.release()

    def wait(self) -> None:
        with self._done:
            pass

    def result(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result


def _work(tasks: queue.SimpleQueue[_Task | None], begin: Callable[[], object]) -> None:
    begin()
    while (task := tasks.get()) is not None:
        task.run()
        del task  # otherwise its element and its result would stay in memory
