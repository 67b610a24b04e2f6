"""Find the ranks that save and restore together."""

from __future__ import annotations

import heapq
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat import context
from mpistrat.arguments import as_bool
from mpistrat.arrays import Device
from mpistrat.checkpoint.object_graph import Tree
from mpistrat.collectives.collectives import Collectives
from mpistrat.comm.transport import SoloTransport
from mpistrat.errors import ContextError
from mpistrat.mpi.world import library_version
from mpistrat.system.cpu import cores_of_mask, mask_of_cores, own_cores

__all__ = [
    "Shares",
    "agree_on_path",
    "agree_on_shares",
    "checked_path",
    "collectives_for",
    "mpi_library",
    "share_out",
]


def agree_on_path(
    ranks: Collectives, what: str, path: str | os.PathLike[str], **switches: bool
) -> str:
    """Return `path` as a string, once all ranks have given the same. **Collective**.

    Parameters
    ----------
    ranks : Collectives
    what : str
        The public function, for messages.
    path : path
    **switches : bool
        What else must be equal, by the name of the argument.

    Raises
    ------
    TypeError, ValueError
        As `checked_path` and `as_bool`, where it is bad on this rank.
    EpochMismatchError
        If it is bad on another rank, or differs there.
    """
    with ranks.call(what) as call:
        checked = checked_path(what, path)
        for name, value in switches.items():
            switches[name] = as_bool(name, value)
        call.agree(checked, switches)
    return checked


def checked_path(what: str, path: str | os.PathLike[str]) -> str:
    """Return `path` as a string, exactly as it is. Local.

    Raises
    ------
    TypeError
        If it is neither a string nor a path.
    ValueError
        If it is empty, or contains a zero byte.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"{what} needs a path as a string or pathlib.Path, not {path!r}.")
    if not name or "\0" in name:
        raise ValueError(f"{what} needs a path, but {name!r} is none.")
    return name


@dataclass(frozen=True)
class Shares:
    """Who does what, and this rank's own part."""

    owners: Mapping[str, int]
    """The rank of each variable."""
    own: Sequence[str]
    """The variables of this rank."""
    num_threads: int
    """How many threads have a core here, 0 where this rank does not take part."""


def agree_on_shares(ranks: Collectives, sizes: Mapping[str, int], takes_part: bool) -> Shares:
    """Share out variables among the ranks that take part. **Collective**.

    Parameters
    ----------
    ranks : Collectives
    sizes : mapping of str to int
        Bytes of each variable, equal on all ranks.
    takes_part : bool
        Whether this rank does. Without `sizes` it may be none.
    """
    host = socket.gethostname()
    own = mask_of_cores(own_cores()) if takes_part else 0
    seats = ranks.gather_json([host, own] if takes_part else None)
    owners = share_out(sizes, [rank for rank, seat in enumerate(seats) if seat])
    beside = [seat[1] for seat in seats if seat and seat[0] == host]
    return Shares(
        owners,
        [name for name, owner in owners.items() if owner == ranks.rank],
        _num_threads(own, beside),
    )


def share_out(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Return which of `ranks` has each variable, so that each has about as many bytes. Local."""
    loads = [(0, rank) for rank in ranks]
    owners = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


def _num_threads(own: int, masks: Sequence[int]) -> int:
    """Return this rank's part of the cores that it may use, where others may use them too."""
    return round(sum(1 / sum(m >> core & 1 for m in masks) for core in cores_of_mask(own)))


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
    collectives: Collectives = strategy.extended._collectives
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
    return bool(getattr(getattr(strategy, "extended", None), "_distributes_variables", False))


def mpi_library(collectives: Collectives) -> str:
    """Return name and version of the MPI library, ``"none"`` for one process without. Local."""
    if isinstance(collectives.channel.transport, SoloTransport):
        return "none"
    return library_version()
