"""StorageWriter of torch.distributed.checkpoint that writes one HDF5 file, by all ranks."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mpistrat.checkpoint.format import FORMAT_VERSION, Header, check_path
from mpistrat.checkpoint.object_graph import check_disjoint
from mpistrat.checkpoint.ranks import Worker, checked_path, divide_work, share_out, this_worker
from mpistrat.checkpoint.shards import (
    Room,
    Written,
    digests_in_file,
    sign,
    write_box,
)
from mpistrat.checkpoint.state_json import dump_json, json_part, load_json, tensor_mark
from mpistrat.checkpoint.tensors import Box, world_strategy
from mpistrat.checkpoint.writer import (
    CheckpointWriter,
    Item,
    create_checkpoint,
    explaining,
    state_item,
    variable_item,
)
from mpistrat.errors import CheckpointError
from mpistrat.torch.meeting import Meeting
from mpistrat.torch.stored import name_of, on_host, stored_dtype

__all__ = ["HDF5Writer"]

_WHAT = "HDF5Writer"

_Path = tuple[str | int, ...]
"""The keys that lead to a value in a state dict."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """What the coordinator tells one rank, in the plan of that rank."""

    room: Room
    """Of the tensors of its plan, and of those that it digests."""
    digested: tuple[str, ...]
    """The tensors that this rank reads through once all are written."""
    num_threads: int
    is_spread: bool
    """Whether the ranks are on several hosts."""
    meeting: Meeting


class HDF5Writer(StorageWriter):
    """Storage of `torch.distributed.checkpoint.save` and ``async_save``: one HDF5 file.

    All ranks write their shards to it at the same time. Each tensor is one data set of its global
    shape, which h5ls shows. Numbers, texts and lists of them are JSON. The file is a checkpoint of
    mpistrat: `mpistrat inspect`, `mpistrat.Checkpoint.restore` and `HDF5Reader` read it, on any
    number of ranks. It appears under its name once it is complete and on disk; where a save fails
    or is killed, what was there before is unchanged.

    **Local**; `torch.distributed.checkpoint.save` is **Collective** over its process group, which
    may be of any backend. All ranks must see the folder.

    Parameters
    ----------
    path : str or path
        The file. ``checkpoint_id=`` of a save takes its place.
    step : int
        The training step, which the file tells; -1 where unknown.

    Raises
    ------
    TypeError
        If `path` is no path, or `step` no integer.

    Notes
    -----
    The errors of a save reach the program in a ``CheckpointException`` of torch, by rank:
    `CheckpointError` if the file cannot be written, TypeError for tensors that HDF5 has no type
    for (sparse, quantized) and for values that are neither tensors nor JSON, ValueError for keys
    at the top of the state dict that contain ``/``.

    ``async_save`` needs a process group of its own, ``process_group=dist.new_group()``, because the
    program goes on to use the others meanwhile.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> state = {"model": model.state_dict(), "step": 100}
    >>> dcp.save(state, storage_writer=mst.HDF5Writer("step-100.h5", step=100))
    >>> dcp.load(state, storage_reader=mst.HDF5Reader("step-100.h5"))
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int = -1) -> None:
        super().__init__()
        self._path = checked_path(_WHAT, path)
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"{_WHAT}: step must be an integer, not {step!r}.")
        self._step = step
        self._file: _File | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another file, where given under the path `checkpoint_id`."""
        self._abandon("another save has begun")
        if checkpoint_id is not None:
            self._path = checked_path(_WHAT, checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the file."""
        return self._path

    def storage_meta(self) -> StorageMeta:
        """Return the path, as torch's planners want it."""
        return StorageMeta(checkpoint_id=self._path, save_id=uuid.uuid4().hex)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` may be the path of an HDF5 file."""
        return os.fspath(checkpoint_id).endswith((".h5", ".hdf5"))

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Refuse saves in which no rank coordinates the others."""
        if not kwargs.get("use_collectives", True) and dist.is_initialized():
            raise ValueError(
                f"{_WHAT} writes one file of all ranks, so they must plan it together. Leave "
                "use_collectives at True, or use no_dist=True on one rank."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that tensors can be stored, and say which cores this rank has."""
        for item in plan.items:
            if item.tensor_data is not None:
                _check_storable(item.index.fqn, item.tensor_data.properties)
        return dataclasses.replace(plan, storage_data=this_worker())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the file with room for all tensors, on the coordinator."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                f"{_WHAT} makes a new file in each save, so plans cannot be kept from one save to "
                "the next. Use a planner with enable_plan_caching=False."
            )
        items = [item for plan in plans for item in plan.items]
        paths = _paths_of(plans)
        for fqn, path in paths.items():
            _check_keys(fqn, path)
        tensors = {item.index.fqn: item for item in items if item.tensor_data is not None}
        check_disjoint(["/".join(map(str, paths[fqn])) for fqn in tensors])
        header = _header(self._step, len(plans))
        self._file = _File(self._path, header, paths)
        # A save that fails elsewhere does not call this writer again.
        self._finalizer = weakref.finalize(self, self._file.abandon, None)
        self._finalizer.atexit = False
        try:
            room = self._file.reserve(tensors)
        except BaseException as error:
            self._file.abandon(error)
            raise
        return _tasks(plans, room)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards, wait for the others, and digest some of the tensors."""
        task: _Task = plan.storage_data
        results: list[WriteResult] = []
        try:
            with task.meeting.stage("written") as written:
                results += self._write_items(plan, planner, task)
            if written.is_everywhere():
                with task.meeting.stage("digested") as digested, explaining(self._path):
                    results += _digest(task)
                if self._file is not None and not digested.is_everywhere():
                    self._abandon("another rank has failed")
            else:
                self._abandon("another rank has failed")
        except BaseException as error:
            self._abandon(error)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_items(self, plan: SavePlan, planner: SavePlanner, task: _Task) -> list[WriteResult]:
        with explaining(self._path):
            handle = task.room.open() if any(each.tensor_data for each in plan.items) else -1
        if handle is None:
            raise CheckpointError(
                f"The checkpoint {self._path} cannot be written: the coordinator has made "
                f"{task.room.path}, but this rank does not see it. Save to a folder that all nodes "
                "share."
            )
        paths = _paths_of([plan])
        try:
            results = [
                _write_value(item, paths[item.index.fqn], planner)
                if item.tensor_data is None
                else self._write_shard(handle, item, task.room, planner)
                for item in plan.items
            ]
            if task.is_spread and handle >= 0:  # else the coordinator's flush is for all
                with explaining(self._path):
                    os.fsync(handle)
        finally:
            if handle >= 0:
                os.close(handle)
        return results

    def _write_shard(
        self, handle: int, item: WriteItem, room: Room, planner: SavePlanner
    ) -> WriteResult:
        data: Any = item.tensor_data
        extent = room.extents[item.index.fqn]
        tensor: Any = planner.resolve_data(item)
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        values = on_host(tensor)
        if values.shape != box.sizes or values.dtype.itemsize != extent.item_bytes:
            raise ValueError(
                f"{_WHAT}: the plan has a part of shape {box.sizes} of {item.index.fqn!r}, but it "
                f"is a tensor of {name_of(tensor.dtype)} of shape {values.shape}. The state dict "
                "must not change during a save."
            )
        with explaining(self._path):
            written = write_box(handle, extent, tuple(data.size), box, values)
        return WriteResult(item.index, values.nbytes, written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add digests and JSON, flush the file and give it its name, on the coordinator."""
        if self._file is None:
            raise RuntimeError(f"{_WHAT}.finish was called before prepare_global_plan")
        try:
            self._file.complete(results)
        except BaseException as error:
            self._abandon(error)
            raise
        self._abandon("it is complete")

    def _abandon(self, reason: BaseException | str) -> None:
        """Remove what has been written, because of `reason`."""
        file, self._file = self._file, None
        if file is not None:
            self._finalizer.detach()
            file.abandon(reason if isinstance(reason, BaseException) else None)


def _check_storable(fqn: str, properties: Any) -> None:
    reason = ""
    if properties.layout is not torch.strided:
        reason = f"a sparse tensor of layout {properties.layout} (save .to_dense(), or its parts)"
    elif stored_dtype(properties.dtype) is None:
        reason = f"a tensor of dtype {name_of(properties.dtype)} (convert it to another dtype)"
    if reason:
        raise TypeError(f"{_WHAT}: the state dict holds {reason} at {fqn!r}.")


def _paths_of(plans: list[SavePlan]) -> dict[str, _Path]:
    """Return by name the keys that lead to each value, which planners give that flatten dicts."""
    paths: dict[str, _Path] = {}
    for plan in plans:
        known = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        paths |= {i.index.fqn: tuple(known.get(i.index.fqn, (i.index.fqn,))) for i in plan.items}
    return paths


def _check_keys(fqn: str, path: _Path) -> None:
    if "/" in str(path[0]):
        raise ValueError(
            f"{_WHAT}: the key {path[0]!r} at the top of the state dict contains '/', which "
            f'separates groups of the file. Put the state dict under a name: {{"model": state}}.'
        )
    check_path("/".join(map(str, path)))


def _header(step: int, num_ranks: int) -> Header:
    strategy = world_strategy()
    library = "none"
    if strategy is not None:
        library = strategy.extended._collectives.channel.transport.library
    return Header(
        step=step,
        num_replicas=num_ranks,
        mpi_library=library,
        format_version=FORMAT_VERSION,
    )


def _tasks(plans: list[SavePlan], room: Room) -> list[SavePlan]:
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
    key = f"mpistrat/dcp/{uuid.uuid4().hex}"
    result = []
    for rank, plan in enumerate(plans):
        digested = tuple(fqn for fqn, owner in owners.items() if owner == rank)
        own = {i.index.fqn for i in plan.items if i.tensor_data is not None}.union(digested)
        task = _Task(
            room=dataclasses.replace(room, extents={fqn: room.extents[fqn] for fqn in own}),
            digested=digested,
            num_threads=divide_work({}, workers, rank).num_threads,
            is_spread=len({host for host, _ in workers}) > 1,
            meeting=Meeting(key, len(plans)),
        )
        result.append(dataclasses.replace(plan, storage_data=task))
    return result


def _write_value(item: WriteItem, path: _Path, planner: SavePlanner) -> WriteResult:
    """Return the JSON of a value, which the coordinator writes."""
    owner, *below = map(str, path)
    data = planner.resolve_data(item)
    try:
        if not isinstance(data, io.BytesIO):
            raise pickle.UnpicklingError
        data.seek(0)
        value = torch.load(data, weights_only=True)
        text = dump_json(json_part(value, owner, "/".join(below)))
    except pickle.UnpicklingError:
        raise TypeError(
            f"{_WHAT}: the value at {item.index.fqn!r} of the state dict is neither a tensor nor a "
            "number, text, boolean, None, or a list, tuple or dict of these. Convert it, or leave "
            "it out of the state dict."
        ) from None
    return WriteResult(item.index, len(text), text)


def _digest(task: _Task) -> list[WriteResult]:
    """Read through the tensors of this rank's task, which all ranks have written."""
    if not task.digested:
        return []
    handle = task.room.open(flags=os.O_RDONLY)
    if handle is None:
        raise OSError(f"{task.room.path} is no longer there")
    try:
        extents = {fqn: task.room.extents[fqn] for fqn in task.digested}
        found = digests_in_file(handle, extents, task.num_threads)
    finally:
        os.close(handle)
    return [WriteResult(MetadataIndex(fqn), 0, each) for fqn, each in found.items()]


class _File:
    """The file that the coordinator makes, until it is complete."""

    def __init__(self, path: str, header: Header, paths: dict[str, _Path]) -> None:
        self._path = path
        self._paths = paths
        self._tensors: dict[str, str] = {}
        """The dtype of each tensor."""
        self._context = create_checkpoint(path, header)
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
            elif data.digest:
                found[self._name(fqn)] = data
            else:
                parts[self._name(fqn)].append(data)
        sign(writer, self._path, parts, found)
        self._add_states(writer, leaves)
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
            except BaseException as raised:
                if raised is not error and not isinstance(raised, CheckpointError):
                    raise


def _like(tensors: Mapping[str, str], fqn: str, leaf: Any) -> Any:
    return torch.empty((), device="meta") if fqn in tensors else leaf


def _check_reversible(leaves: dict[str, Any], paths: dict[str, _Path]) -> None:
    """Refuse values that a load would look for under other names."""
    found, _ = flatten_state_dict(unflatten_state_dict(leaves, paths))
    for fqn in leaves.keys() ^ found.keys():
        raise ValueError(
            f"{_WHAT}: the value at {fqn!r} of the state dict could not be found again in the "
            "file. Use a planner with flatten_state_dict=True."
        )
