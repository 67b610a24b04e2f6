"""Context stack of strategies, and functions that run in update context."""

from __future__ import annotations

import enum
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mpistrat import nests
from mpistrat.errors import ContextError
from mpistrat.system import units
from mpistrat.system.callsite import failure_site
from mpistrat.tracing.spans import span
from mpistrat.user_warnings import warn_once
from mpistrat.values import PerReplica, mirror, unwrap_mirrored

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives
    from mpistrat.layout import Layout

S = TypeVar("S")

Strategy = Any
"""A `mpistrat.Strategy`. A higher layer defines the class."""


class Kind(enum.Enum):
    """The kind of context that a frame represents."""

    CROSS_REPLICA = "cross-replica context"
    REPLICA = "replica context"
    UPDATE = "update context"


@dataclass(slots=True)
class Frame:
    """One entry of the stack. Never changed; not frozen, because that would slow down each run."""

    kind: Kind
    strategy: Strategy
    replica_context: Any = None
    """The `ReplicaContext`; only in a replica context."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of the frame's strategy."""
        return collectives_of(self.strategy)


# Per thread, because the replicas of a rank run in separate threads, each in its own context.
class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.base: Frame | None = None


_stack = _Stack()


def collectives_of(strategy: Strategy) -> Collectives:
    """Return the collectives of the ranks of `strategy`; in `run`, of the running replica."""
    collectives: Collectives = strategy.extended._collectives
    return collectives


def replicas_of(strategy: Strategy) -> Collectives:
    """Return the collectives among replicas of `strategy`, each of which may have several ranks."""
    replicas: Collectives = strategy.extended._replicas
    return replicas


def shards_of(strategy: Strategy) -> Collectives:
    """Return the collectives of the ranks of this rank's replica of `strategy`."""
    shards: Collectives = strategy.extended._shards
    return shards


def replica_set_of(strategy: Strategy) -> Any:
    """Return the `Replicas` of this rank of `strategy`. A higher layer defines the class."""
    return strategy.extended._replica_set


def layout_of(strategy: Strategy) -> Layout:
    """Return the layout of the replicas of `strategy` on ranks, with the one that runs here."""
    layout: Layout = strategy.extended._layout
    return layout


def is_default(strategy: Strategy) -> bool:
    """Return whether `strategy` is the default strategy, outside every scope."""
    return bool(strategy.extended._is_default)


def is_remote(strategy: Strategy) -> bool:
    """Return whether other ranks hold the variables of `strategy` and are asked by messages."""
    return bool(strategy.extended._is_remote)


def distributes_variables(strategy: Strategy) -> bool:
    """Return whether variables created in the scope of `strategy` belong to it."""
    return bool(strategy.extended._distributes_variables)


def current() -> Frame | None:
    """Return the innermost frame of this thread, ``None`` in the default context."""
    return _stack.frames[-1] if _stack.frames else _stack.base


_opened: list[weakref.ref[Any]] = []
"""MPI strategies that this process has created and not closed, including dropped ones."""


def note_open(strategy: Strategy) -> None:
    """Let `open_strategies` return `strategy` until it is closed or dropped."""
    if _is_of_several(strategy):
        _opened.append(weakref.ref(strategy))


def note_closed(strategy: Strategy) -> None:
    """Forget an open `strategy`."""
    _opened[:] = [each for each in _opened if each() is not strategy]


def open_strategies() -> list[Strategy]:
    """Return the open strategies of this process that have several ranks or replicas."""
    alive = (opened() for opened in _opened)
    return [each for each in alive if each is not None and _is_open(each)]


def only_open_strategy() -> Strategy | None:
    """Return the open strategy with several ranks or replicas, if it is the only one.

    All ranks of a program get the same answer. So a strategy that was dropped without `close`
    counts as open, because Python may free it at different times on different ranks.
    """
    opened = [opened() for opened in _opened]
    found = [each for each in opened if each is None or _is_open(each)]
    return found[0] if len(found) == 1 else None


def _is_of_several(strategy: Strategy) -> bool:
    return bool(strategy.size > 1 or strategy.num_replicas_in_sync > 1)


def _is_open(strategy: Strategy) -> bool:
    return bool(
        _is_of_several(strategy)
        and not is_remote(strategy)
        and not collectives_of(strategy).is_closed
        and collectives_of(strategy).channel.closed is None
    )


_makers: list[Callable[[], Strategy]] = []


def register_world(make: Callable[[], Strategy]) -> None:
    """Let `strategy_of_world` create its strategy with `make`."""
    _makers.append(make)


_of_world: list[Strategy] = []


def strategy_of_world() -> Strategy:
    """Return an internal strategy over all ranks of the job. The first call is **Collective**.

    With it, ranks compare data that do not belong to a strategy of the program.
    """
    # The program's strategies may share its channel. After a disagreement in one of their calls,
    # all ranks need a new one.
    if _of_world and collectives_of(_of_world[0]).channel.closed is not None:
        _of_world.clear()
    if not _of_world:
        _of_world.append(_makers[0]())
        # The program did not open it, so `only_open_strategy` must not count it.
        note_closed(_of_world[0])
    return _of_world[0]


def one_of_several() -> Frame | None:
    """Return the frame of the running replica, also in its merge_fn, if there are several."""
    for frame in reversed(_stack.frames):
        if frame.kind is Kind.REPLICA:
            return frame if frame.strategy.num_replicas_in_sync > 1 else None
    return None


def require_scope_of_several(what: str) -> None:
    """Raise if `what`, created outside every scope, is used inside `run` of several replicas."""
    frame = one_of_several()
    if frame is not None:
        raise ValueError(
            f"{what} was created outside of strategy.scope(), so it belongs to one rank, but it is "
            f"used inside strategy.run of {frame.strategy!r}, where each of "
            f"{frame.strategy.num_replicas_in_sync} replicas would change its own copy. Create it "
            'in the scope: "with strategy.scope():".'
        )


def warn_of_own_write(how: str, name: str) -> None:
    """Warn if one of several replicas writes, by `how`, to a variable of only its rank."""
    frames = _stack.frames
    if not frames or frames[-1].kind is Kind.UPDATE or one_of_several() is None:
        return
    warn_once(
        f"{how} of the variable {name!r} inside strategy.run changes it on this rank only, because "
        "it was created outside of strategy.scope(): the ranks may come to hold different values. "
        "Create it in the scope if all replicas share it; if it is a counter of this rank, ignore "
        "mpistrat.errors.ScopeWarning here."
    )


class _Entered:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        _stack.frames.append(self._frame)

    def __exit__(self, *exc_info: object) -> None:
        frames = _stack.frames
        if frames and frames[-1] is self._frame:
            frames.pop()
        else:
            # Frames above this one were never left, for instance in an abandoned generator.
            _remove_from(self._frame)


def entered(frame: Frame) -> AbstractContextManager[None]:
    """Make `frame` the innermost one within the ``with`` block."""
    return _Entered(frame)


def _remove_from(frame: Frame) -> None:
    """Remove `frame`, and frames above it that were never left, from this thread's stack."""
    frames = _stack.frames
    for position in reversed(range(len(frames))):
        if frames[position] is frame:
            del frames[position:]
            return


class Scope(ContextDecorator, Generic[S]):
    """The scope of a strategy, which a program may enter again, even inside itself."""

    # Its only state is its frame, so that threads may share it.

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._frame = Frame(Kind.CROSS_REPLICA, strategy)

    def __repr__(self) -> str:
        return f"<scope of {self._strategy!r}>"

    def __enter__(self) -> S:
        require_cross_replica(self._strategy, "scope")
        _stack.frames.append(self._frame)
        return self._strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        frames = _stack.frames
        if frames and frames[-1] is self._frame:
            frames.pop()
        elif error is None or isinstance(error, GeneratorExit):
            self._leave_out_of_order(is_closed=error is not None)
        else:  # an exception in the block says more than that an inner scope was never left
            _remove_from(self._frame)

    def _leave_out_of_order(self, is_closed: bool) -> None:
        """Remove only this scope, and raise. `is_closed`: Python is closing its generator."""
        # Scopes that were entered after it stay open: a different generator may be inside them.
        frames = _stack.frames
        positions = [i for i, frame in enumerate(frames) if frame is self._frame]
        if positions:
            what = f"while the {frames[-1].kind.value} of {frames[-1].strategy!r} is open inside it"
            del frames[positions[-1]]
        elif is_closed:
            return  # it was removed with an outer context
        else:
            what = "in a different thread than it was entered in, or after a context around it"
        raise ContextError(
            f"The scope of {self._strategy!r} was left {what}. Leave scopes in the reverse order "
            "in which they were entered. A generator that yields inside a scope keeps it open "
            "until it ends: enter the scope around the loop instead."
        ) from None


def set_base(frame: Frame | None) -> None:
    """Use `frame` as the bottom of this thread's stack; ``None`` is the default context."""
    if _stack.frames:
        raise ContextError(
            "experimental_set_strategy must be called outside every strategy.scope(), but this "
            f"thread is in the {_stack.frames[-1].kind.value} of {_stack.frames[-1].strategy!r}."
        )
    _stack.base = frame


def mode_for(strategy: Strategy, what: str) -> Kind:
    """Return the context in which `what` of `strategy` is used here."""
    frame = current()
    if frame is None:  # outside every scope, everything is in cross-replica context
        return Kind.CROSS_REPLICA
    if frame.strategy is not strategy:
        raise ContextError(
            f"{what} belongs to {strategy!r}, but this is the {frame.kind.value} of "
            f"{frame.strategy!r}. Different strategies cannot be mixed: use it inside "
            "its own scope."
        )
    return frame.kind


_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(
    kind: str | None = None,
    writes: bool = False,
    of: Callable[[Any], Collectives | None] | None = None,
    sets_attributes: bool = False,
) -> Callable[[_Method], _Method]:
    """Decorate a public collective call, which an elastic job repeats as a unit after a loss.

    Methods of a strategy, and of its extended interface, are checked to be in cross-replica
    context. For others, `of` is called with the first argument and returns the ranks that make the
    call, or ``None`` if it is part of an outer call. `kind` names the call in messages; the default
    is class and method. `writes` says whether the call may write to variables, and
    `sets_attributes` whether the attributes of the object are restored before it is repeated.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if of is None:
                strategy = self._container
                require_cross_replica(strategy, cast(str, kind))
                ranks = strategy._extended._collectives
            else:
                ranks = of(self)
            if ranks is None or not ranks.is_elastic:
                # The usual case. A unit would create several objects in each step.
                return method(self, *args, **kwargs)

            def attempt() -> Any:
                if sets_attributes:
                    units.on_undo(functools.partial(_set_attributes, self, dict(vars(self))))
                return method(self, *args, **kwargs)

            what = kind or f"{type(self).__name__}.{method.__name__}".removesuffix(".__init__")
            return ranks.as_unit(what, attempt, writes)

        return cast(_Method, call)

    return decorate


def ranks_in_scope(_: object) -> Collectives | None:
    """Return the ranks of the strategy in scope, ``None`` outside every scope."""
    frame = current()
    # In replica context the unit is the surrounding call of `run`.
    return frame.collectives if frame is not None and frame.kind is Kind.CROSS_REPLICA else None


def made_in_scope(init: _Method) -> _Method:
    """Turn an ``__init__`` into one collective call of the strategy in scope, if there is any."""
    return collective(of=ranks_in_scope, sets_attributes=True)(init)


def _set_attributes(thing: object, attributes: Mapping[str, Any]) -> None:
    """Give `thing` these attributes and no others."""
    vars(thing).clear()
    vars(thing).update(attributes)


_TWINS = {
    "gather": "all_gather",
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "barrier": "barrier",
    "broadcast_object": "broadcast_object",
    "gather_objects": "all_gather_object",
}
"""Methods of a strategy, and the methods of the replica context that do the same."""


def require_cross_replica(strategy: Strategy, what: str) -> None:
    """Check that `what` of `strategy` is called in cross-replica context or outside every scope."""
    collectives = strategy._extended._collectives  # every step runs this, so no property
    if collectives.is_closed:
        collectives.channel.check_open()
    frame = current()
    if frame is None:
        return
    if frame.strategy is not strategy:
        if is_default(frame.strategy):
            return
        raise ContextError(
            f"{what} of {strategy!r} was called in the {frame.kind.value} of "
            f"{frame.strategy!r}. Different strategies cannot be mixed or nested."
        )
    if frame.kind is Kind.REPLICA:
        twin = _TWINS.get(what)
        remedy = (
            f"There, call get_replica_context().{twin}() instead."
            if twin
            else "There, get_replica_context().merge_call(fn) calls a function fn that may call it."
        )
        raise ContextError(
            f"{what} needs the cross-replica context, but it was called inside a function "
            f"given to strategy.run. {remedy}"
        )


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
    # `what` names the call in messages. `first` is passed unchanged; `Mirrored` values in `args`
    # and `kwargs` are replaced by this rank's component.
    channel = collectives_of(strategy).channel
    channel.ledger.updates += 1
    try:
        result = result_in_update_context(strategy, what, fn, first, args, dict(kwargs or {}))
    except BaseException as error:
        channel.note_failure(error, failure_site(error.__traceback__))
        raise
    if not group:
        return (result,)
    return mirror(result) if distributes_variables(strategy) else result


def result_in_update_context(
    strategy: Any,
    what: str,
    fn: Callable[..., Any],
    first: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the function as in `call_in_update_context`, but only here, and record nothing."""
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
        return fn(*first, *local_args, **local_kwargs)
