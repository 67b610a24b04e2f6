"""Ranks of a save or restore: their strategy and their path."""

from __future__ import annotations

import os
from typing import Any

from mpistrat import context
from mpistrat.arguments import as_bool
from mpistrat.arrays import Device
from mpistrat.checkpoint.drift_at_save import check_drift_option
from mpistrat.checkpoint.object_graph import Tree
from mpistrat.checkpoint.replica_state import PerReplicaState
from mpistrat.checkpoint.torch_hook import world_strategy
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError, ContextError
from mpistrat.mpi.launcher import is_one_of_several
from mpistrat.mpi.world import is_started, started_world


def agree_on_path(
    collectives: Collectives,
    what: str,
    path: str | os.PathLike[str],
    drift: str = "warn",
    **switches: bool,
) -> str:
    """Return `path` as a string, once all ranks pass it and the same options. **Collective**."""
    with collectives.call(what) as call:
        checked = checked_path(what, path)
        check_drift_option(drift)
        for name, value in switches.items():
            switches[name] = as_bool(name, value)
        call.agree(checked, drift, switches)
    return checked


def checked_path(what: str, path: str | os.PathLike[str]) -> str:
    """Return `path` as a string, unchanged, or raise why it is none."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"{what} needs a path as a string or pathlib.Path, not {path!r}.")
    if not name or "\0" in name:
        raise ValueError(f"{what} needs a path, but {name!r} is none.")
    return name


def collectives_for(tree: Tree, what: str) -> Collectives:
    """Return the collectives of the strategy of the objects in `tree`. Local.

    Where they have none, those of the current strategy, then of PyTorch's process group of all
    ranks, then for objects other than variables those of the only strategy on several ranks that
    is open; else those of one process without MPI.
    """
    strategy = _strategy_of(tree, what)
    if strategy is None:
        return Collectives.solo(Device("cpu"))
    strategy.extended._check_may_save(what)
    kind = context.mode_for(strategy, what)
    if kind is not context.Kind.CROSS_REPLICA:
        raise ContextError(
            f"{what} needs the cross-replica context, but this is the {kind.value} of "
            f"{strategy!r}. Call it outside strategy.run, or inside merge_call."
        )
    collectives: Collectives = strategy.extended._collectives
    return collectives


def collectives_for_save(tree: Tree, what: str) -> Collectives:
    """Return the collectives of a save of the objects in `tree`. **Collective** in one case.

    As `collectives_for`; but a tree without variables, which no strategy of the program owns, is
    compared by all ranks of the job, if they are connected.
    """
    world = started_world() if is_started() else None
    has_others = is_one_of_several() if world is None else world.size > 1
    if tree.variables or not has_others or _strategy_of(tree, what) is not None:
        return collectives_for(tree, what)
    alone = [path for path, each in tree.stateful.items() if isinstance(each, PerReplicaState)]
    if alone:
        raise CheckpointError(
            f"{what}: {alone} are PerReplicaState, but it is unknown to which strategy's replicas "
            "they belong, as this is outside of every scope. Save them in the scope of their "
            'strategy: "with strategy.scope():".'
        )
    if world is None:
        return collectives_for(tree, what)
    collectives: Collectives = context.strategy_of_world().extended._collectives
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
    if frame is not None and _distributes(frame.strategy):
        return frame.strategy
    strategy = world_strategy()
    if strategy is None and not tree.variables and (tree.stateful or tree.trackables):
        strategy = context.only_open_strategy()
    return strategy


def _distributes(strategy: Any) -> bool:
    return bool(getattr(getattr(strategy, "extended", None), "_distributes_variables", False))
