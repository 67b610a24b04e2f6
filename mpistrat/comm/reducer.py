"""What a way of reducing can do. Each message of a call gets the one that `choose` picks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mpistrat.comm.message import Message
from mpistrat.options import ReduceOp

__all__ = ["Reducer"]


class Reducer(Protocol):
    """Reduces messages over the ranks of one transport.

    Every method is **Collective**, with messages of equal dtype and lengths on all ranks. MEAN
    divides by the number of ranks.
    """

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Write the reductions to the targets of `message`, on every rank."""

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin `all_reduce`. The function returned ends it, is local, and is called once."""

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Write the reductions to the targets on `root`. Elsewhere anything may be in them."""
