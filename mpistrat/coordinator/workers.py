"""Workers as the chief sees them: the closures that each one has, and how many it may get."""

from __future__ import annotations

from collections import deque

from mpistrat.coordinator.closures import Closure

_IN_FLIGHT = 2
"""Closures at a worker, so that it has the next one when it has done one."""

_SHORT_NS = 50_000_000
"""How long closures may take for a second one to be sent along. It would wait behind a long one
while another worker has nothing to do."""


class Worker:
    """What the chief knows of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.closures: deque[Closure] = deque()
        """Those that it has, in the order in which it runs them."""
        self.num_sent = 0
        self.mean_ns = float(_SHORT_NS)
        """How long its closures take, at least about."""
        self.is_reported = False
        """Whether the closure that it runs was reported for taking long."""

    def has_room(self, closure: Closure) -> bool:
        """Return whether it is to get this closure."""
        if closure.killed or (self.closures and self.closures[0].killed):
            room = 1  # so that no other closure is lost with it, or taken for the cause
        else:
            room = _IN_FLIGHT if self.mean_ns < _SHORT_NS else 1
        return len(self.closures) < room
