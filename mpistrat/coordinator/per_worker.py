"""Per-worker datasets: each worker creates its own dataset and its own iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from mpistrat import context
from mpistrat.coordinator.closures import FunctionName, Travels, find_function
from mpistrat.errors import ClosureInputError, ContextError, OutOfRangeError
from mpistrat.parameter_server.server_job import job_of
from mpistrat.values import localize


class PerWorkerValues(Travels):
    """Stands for one value per worker. A closure that gets it sees its worker's value.

    The values are the iterators of a per-worker dataset. The chief itself cannot read elements.

    Examples
    --------
    >>> ms.coordinator.PerWorkerValues(("iterator", 0, 0, ("module", "make", "")))
    <PerWorkerValues of module.make>
    """

    def __init__(self, token: tuple[Any, ...]) -> None:
        self._given = token

    def _token(self) -> tuple[Any, ...]:
        return self._given

    def __iter__(self) -> PerWorkerValues:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "The chief has no elements of a per-worker dataset. Pass the iterator to a closure, "
            "coordinator.schedule(fn, args=(iterator,)), and call next(iterator) there."
        )

    def get_next(self) -> NoReturn:
        """Raise `NotImplementedError`, because only closures can read elements. Local."""
        next(self)

    def __repr__(self) -> str:
        return f"<PerWorkerValues of {'.'.join(self._given[3][:2])}>"


class PerWorkerDataset:
    """Dataset of `create_per_worker_dataset`. Each ``iter()`` starts again on every worker."""

    def __init__(self, number: int, name: FunctionName) -> None:
        self._number = number
        self._name = name
        self._num_iterators = 0

    def __iter__(self) -> PerWorkerValues:
        self._num_iterators += 1
        name = tuple(self._name)
        return PerWorkerValues(("iterator", self._number, self._num_iterators, name))

    def __repr__(self) -> str:
        return f"<PerWorkerDataset of {self._name.module}.{self._name.path}>"


class WorkerIterator(Travels):
    """Iterator of one worker, which closures get."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        return localize(next(self._elements))

    def get_next(self) -> Any:
        """Return the next element, or raise `OutOfRangeError`."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The iterator of this worker has no further element.") from None

    def _token(self) -> NoReturn:
        raise TypeError("An iterator of a worker cannot leave it. Return elements of it.")


class WorkerData:
    """Datasets and iterators of one worker, created when the first closure asks for them."""

    def __init__(self) -> None:
        self._datasets: dict[int, Any] = {}
        self._iterators: dict[tuple[int, int], WorkerIterator] = {}

    def iterator(self, dataset: int, number: int, name: tuple[str, str, str]) -> WorkerIterator:
        """Return an iterator by its numbers and the name of the function of its dataset."""
        found = self._iterators.get((dataset, number))
        if found is None:
            try:
                if dataset not in self._datasets:
                    make: Callable[[], Any] = find_function("\0".join(name))
                    self._datasets[dataset] = make()
                found = WorkerIterator(iter(self._datasets[dataset]))
            except Exception as error:
                raise ClosureInputError(
                    f"The function {name[0]}.{name[1]} of a per-worker dataset has failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._iterators[dataset, number] = found
        return found


def experimental_get_current_worker_index() -> int:
    """Return the number of this worker, from 0. Local.

    Call it in closures, or in the functions of per-worker datasets.

    Returns
    -------
    int
        Index of this worker among the workers of the job.

    Raises
    ------
    ContextError
        If it is called anywhere else, for example on the chief.

    Examples
    --------
    >>> servers = ms.ParameterServerStrategy()
    >>> if servers.cluster_resolver.task_type == "chief":
    ...     index = ms.coordinator.experimental_get_current_worker_index
    ...     print(ms.coordinator.ClusterCoordinator(servers).schedule(index).fetch())
    ...     servers.close()
    ... else:
    ...     servers.serve()
    0
    """
    frame = context.current()
    is_remote = frame is not None and context.is_remote(frame.strategy)
    job = job_of(frame.strategy) if frame is not None and is_remote else None
    if job is None or not job.closure_depth:
        raise ContextError(
            "There is a worker index only inside of closures, which ClusterCoordinator.schedule "
            "runs on workers, and inside of functions of per-worker datasets."
        )
    return job.workers.index(job.group.rank)
