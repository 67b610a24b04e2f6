"""The contexts of a thread: one stack, and the only current state of the package.

The bottom of every stack is the default replica context. `Strategy.scope`, `Strategy.run`,
`merge_call` and `update` each push one frame, and pop it on every way out.
"""

from __future__ import annotations

import enum
import threading
from contextlib import AbstractContextManager
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


@dataclass(slots=True)
class Frame:
    """One entry of the stack. Never changed; not frozen, because that takes time in every run."""

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


class _Entered:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        frames = _stack.frames
        self._depth = len(frames)
        frames.append(self._frame)

    def __exit__(self, *exc_info: object) -> None:
        # A scope that was entered by hand inside and never left goes with this one.
        del _stack.frames[self._depth :]


def entered(frame: Frame) -> AbstractContextManager[None]:
    """Make `frame` the innermost one within the ``with`` block. Local."""
    return _Entered(frame)


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
