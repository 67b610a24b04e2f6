"""RemoteValue: the result of a closure, which may not be there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat.coordinator.closures import Closure, Travels
from mpistrat.errors import MpistratError
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.coordinator.dispatcher import Dispatcher

__all__ = ["RemoteValue"]


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
