"""File of a save by torch.distributed.checkpoint: its layout, its tasks for ranks, its end."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mpistrat import context
from mpistrat.checkpoint.format import Header, check_path
from mpistrat.checkpoint.json_marks import load_json
from mpistrat.checkpoint.object_graph import check_disjoint
from mpistrat.checkpoint.ranks import Worker, divide_work, share_out
from mpistrat.checkpoint.shards import Room, Written, sign
from mpistrat.checkpoint.state_json import tensor_mark
from mpistrat.checkpoint.torch_hook import world_strategy
from mpistrat.checkpoint.writer import (
    CheckpointWriter,
    Item,
    create_checkpoint,
    state_item,
    variable_item,
)
from mpistrat.errors import CheckpointError
from mpistrat.torch.store_barrier import Meeting
from mpistrat.torch.stored import name_of, stored_dtype

Keys = tuple[str | int, ...]
"""The keys that lead to a value in a state dict."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What the coordinator tells one rank, in the plan of that rank."""

    room: Room
    """Of the tensors of its plan, and of those that it digests."""
    digested: tuple[str, ...]
    """The tensors that this rank reads through once all are written."""
    num_threads: int
    is_spread: bool
    """Whether the ranks are on several hosts."""
    meeting: Meeting


def check_storable(fqn: str, properties: Any) -> None:
    """Refuse tensors that HDF5 has no form for."""
    reason = ""
    if properties.layout is not torch.strided:
        reason = f"a sparse tensor of layout {properties.layout} (save .to_dense(), or its parts)"
    elif stored_dtype(properties.dtype) is None:
        reason = f"a tensor of dtype {name_of(properties.dtype)} (convert it to another dtype)"
    if reason:
        raise TypeError(f"HDF5Writer: the state dict holds {reason} at {fqn!r}.")


def paths_of(plans: list[SavePlan]) -> dict[str, Keys]:
    """Return by name the keys that lead to each value, which planners give that flatten dicts."""
    paths: dict[str, Keys] = {}
    for plan in plans:
        known = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        paths |= {i.index.fqn: tuple(known.get(i.index.fqn, (i.index.fqn,))) for i in plan.items}
    return paths


def check_paths(paths: Mapping[str, Keys], tensors: Mapping[str, WriteItem]) -> None:
    """Refuse keys that cannot be paths in a file, and tensors that cannot stand side by side."""
    for path in paths.values():
        if "/" in str(path[0]):
            raise ValueError(
                f"HDF5Writer: the key {path[0]!r} at the top of the state dict contains '/', which "
                "separates groups of the file. Put the state dict under a name: "
                '{"model": state}.'
            )
        check_path("/".join(map(str, path)))
    check_disjoint(["/".join(map(str, paths[fqn])) for fqn in tensors])


def _header(step: int, num_ranks: int) -> Header:
    strategy = world_strategy()
    library = "none"
    if strategy is not None:
        library = context.collectives_of(strategy).channel.transport.library
    return Header(
        step=step,
        num_replicas=num_ranks,
        mpi_library=library,
    )


def tasks(plans: list[SavePlan], room: Room) -> list[SavePlan]:
    """Return the plans with a task for each rank."""
    workers: list[Worker] = [plan.storage_data for plan in plans]
    ranks = range(len(plans))
    shard_ranks: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                shard_ranks.setdefault(item.index.fqn, []).append(rank)
    # Who has written all of a tensor has it in its cache.
    owners = {fqn: found[0] for fqn, found in shard_ranks.items()}
    shared = [fqn for fqn, found in shard_ranks.items() if len(set(found)) > 1]
    owners |= share_out({fqn: room.extents[fqn].num_bytes for fqn in shared}, ranks)
    # Keys stay in the store after a save, so the next save needs different ones.
    key = f"mpistrat/dcp/{uuid.uuid4().hex}"
    result = []
    for rank, plan in enumerate(plans):
        digested = tuple(fqn for fqn, owner in owners.items() if owner == rank)
        own = {i.index.fqn for i in plan.items if i.tensor_data is not None}.union(digested)
        task = Task(
            room=dataclasses.replace(room, extents={fqn: room.extents[fqn] for fqn in own}),
            digested=digested,
            num_threads=divide_work({}, workers, rank).num_threads,
            is_spread=len({host for host, _ in workers}) > 1,
            meeting=Meeting(key, len(plans)),
        )
        result.append(dataclasses.replace(plan, storage_data=task))
    return result


class CoordinatorFile:
    """The file that the coordinator makes, until it is complete."""

    def __init__(self, path: str, step: int, num_ranks: int, paths: dict[str, Keys]) -> None:
        self._path = path
        self._paths = paths
        self._tensors: dict[str, str] = {}
        """The dtype of each tensor."""
        self._context = create_checkpoint(path, _header(step, num_ranks))
        self._writer: CheckpointWriter | None = self._context.__enter__()

    def _name(self, fqn: str) -> str:
        return "/".join(map(str, self._paths[fqn]))

    def reserve(self, tensors: Mapping[str, WriteItem]) -> Room:
        """Make room for tensors of their global shapes."""
        items: dict[str, Item] = {}
        for fqn, item in tensors.items():
            data: Any = item.tensor_data
            dtype, stored = data.properties.dtype, stored_dtype(data.properties.dtype)
            own = self._tensors[fqn] = name_of(dtype)
            items[fqn] = variable_item(
                self._name(fqn),
                np.broadcast_to(np.zeros((), stored), tuple(data.size)),
                tensor_dtype="" if np.dtype(stored).name == own else own,
            )
        return Room.reserve(self._open_writer(), items)

    def _open_writer(self) -> CheckpointWriter:
        if self._writer is None:
            raise RuntimeError(f"the file {self._path} has been given up")
        return self._writer

    def complete(self, results: list[list[WriteResult]]) -> None:
        """Add what the ranks have returned, and put the file in its place."""
        writer = self._open_writer()
        parts: dict[str, list[Written]] = {self._name(fqn): [] for fqn in self._tensors}
        found: dict[str, Written] = {}
        leaves: dict[str, Any] = {fqn: tensor_mark(own) for fqn, own in self._tensors.items()}
        for result in (each for of_rank in results for each in of_rank):
            fqn, data = result.index.fqn, result.storage_data
            if not isinstance(data, Written):
                leaves[fqn] = load_json(data.encode())
            # With a digest it is from the rank that has read the whole tensor, without one from a
            # rank that has written a shard.
            elif data.digest:
                found[self._name(fqn)] = data
            else:
                parts[self._name(fqn)].append(data)
        sign(writer, self._path, parts, found)
        self._add_states(writer, leaves)
        # First, or `abandon` would end the context a second time if this end of it raises.
        self._writer = None
        self._context.__exit__(None, None, None)

    def _add_states(self, writer: CheckpointWriter, leaves: dict[str, Any]) -> None:
        paths = {fqn: self._paths[fqn] for fqn in leaves}
        shown = {fqn: _like(self._tensors, fqn, leaf) for fqn, leaf in leaves.items()}
        _check_reversible(shown, paths)
        names = [self._name(fqn) for fqn in self._tensors]
        for owner, rest in unflatten_state_dict(leaves, paths).items():
            if owner in self._tensors and paths[owner] == (owner,):
                continue  # a tensor at the top of the state dict is a variable without a state
            begin = f"{owner}/"
            arrays = [each.removeprefix(begin) for each in names if each.startswith(begin)]
            writer.add(state_item(owner, rest, arrays))

    def abandon(self, reason: BaseException | None) -> None:
        """Remove what has been written; what is complete stays."""
        if self._writer is not None:
            self._writer = None
            error = reason or CheckpointError("the save was given up")
            try:
                self._context.__exit__(type(error), error, error.__traceback__)
            # The context raises the error that it is given again, or explains it.
            except BaseException as raised:
                if raised is not error and not isinstance(raised, CheckpointError):
                    raise


def _like(tensors: Mapping[str, str], fqn: str, leaf: Any) -> Any:
    return torch.empty((), device="meta") if fqn in tensors else leaf


def _check_reversible(leaves: dict[str, Any], paths: dict[str, Keys]) -> None:
    """Refuse values that a load would look for under other names."""
    found, _ = flatten_state_dict(unflatten_state_dict(leaves, paths))
    for fqn in leaves.keys() ^ found.keys():
        raise ValueError(
            f"HDF5Writer: the value at {fqn!r} of the state dict could not be found again in the "
            "file. Use a planner with flatten_state_dict=True."
        )
