"""Find the ranks that save and restore together."""

from __future__ import annotations

from typing import Any

from mpistrat import context
from mpistrat.arrays import Device
from mpistrat.checkpoint.objects import Tree
from mpistrat.collectives import Collectives
from mpistrat.comm.solo import SoloTransport
from mpistrat.errors import ContextError
from mpistrat.world import library_version

__all__ = ["collectives_for", "mpi_library"]


def collectives_for(tree: Tree, what: str) -> Collectives:
    """Return the collectives of the strategy of the objects in `tree`. Local.

    Where they have none, those of the current strategy, else those of one process without MPI.

    Parameters
    ----------
    tree : Tree
    what : str
        The public function, for messages.

    Raises
    ------
    ContextError
        If the objects belong to several strategies, or if this is not the cross-replica
        context of theirs.
    """
    strategy = _strategy_of(tree, what)
    if strategy is None:
        return Collectives.solo(Device("cpu"))
    kind = context.mode_for(strategy, what)
    if kind is not context.Kind.CROSS_REPLICA:
        raise ContextError(
            f"{what} needs the cross-replica context, but this is the {kind.value} of "
            f"{strategy!r}. Call it outside strategy.run, or inside merge_call."
        )
    collectives: Collectives = strategy.extended.collectives
    return collectives


def _strategy_of(tree: Tree, what: str) -> Any:
    found: dict[int, Any] = {}
    groups: tuple[dict[str, Any], ...] = (tree.variables, tree.stateful, tree.trackables)
    for group in groups:
        for each in group.values():
            strategy = getattr(each, "strategy", None)
            if _distributes(strategy):
                found[id(strategy)] = strategy
    if len(found) > 1:
        raise ContextError(
            f"{what}: the objects belong to several strategies, "
            f"{', '.join(map(repr, found.values()))}. Use one checkpoint for each."
        )
    if found:
        return next(iter(found.values()))
    frame = context.current()
    return frame.strategy if frame is not None and _distributes(frame.strategy) else None


def _distributes(strategy: Any) -> bool:
    return bool(getattr(getattr(strategy, "extended", None), "distributes_variables", False))


def mpi_library(collectives: Collectives) -> str:
    """Return name and version of the MPI library, ``"none"`` for one process without. Local."""
    if isinstance(collectives.channel.transport, SoloTransport):
        return "none"
    return library_version()
