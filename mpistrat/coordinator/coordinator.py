"""ClusterCoordinator: schedules closures on workers, from the chief, as remote values."""

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
    """The result of a closure, made by `ClusterCoordinator.schedule`.

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
            What the closure has returned, arrays as NumPy's; the same object each time.

        Raises
        ------
        Exception
            What the closure has raised.
        CancelledError
            If it was not run.
        """
        if not self._is_read:
            self._dispatcher.wait_for(self._closure)
            value = self._dispatcher.result_of(self._closure)
            self._value = _as_value(value)
            self._is_read = True
        return self._value

    def _fetch_or_error(self) -> Any:
        """Return the result, or the error in its place."""
        try:
            return self.fetch()
        except Exception as error:
            return error.with_traceback(None)

    def get(self) -> Any:
        """Return `fetch()`. Local: on the chief."""
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
    """Schedules closures on the workers of a `ParameterServerStrategy`. On the chief.

    There is one for each strategy: a second call returns the same. **Collective** with the
    `ParameterServerStrategy.serve` of all other ranks.

    Closures are calls of functions that are defined at module level, as the workers find them by
    name. They start in the order in which they were scheduled, each on the next worker that is
    free. Where the job survives the loss of a worker, its closures run again: *at least
    once*, so what one has written before may be there twice.

    The first error of a closure is raised once, by the next `schedule`, `done` or `join`. Closures
    that wait then are cancelled, and those that run finish.

    Parameters
    ----------
    strategy : ParameterServerStrategy

    Raises
    ------
    ValueError
        For another strategy.
    ContextError
        On another rank than the chief, or inside a closure.

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
        """Return the coordinator of `strategy`, made where there is none."""
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
        # One per strategy: two would take each other's messages.
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
        """Have a worker call ``fn(*args, **kwargs)``, and return at once. Local: on the chief.

        Waits only while 262,144 closures wait. On one rank alone, `fn` runs here and now.

        Parameters
        ----------
        fn : callable
            Defined at module level.
        args, kwargs : sequence, mapping
            Travel as pickle, copied at once. Variables, optimizers and iterators of per-worker
            data sets arrive as those of the worker.

        Returns
        -------
        RemoteValue

        Raises
        ------
        TypeError
            If `fn` has no name by which workers find it, or an argument cannot be pickled.
        ValueError
            If an argument is a `RemoteValue`, or `args` no sequence.
        UnavailableError
            If a server, or every worker, is lost.
        ContextError
            Inside a closure.
        Exception
            The error of a closure before.
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
        """Have workers call ``fn(item)`` for each item, and return the results. Local.

        Parameters
        ----------
        fn : callable
            Defined at module level. It is called with one argument.
        items : iterable
            The arguments. They travel like those of `schedule`.
        errors : str
            ``"raise"`` raises the first error of a call, and cancels the closures that wait.
            ``"return"`` returns every result, and an exception in the place of each that is
            missing: the error of the call, `WorkerLostError` if two workers have died while they
            ran it, `CancelledError` if it could not run, for example because every worker is lost,
            or the error of an item or a result that cannot be pickled. An error cancels no call.

        Returns
        -------
        list
            The results in the order of the items.

        Raises
        ------
        ValueError
            For another word in `errors`.
        TypeError
            If `fn` has no name by which workers find it; with ``"raise"`` also if an item cannot be
            pickled.
        UnavailableError
            If a server, or every worker, was lost before; with ``"raise"`` also if it is lost now.
        Exception
            The error of a closure before; with ``"raise"`` also the first one of a call.

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
        dispatcher.raise_failure()  # what has failed first, which has cancelled the others
        return [value.fetch() for value in values]

    def join(self) -> None:
        """Wait until every closure is done, and raise the first error since the last one. Local."""
        self._ready("join").join()

    def done(self) -> bool:
        """Return whether every closure is done; raise the first error since the last one. Local."""
        dispatcher = self._ready("done")
        dispatcher.pump()
        dispatcher.raise_failure()
        return dispatcher.is_done()

    def fetch(self, val: Any) -> Any:
        """Return a nest with the result of each `RemoteValue` in it, by `fetch`. Local."""
        self._ready("fetch").check_available()
        return nests.map_nest(_fetched, val)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """Return a data set that each worker makes by itself, when it first needs it. Local.

        Parameters
        ----------
        dataset_fn : callable
            Defined at module level, without arguments. Returns a `mpistrat.data.Dataset`, a
            distributed one, or any iterable. Every worker gets all of it.

        Returns
        -------
        iterable of PerWorkerValues
            ``iter()`` of it is passed to closures, which call ``next()`` or ``get_next()``; each
            worker walks its own. In closures its end is an `OutOfRangeError`; an error of
            `dataset_fn` is the cause of a `ClosureInputError`.
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
