"""The contexts of a thread: one stack, and the only current state of the package.

The bottom of every stack is the default replica context. `Strategy.scope`, `Strategy.run`,
`merge_call` and `update` each push one frame, and pop it on every way out.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat.errors import ContextError

if TYPE_CHECKING:
    from mpistrat.collectives import Collectives

__all__ = ["Frame", "Kind", "Strategy", "current", "entered", "mode_for", "set_base"]

Strategy = Any
"""A `mpistrat.Strategy`, which a higher layer defines."""


class Kind(enum.Enum):
    """Which context a frame stands for."""

    CROSS_REPLICA = "cross-replica context"
    REPLICA = "replica context"
    UPDATE = "update context"


@dataclass(frozen=True)
class Frame:
    """One entry of the stack."""

    kind: Kind
    strategy: Strategy
    replica_context: Any = None
    """The `ReplicaContext`, in a replica context."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of the frame's strategy."""
        collectives: Collectives = self.strategy.extended.collectives
        return collectives


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.base: Frame | None = None


_stack = _Stack()


def current() -> Frame | None:
    """Return the innermost frame of this thread, ``None`` in the default context. Local."""
    return _stack.frames[-1] if _stack.frames else _stack.base


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Make `frame` the innermost one within the ``with`` block. Local."""
    _stack.frames.append(frame)
    before = len(_stack.frames)
    try:
        yield
    finally:
        # A scope that was entered by hand inside and never left goes with this one.
        del _stack.frames[before - 1 :]


def set_base(frame: Frame | None) -> None:
    """Make `frame` the bottom of this thread's stack; ``None`` is the default context. Local.

    Raises
    ------
    ContextError
        Inside a scope.
    """
    if _stack.frames:
        raise ContextError(
            "experimental_set_strategy must be called outside every strategy.scope(), but this "
            f"thread is in the {_stack.frames[-1].kind.value} of {_stack.frames[-1].strategy!r}."
        )
    _stack.base = frame


def mode_for(strategy: Strategy, what: str) -> Kind:
    """Return the context in which `what` of `strategy` is used here. Local.

    Outside every scope it is the cross-replica context of that strategy.

    Raises
    ------
    ContextError
        In a context of another strategy.
    """
    frame = current()
    if frame is None:
        return Kind.CROSS_REPLICA
    if frame.strategy is not strategy:
        raise ContextError(
            f"{what} belongs to {strategy!r}, but this is the {frame.kind.value} of "
            f"{frame.strategy!r}. Different strategies cannot be mixed: use it inside "
            "the scope of its own."
        )
    return frame.kind
