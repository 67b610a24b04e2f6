"""StorageWriter of torch.distributed.checkpoint that writes one HDF5 file, by all ranks."""

from __future__ import annotations

import dataclasses
import os
import uuid
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mpistrat.checkpoint.json_marks import dump_json
from mpistrat.checkpoint.ranks import checked_path, this_worker
from mpistrat.checkpoint.shards import Room, digests_in_file, write_box
from mpistrat.checkpoint.state_json import json_part
from mpistrat.checkpoint.torch_hook import Box
from mpistrat.checkpoint.writer import explaining
from mpistrat.errors import CheckpointError
from mpistrat.torch.dcp_file import (
    CoordinatorFile,
    Task,
    check_paths,
    check_storable,
    paths_of,
    tasks,
)
from mpistrat.torch.stored import name_of, on_host

_WHAT = "HDF5Writer"


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

    ``async_save`` needs a group that nothing else uses, ``process_group=dist.new_group()``, because
    the program keeps using the other groups in the meantime.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> state = {"model": torch.nn.Linear(64, 10).state_dict(), "step": 100}
    >>> metadata = dcp.save(state, storage_writer=mst.HDF5Writer("step-100.h5", step=100))
    >>> dcp.load(state, storage_reader=mst.HDF5Reader("step-100.h5"))
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int = -1) -> None:
        super().__init__()
        self._path = checked_path(_WHAT, path)
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"{_WHAT}: step must be an integer, not {step!r}.")
        self._step = step
        self._file: CoordinatorFile | None = None

    def __repr__(self) -> str:
        return f"HDF5Writer({self._path!r}, step={self._step})"

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
                check_storable(item.index.fqn, item.tensor_data.properties)
        return dataclasses.replace(plan, storage_data=this_worker())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the file with room for all tensors, on the coordinator."""
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                f"{_WHAT} makes a new file in each save, so plans cannot be kept from one save to "
                "the next. Use a planner with enable_plan_caching=False."
            )
        items = [item for plan in plans for item in plan.items]
        paths = paths_of(plans)
        tensors = {item.index.fqn: item for item in items if item.tensor_data is not None}
        check_paths(paths, tensors)
        self._file = CoordinatorFile(self._path, self._step, len(plans), paths)
        # A save that fails elsewhere does not call this writer again.
        self._finalizer = weakref.finalize(self, self._file.abandon, None)
        self._finalizer.atexit = False
        try:
            room = self._file.reserve(tensors)
        except BaseException as error:
            self._file.abandon(error)
            raise
        return tasks(plans, room)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards, wait for the others, and digest some of the tensors."""
        task: Task = plan.storage_data
        results: list[WriteResult] = []
        try:
            # The end of the stage reports this rank, also after an error, so the others do not wait
            # for it until their time is over.
            with task.meeting.stage("written") as written:
                results += self._write_items(plan, planner, task)
            if written.is_everywhere():
                with task.meeting.stage("digested") as digested, explaining(self._path):
                    results += _digest(task)
                # Only the coordinator waits: if a different rank has failed, torch never calls
                # `finish`, and the file has to be removed here.
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

    def _write_items(self, plan: SavePlan, planner: SavePlanner, task: Task) -> list[WriteResult]:
        with explaining(self._path):
            handle = task.room.open() if any(each.tensor_data for each in plan.items) else -1
        if handle is None:
            raise CheckpointError(
                f"The checkpoint {self._path} cannot be written: the coordinator has made "
                f"{task.room.path}, but this rank does not see it. Save to a folder that all nodes "
                "share."
            )
        paths = paths_of([plan])
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


def _digest(task: Task) -> list[WriteResult]:
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


def _write_value(item: WriteItem, path: tuple[str | int, ...], planner: SavePlanner) -> WriteResult:
    """Return the JSON of a value, which the coordinator writes."""
    owner, *below = map(str, path)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
    except Exception:  # what torch raises for other classes has no public name
        raise TypeError(
            f"{_WHAT}: the value at {item.index.fqn!r} of the state dict is neither a tensor nor a "
            "number, text, boolean, None, or a list, tuple or dict of these. Convert it, or leave "
            "it out of the state dict."
        ) from None
    text = dump_json(json_part(value, owner, "/".join(below)))
    return WriteResult(item.index, len(text), text)
