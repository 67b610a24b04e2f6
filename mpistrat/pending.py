"""The handle of a reduction that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PendingReduction"]


class PendingReduction:
    """A reduction that `ReplicaContext.start_all_reduce` has begun."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self._end: Callable[[], Any] | None = end
        self._result: Any = None

    def wait(self) -> Any:
        """Return the result, once the other ranks have brought their part; the same again later.

        Local: the ranks need not call it together, nor in one order. It has no time limit, because
        every rank has begun the reduction.
        """
        if self._end is not None:
            self._result, self._end = self._end(), None
        return self._result
