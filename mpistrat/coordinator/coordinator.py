"""ClusterCoordinator: the chief schedules closures on workers and gets remote values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from mpistrat import context, nests
from mpistrat.coordinator.closures import Closure, Travels, name_of_function
from mpistrat.coordinator.dispatcher import Dispatcher
from mpistrat.coordinator.per_worker import PerWorkerDataset
from mpistrat.coordinator.serving import dispatcher_of
from mpistrat.errors import ContextError, MpistratError
from mpistrat.parameter_server.server_job import job_of
from mpistrat.parameter_server.server_strategy import ParameterServerStrategy
from mpistrat.variables import Variable


class RemoteValue(Travels):
    """Result of a closure, which may not have run yet. `ClusterCoordinator.schedule` returns it.

    Parameters
    ----------
    dispatcher : Dispatcher
        The dispatcher of the chief, which runs the closure.
    closure : Closure
        The closure whose result this is.

    Examples
    --------
    >>> import math
    >>> servers = ms.ParameterServerStrategy()
    >>> if servers.cluster_resolver.task_type == "chief":
    ...     value = ms.coordinator.ClusterCoordinator(servers).schedule(math.sqrt, (16.0,))
    ...     print(value.fetch(), value.get())
    ...     servers.close()
    ... else:
    ...     servers.serve()
    4.0 4.0
    """

    def __init__(self, dispatcher: Dispatcher, closure: Closure) -> None:
        self._dispatcher = dispatcher
        self._closure = closure
        self._value: Any = None
        self._is_read = False

    def fetch(self) -> Any:
        """Wait for the closure, and return its result. Local: on the chief.

        Returns
        -------
        object
            The value that the closure has returned, with NumPy arrays for all arrays. Each call
            returns the same object.

        Raises
        ------
        Exception
            The error that the closure has raised.
        CancelledError
            If the closure was not run.
        """
        if not self._is_read:
            self._dispatcher.wait_for(self._closure)
            value = self._dispatcher.result_of(self._closure)
            self._value = _as_value(value)
            self._is_read = True
        return self._value

    def _fetch_or_error(self) -> Any:
        """Return the result, or the error that the closure has raised."""
        try:
            return self.fetch()
        except Exception as error:
            return error.with_traceback(None)

    def get(self) -> Any:
        """Wait for the closure, and return its result, like `fetch`. Local: on the chief.

        Returns
        -------
        object
            The value that `fetch` returns.
        """
        return self.fetch()

    def _token(self) -> NoReturn:
        raise ValueError(
            "A RemoteValue cannot be an argument of a closure, which may run before it is there. "
            "Pass remote_value.fetch()."
        )

    def __repr__(self) -> str:
        outcome = self._closure.outcome
        state = "waiting" if outcome is None else "done"
        if isinstance(outcome, MpistratError):
            state = "cancelled"
        return f"<RemoteValue of {self._closure!r}, {state}>"


def _as_value(value: Any) -> Any:
    if isinstance(value, Variable):
        return np.asarray(value)
    return value


class ClusterCoordinator:
    """Schedules closures on the workers of a `ParameterServerStrategy`, from the chief.

    Each strategy has one coordinator: a second call returns the same object. Creating it is
    **Collective**: only the chief creates it, while all other ranks call
    `ParameterServerStrategy.serve`.

    A closure is the call of a function. Define the function at module level, because the workers
    find it by its name. Closures start in the order in which they were scheduled, each on the next
    free worker. If the job survives the loss of a worker, its closures run again on another one.
    So closures run *at least once*, and a closure that runs again repeats its writes.

    The next `schedule`, `done` or `join` raises the first error of a closure, once. Closures that
    are still waiting are then cancelled, and running ones finish.

    Parameters
    ----------
    strategy : ParameterServerStrategy
        The strategy whose workers run the closures.

    Raises
    ------
    ValueError
        If `strategy` is not a `ParameterServerStrategy`.
    ContextError
        If it is created on a rank that is not the chief, or inside a closure.

    Examples
    --------
    >>> import math
    >>> servers = ms.ParameterServerStrategy()
    >>> if servers.cluster_resolver.task_type == "chief":
    ...     coordinator = ms.coordinator.ClusterCoordinator(servers)
    ...     values = {n: coordinator.schedule(math.factorial, (n,)) for n in (3, 4)}
    ...     coordinator.join()
    ...     print(coordinator.done(), coordinator.fetch(values))
    ...     servers.close()
    ... else:
    ...     servers.serve()
    True {3: 6, 4: 24}
    """

    _dispatcher: Dispatcher
    _strategy: ParameterServerStrategy
    _dataset_numbers: itertools.count[int]

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the coordinator of `strategy`, and create it if there is none yet."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                f"ClusterCoordinator takes a ParameterServerStrategy, not {strategy!r}."
            )
        job = job_of(strategy)
        if job.group.rank or job.closure_depth:
            raise ContextError(
                f"A ClusterCoordinator is for the chief, and this is {strategy!r}"
                f"{' in a closure' if job.closure_depth else ''}. Call strategy.serve() on "
                "the other ranks."
            )
        # Only one per strategy, because two would take each other's messages.
        known = job.coordinator
        if known is None:
            known = object.__new__(cls)
            known._strategy = strategy
            known._dispatcher = dispatcher_of(job)
            known._dataset_numbers = itertools.count()
            job.coordinator = known
        found: ClusterCoordinator = known
        return found

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers run the closures. Local."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedule ``fn(*args, **kwargs)`` on a worker, and return at once. Local: on the chief.

        It blocks only while 262,144 closures are waiting. In a job with a single rank, `fn` runs
        before `schedule` returns.

        Parameters
        ----------
        fn : callable
            The function to call, defined at module level.
        args : list or tuple
            Positional arguments. They are pickled before `schedule` returns, so later changes have
            no effect. In place of a variable, an optimizer or the iterator of a per-worker
            dataset, the function gets the worker's own.
        kwargs : mapping, optional
            Keyword arguments, which are sent in the same way. Default: none.

        Returns
        -------
        RemoteValue
            The future result. Its `fetch` waits for the closure.

        Raises
        ------
        TypeError
            If workers cannot find `fn` by its name, or an argument cannot be pickled.
        ValueError
            If an argument is a `RemoteValue`, `args` is not a list or tuple, or `kwargs` is not a
            mapping.
        UnavailableError
            If a server, or every worker, is lost.
        ContextError
            If it is called inside a closure.
        Exception
            The error of a closure that has failed before.
        """
        dispatcher = self._ready("schedule")
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"schedule: args must be a list or tuple of the arguments, not {args!r}."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ValueError(
                f"schedule: kwargs must be a dict of the keyword arguments, not {kwargs!r}."
            )
        return RemoteValue(dispatcher, dispatcher.schedule(fn, args, kwargs or {}))

    def map(self, fn: Callable[..., Any], items: Iterable[Any], errors: str = "raise") -> list[Any]:
        """Call ``fn(item)`` on workers for each item, and return the results. Local.

        Parameters
        ----------
        fn : callable
            The function to call, defined at module level, with one argument.
        items : iterable
            The arguments, one per call. They are sent like the arguments of `schedule`.
        errors : str
            ``"raise"`` (default) raises the first error of a call, and cancels the closures that
            are waiting. ``"return"`` cancels nothing, and returns an exception in place of each
            missing result: the error of the call, `WorkerLostError` if two workers have died while
            they ran it, `CancelledError` if it could not run, for example because every worker is
            lost, or the error of an item or a result that cannot be pickled.

        Returns
        -------
        list
            The results, in the order of the items.

        Raises
        ------
        ValueError
            If `errors` is neither ``"raise"`` nor ``"return"``.
        TypeError
            If workers cannot find `fn` by its name; with ``"raise"`` also if an item cannot be
            pickled.
        UnavailableError
            If a server, or every worker, was lost before; with ``"raise"`` also if it is lost
            during the call.
        Exception
            The error of a closure that has failed before; with ``"raise"`` also the first error of
            a call.

        Examples
        --------
        >>> import math
        >>> servers = ms.ParameterServerStrategy()
        >>> if servers.cluster_resolver.task_type == "chief":
        ...     coordinator = ms.coordinator.ClusterCoordinator(servers)
        ...     roots = coordinator.map(math.sqrt, [4.0, -1.0, 9.0], errors="return")
        ...     print(roots[0], type(roots[1]).__name__, roots[2])
        ...     servers.close()
        ... else:
        ...     servers.serve()
        2.0 ValueError 3.0
        """
        dispatcher = self._ready("map")
        if errors not in ("raise", "return"):
            raise ValueError(f'map: errors must be "raise" or "return", not {errors!r}.')
        dispatcher.raise_failure()
        if errors == "return":
            closures = [dispatcher.schedule_independent(fn, item) for item in items]
            return [RemoteValue(dispatcher, each)._fetch_or_error() for each in closures]
        values = [self.schedule(fn, (item,)) for item in items]
        for value in values:
            dispatcher.wait_for(value._closure)
        dispatcher.raise_failure()  # the first failure, which has cancelled the other closures
        return [value.fetch() for value in values]

    def join(self) -> None:
        """Wait until every closure is done, and raise the first new error. Local."""
        self._ready("join").join()

    def done(self) -> bool:
        """Return whether every closure is done, or raise the first new error. Local.

        Returns
        -------
        bool
            Whether no closure is waiting or running.
        """
        dispatcher = self._ready("done")
        dispatcher.pump()
        dispatcher.raise_failure()
        return dispatcher.is_done()

    def fetch(self, val: Any) -> Any:
        """Wait for each `RemoteValue` in a nest, and return the nest with their results. Local.

        Parameters
        ----------
        val : nest
            A `RemoteValue`, or a nest of them. Other leaves are returned as they are.

        Returns
        -------
        nest
            The same structure, with a result in place of each `RemoteValue`.

        Raises
        ------
        UnavailableError
            If a server or all workers are lost; `RemoteValue.fetch` still returns what has come.
        """
        self._ready("fetch").check_available()
        return nests.map_nest(_fetched, val)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """Return a dataset that each worker creates for itself, when it first needs it. Local.

        Parameters
        ----------
        dataset_fn : callable
            A function without arguments, defined at module level. It returns a
            `mpistrat.data.Dataset`, a distributed dataset, or any iterable. The elements are not
            divided: every worker gets all of them.

        Returns
        -------
        iterable of PerWorkerValues
            Call ``iter()`` on it and pass the iterator to closures, which call ``next()`` or
            ``get_next()``. Each worker has its own iterator. At its end, closures fail with
            `OutOfRangeError`. If `dataset_fn` fails, they fail with `ClosureInputError`, which has
            the error as its cause.
        """
        self._ready("create_per_worker_dataset")
        name = name_of_function("create_per_worker_dataset", dataset_fn)
        return PerWorkerDataset(next(self._dataset_numbers), name)

    def _ready(self, what: str) -> Dispatcher:
        context.collectives_of(self._strategy).channel.check_open()
        job = job_of(self._strategy)
        if job.closure_depth:
            raise ContextError(f"{what} was called inside of a closure. Call it on the chief.")
        return self._dispatcher

    def __reduce__(self) -> str:
        raise TypeError("A ClusterCoordinator is for the chief, and cannot be sent to a worker.")

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self._strategy!r}>"


def _fetched(leaf: Any) -> Any:
    return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf
