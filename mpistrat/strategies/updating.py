"""Functions that run in update context, where each rank writes its own component."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpistrat import context, nests
from mpistrat.epochs.callsite import failure_site
from mpistrat.spans import span
from mpistrat.values import PerReplica, mirror, unwrap_mirrored

__all__ = ["call_in_update_context"]


def call_in_update_context(
    strategy: Any,
    what: str,
    fn: Callable[..., Any],
    first: tuple[Any, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    group: bool,
) -> Any:
    """Call ``fn(*first, *args, **kwargs)`` in the update context of `strategy`. Local.

    Parameters
    ----------
    strategy : Strategy
    what : str
        For messages: ``"update of variable 'w'"``.
    fn : callable
    first : tuple
        Arguments that are passed as they are.
    args, kwargs : sequence, mapping
        `Mirrored` values, also in nests, arrive as this rank's component.
    group : bool
        Whether to return the result merged, or a tuple with this rank's.

    Returns
    -------
    nest
        Merged, arrays and numbers are `Mirrored` if `strategy` distributes at all.

    Raises
    ------
    ValueError
        If an argument holds a `PerReplica`.
    """
    channel = strategy.extended.collectives.channel
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
    with context.entered(context.Frame(context.Kind.UPDATE, strategy)), span("update", what):
        result = fn(*first, *local_args, **local_kwargs)
    if not group:
        return (result,)
    return mirror(result) if strategy.extended.distributes_variables else result
