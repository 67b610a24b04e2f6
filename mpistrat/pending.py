"""The handle of a reduction that is under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["PendingReduction"]


class PendingReduction:
    """A reduction that `ReplicaContext.start_all_reduce` has begun.

    To drop it without `wait` is an error: the reduction goes on in memory that the program has
    given up, and what it brings is lost. The next collective of this rank raises it.
    """

    def __init__(self, end: Callable[[], Any], when_dropped: Callable[[], object]) -> None:
        self._end: Callable[[], Any] | None = end
        self._when_dropped = when_dropped
        self._result: Any = None

    def wait(self) -> Any:
        """Return the result, once the other ranks have brought their part; the same again later.

        Local: the ranks need not call it together, nor in one order. It has no time limit, because
        every rank has begun the reduction.
        """
        if self._end is not None:
            # Not after the end: who catches what that raises need not wait again.
            end, self._end = self._end, None
            self._result = end()
        return self._result

    def __del__(self) -> None:
        if self._end is not None and not sys.is_finalizing():
            self._when_dropped()
