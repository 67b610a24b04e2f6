"""Context stack of strategies, and functions that run in update context."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat import nests
from mpistrat.errors import ContextError
from mpistrat.system.callsite import failure_site
from mpistrat.tracing.spans import span
from mpistrat.values import PerReplica, mirror, unwrap_mirrored

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

__all__ = ["Frame", "Kind", "call_in_update_context", "current", "entered", "mode_for", "set_base"]

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
        collectives: Collectives = self.strategy.extended._collectives
        return collectives


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.base: Frame | None = None


_stack = _Stack()


def current() -> Frame | None:
    """Return the innermost frame of this thread, ``None`` in the default context."""
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
    """Make `frame` the innermost one within the ``with`` block."""
    return _Entered(frame)


def set_base(frame: Frame | None) -> None:
    """Make `frame` the bottom of this thread's stack; ``None`` is the default context."""
    if _stack.frames:
        raise ContextError(
            "experimental_set_strategy must be called outside every strategy.scope(), but this "
            f"thread is in the {_stack.frames[-1].kind.value} of {_stack.frames[-1].strategy!r}."
        )
    _stack.base = frame


def mode_for(strategy: Strategy, what: str) -> Kind:
    """Return the context in which `what` of `strategy` is used here."""
    frame = current()
    if frame is None:  # outside every scope everything is in cross-replica context
        return Kind.CROSS_REPLICA
    if frame.strategy is not strategy:
        raise ContextError(
            f"{what} belongs to {strategy!r}, but this is the {frame.kind.value} of "
            f"{frame.strategy!r}. Different strategies cannot be mixed: use it inside "
            "its own scope."
        )
    return frame.kind


def call_in_update_context(
    strategy: Any,
    what: str,
    fn: Callable[..., Any],
    first: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    group: bool,
) -> Any:
    """Call ``fn(*first, *args, **kwargs)`` in the update context of `strategy`."""
    # `what` names the call in messages. `first` is passed as it is; `Mirrored` values in `args` and
    # `kwargs` become this rank's component.
    channel = strategy.extended._collectives.channel
    channel.ledger.updates += 1
    try:
        return _call(strategy, what, fn, first, args, dict(kwargs or {}), group)
    except BaseException as error:
        channel.note_failure(error, failure_site(error.__traceback__))
        raise


def _call(
    strategy: Any,
    what: str,
    fn: Callable[..., Any],
    first: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    group: bool,
) -> Any:
    if not isinstance(args, list | tuple):
        raise ValueError(f"{what}: args must be a list or tuple, not {args!r}.")
    leaves, _ = nests.flatten((list(args), kwargs))
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise ValueError(
            f"{what}: an argument is a PerReplica, so the replicas would drift apart. Reduce it "
            "first, with reduce_to(op, value, destinations)."
        )
    local_args = [nests.map_nest(unwrap_mirrored, each) for each in args]
    local_kwargs = {name: nests.map_nest(unwrap_mirrored, each) for name, each in kwargs.items()}
    with entered(Frame(Kind.UPDATE, strategy)), span("update", what):
        result = fn(*first, *local_args, **local_kwargs)
    if not group:
        return (result,)
    return mirror(result) if strategy.extended._distributes_variables else result
