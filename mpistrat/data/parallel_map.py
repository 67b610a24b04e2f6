"""Parallel map: threads that call a function on elements, whose order is kept."""

from __future__ import annotations

import functools
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from mpistrat.arrays import Device
from mpistrat.settings import environment
from mpistrat.system.cpu import num_cores
from mpistrat.system.threads import clean_up

AUTOTUNE = -1
"""Stands for this rank's share of the cores."""

_RESULTS_PER_THREAD = 2
"""So many results wait at most, those being made among them, or memory would fill with them."""


_RANKS_OF_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "PALS_LOCAL_SIZE",
)
"""Variables of launchers for the number of ranks that share this node."""


def cores_of_rank() -> int:
    """Return this rank's share of the cores that it may use, at least one."""
    cores = num_cores()
    if cores == os.cpu_count():  # else the launcher has bound this rank to its own cores
        cores //= _ranks_of_node()
    return max(cores, 1)


def _ranks_of_node() -> int:
    variables = environment()
    for name in _RANKS_OF_NODE:
        digits = re.match(r"\d+", variables.get(name, ""))  # of Slurm's "4(x2),3" the first
        if digits:
            return max(int(digits[0]), 1)
    return 1


def num_threads(num_parallel_calls: int) -> int:
    """Return how many threads `num_parallel_calls` stands for on this rank."""
    return cores_of_rank() if num_parallel_calls == AUTOTUNE else num_parallel_calls


class ParallelMap:
    """Threads that map the elements of one iteration after the other."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(
        self, fn: Callable[[Any], Any], elements: Iterable[Any], passes: type
    ) -> Generator[Any, None, None]:
        """Yield `fn` of each element in order; those of the type `passes` as they are."""
        # The elements are taken in the thread that takes the results, so that their reader needs
        # no lock. An error of one cancels those after it.
        waiting: deque[_Task] = deque()
        most = _RESULTS_PER_THREAD * self._count
        source = iter(elements)
        is_at_end = False
        try:
            while True:
                # Several at a time, or this thread would take the processor from the others after
                # each result.
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
            clean_up(functools.partial(_call_each, [task.wait for task in waiting]))

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
        clean_up(functools.partial(_call_each, [thread.join for thread in threads]))


_END = object()


def _call_each(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()


class _Task:
    """One call, whose lock is free once it has ended."""

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
        del task  # or its element and its result would stay in memory
