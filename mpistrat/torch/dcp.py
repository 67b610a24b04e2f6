"""StorageWriter of torch.distributed.checkpoint: all ranks write one HDF5 file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import uuid
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mpistrat import context
from mpistrat.checkpoint.format import Header, check_path, checked_path
from mpistrat.checkpoint.marks import dump_json, load_json
from mpistrat.checkpoint.object_graph import check_disjoint
from mpistrat.checkpoint.raw_io import (
    Digested,
    PageRun,
    Worker,
    Written,
    divide_work,
    runs_of_ranks,
    this_worker,
)
from mpistrat.checkpoint.state_json import json_part, tensor_mark
from mpistrat.checkpoint.torch_hook import world_strategy
from mpistrat.checkpoint.write import Room
from mpistrat.checkpoint.writer import (
    CheckpointWriter,
    Item,
    RootFile,
    explaining,
    state_item,
    variable_item,
)
from mpistrat.errors import CheckpointError
from mpistrat.sharding import Box
from mpistrat.torch.store_barrier import Meeting
from mpistrat.torch.stored import name_of, on_host, stored_dtype

_WHAT = "HDF5Writer"

Keys = tuple[str | int, ...]
"""The keys by which a value is found in a state dict."""


@dataclasses.dataclass(frozen=True)
class _Task:
    """Instructions of the coordinator for one rank, in the plan of that rank."""

    room: Room
    """Space of the tensors that this rank writes or reads back."""
    runs: list[PageRun]
    """The pages that this rank reads back, for their digests, once all are written."""
    num_threads: int
    is_spread: bool
    """Whether the ranks are on several hosts."""
    meeting: Meeting


class HDF5Writer(StorageWriter):
    """Storage of `torch.distributed.checkpoint.save` and ``async_save``: one HDF5 file.

    All ranks write their shards to it at the same time. Each tensor is one dataset of its global
    shape, which h5ls shows. Numbers, strings, NumPy arrays and lists of them are JSON. The file is
    a checkpoint of mpistrat: `mpistrat inspect`, `mpistrat.Checkpoint.restore` and `HDF5Reader`
    read it, on any number of ranks. It appears under its name once it is complete and on disk. If a
    save fails or is killed, a file that was there before is unchanged, and the next save to the
    same path removes what is left of the new one.

    **Local**; `torch.distributed.checkpoint.save` is **Collective** over its process group, which
    may be of any backend. All ranks must see the folder.

    Parameters
    ----------
    path : str or path
        The file to write, the same on all ranks. ``checkpoint_id=`` of a save replaces it.
    step : int
        The training step, which is stored in the file; -1 if it is unknown.

    Raises
    ------
    TypeError
        If `path` is not a path, or `step` is not an integer.

    Notes
    -----
    A save raises its errors in a ``CheckpointException`` of torch, by rank: `CheckpointError` if
    the file cannot be written, TypeError for tensors that HDF5 has no type for (sparse, quantized)
    and for values that are neither tensors nor JSON, ValueError for keys at the top of the state
    dict that contain ``/``.

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
        self._file: RootFile | None = None
        """The file, on the coordinator, until it is complete."""
        self._paths: dict[str, Keys] = {}
        self._dtypes: dict[str, str] = {}
        """Dtypes of all tensors, by name."""

    def __repr__(self) -> str:
        return f"HDF5Writer({self._path!r}, step={self._step})"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new file, at the path `checkpoint_id` if it is passed.

        **Local**. torch calls it at the start of each save.

        Parameters
        ----------
        checkpoint_id : str or path, optional
            Path of the new file. By default the path stays as it is.
        """
        self._abandon("another save has begun")
        if checkpoint_id is not None:
            self._path = checked_path(_WHAT, checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the file. Local."""
        return self._path

    def storage_meta(self) -> StorageMeta:
        """Return the path in the form that torch's planners expect.

        **Local**.

        Returns
        -------
        torch.distributed.checkpoint.metadata.StorageMeta
            The path, and a new identifier of this save.
        """
        return StorageMeta(checkpoint_id=self._path, save_id=uuid.uuid4().hex)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` may be the path of an HDF5 file.

        **Local**.

        Parameters
        ----------
        checkpoint_id : str or path
            The path to look at; the file need not exist.

        Returns
        -------
        bool
            Whether the name ends with ``.h5`` or ``.hdf5``.
        """
        return os.fspath(checkpoint_id).endswith((".h5", ".hdf5"))

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Raise for saves in which no rank coordinates the others.

        **Local**.

        Parameters
        ----------
        is_coordinator : bool
            Whether this rank coordinates the save. It is not used.
        **kwargs
            ``use_collectives``: whether the ranks plan together; other keywords are ignored.

        Raises
        ------
        ValueError
            If the ranks of a process group would plan separately.
        """
        if not kwargs.get("use_collectives", True) and dist.is_initialized():
            raise ValueError(
                f"{_WHAT} writes one file of all ranks, so they must plan it together. Leave "
                "use_collectives at True, or use no_dist=True on one rank."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that tensors can be stored, and report which cores this rank has.

        **Local**.

        Parameters
        ----------
        plan : torch.distributed.checkpoint.SavePlan
            The tensors and values that this rank saves.

        Returns
        -------
        torch.distributed.checkpoint.SavePlan
            The same plan, with a description of this rank for the coordinator.

        Raises
        ------
        TypeError
            For tensors that HDF5 has no type for.
        """
        for item in plan.items:
            if item.tensor_data is not None:
                _check_storable(item.index.fqn, item.tensor_data.properties)
        return dataclasses.replace(plan, storage_data=this_worker())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the file with space for all tensors, on the coordinator.

        **Local**; only the coordinator calls it.

        Parameters
        ----------
        plans : list of torch.distributed.checkpoint.SavePlan
            The plans of all ranks, in their order.

        Returns
        -------
        list of torch.distributed.checkpoint.SavePlan
            The plans, each with the places in the file that its rank writes.

        Raises
        ------
        CheckpointError
            If the file cannot be created.
        ValueError
            If plans are kept from an earlier save, or keys of the state dict cannot be paths.
        """
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                f"{_WHAT} makes a new file in each save, so plans cannot be kept from one save to "
                "the next. Use a planner with enable_plan_caching=False."
            )
        self._paths = _paths_of(plans)
        items = [item for plan in plans for item in plan.items]
        tensors = {item.index.fqn: item for item in items if item.tensor_data is not None}
        self._dtypes = {
            fqn: name_of(item.tensor_data.properties.dtype)
            for fqn, item in tensors.items()
            if item.tensor_data is not None
        }
        _check_paths(self._paths, tensors)
        self._file = file = RootFile(True, self._path, _header(self._step, len(plans)), None)
        # If a save fails elsewhere, torch does not call this writer again.
        given_up = CheckpointError("the save was given up")
        self._finalizer = weakref.finalize(self, file.abandon, given_up)
        self._finalizer.atexit = False
        reserved = [_item_of(_path(self._paths[fqn]), item) for fqn, item in tensors.items()]
        self._room: Room = file.use(Room.reserve, self._path, reserved)
        file.check()
        return _with_tasks(plans, self._room)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards, wait for the other ranks, and read back some of the pages.

        **Collective** over the ranks of the save.

        Parameters
        ----------
        plan : torch.distributed.checkpoint.SavePlan
            What this rank writes, from `prepare_global_plan`.
        planner : torch.distributed.checkpoint.SavePlanner
            Returns the data of each item.

        Returns
        -------
        torch.futures.Future
            Complete already; its value is a list of one result per shard, value and digest.

        Raises
        ------
        CheckpointError
            If this rank cannot write.
        """
        task: _Task = plan.storage_data
        results: list[WriteResult] = []
        try:
            # The end of the stage reports this rank, even after an error, so the other ranks do not
            # wait for it until their timeout.
            with task.meeting.stage("written") as written:
                results += self._write_items(plan, planner, task)
            if written.is_everywhere():
                with task.meeting.stage("digested") as digested:
                    found = task.room.read_back(task.runs, task.num_threads) if task.runs else []
                    results += [WriteResult(MetadataIndex(each[0]), 0, each) for each in found]
                # Only the coordinator waits: if a different rank has failed, torch never calls
                # `finish`, and the file must be removed here.
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
        paths = _paths_of([plan])
        results = []
        with contextlib.ExitStack() as stack:
            handle = -1
            if any(each.tensor_data for each in plan.items):
                handle = task.room.open_or_raise()
                stack.callback(os.close, handle)
            for item in plan.items:
                path = paths[item.index.fqn]
                if item.tensor_data is None:
                    results.append(_write_value(item, path, planner))
                else:
                    results.append(_write_shard(handle, item, _path(path), task.room, planner))
            if task.is_spread and handle >= 0:  # else the coordinator's flush covers all ranks
                with explaining(self._path):
                    os.fsync(handle)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Add digests and JSON, flush the file and rename it to its path, on the coordinator.

        **Local**; only the coordinator calls it.

        Parameters
        ----------
        metadata : torch.distributed.checkpoint.Metadata
            Description of the save. It is not used: the file describes itself.
        results : list of lists of WriteResult
            The results of `write_data` of all ranks.

        Raises
        ------
        CheckpointError
            If the file cannot be completed. A file that was there before is unchanged.
        """
        if self._file is None:
            raise RuntimeError(f"{_WHAT}.finish was called before prepare_global_plan")
        try:
            self._file.use(self._complete, results)
            self._file.complete()
        except BaseException as error:
            self._abandon(error)
            raise
        self._abandon("it is complete")

    def _complete(self, writer: CheckpointWriter, results: list[list[WriteResult]]) -> None:
        """Sign the tensors that all ranks have written, and add the states."""
        written: list[dict[str, list[Written]]] = []
        found: list[Digested] = []
        leaves: dict[str, Any] = {fqn: tensor_mark(own) for fqn, own in self._dtypes.items()}
        for of_rank in results:
            parts: dict[str, list[Written]] = {}
            for result in of_rank:
                fqn, data = result.index.fqn, result.storage_data
                if isinstance(data, str):
                    leaves[fqn] = load_json(data.encode())
                elif isinstance(data, Written):
                    parts.setdefault(_path(self._paths[fqn]), []).append(data)
                else:
                    found.append(data)
            written.append(parts)
        self._room.sign(writer, written, found)
        self._add_states(writer, leaves)

    def _add_states(self, writer: CheckpointWriter, leaves: dict[str, Any]) -> None:
        paths = {fqn: self._paths[fqn] for fqn in leaves}
        shown = {fqn: _like(self._dtypes, fqn, leaf) for fqn, leaf in leaves.items()}
        _check_reversible(shown, paths)
        names = [_path(self._paths[fqn]) for fqn in self._dtypes]
        for owner, rest in unflatten_state_dict(leaves, paths).items():
            if owner in self._dtypes and paths[owner] == (owner,):
                continue  # a tensor at the top of the state dict is a variable without a state
            begin = f"{owner}/"
            arrays = [each.removeprefix(begin) for each in names if each.startswith(begin)]
            writer.add(state_item(owner, rest, arrays))

    def _abandon(self, reason: BaseException | str) -> None:
        """Remove the data that has been written, because of `reason`; a complete file stays."""
        file, self._file = self._file, None
        if file is not None:
            self._finalizer.detach()
            if not isinstance(reason, BaseException):
                reason = CheckpointError(f"the save was given up: {reason}")
            file.abandon(reason)


def _path(keys: Keys) -> str:
    """Return the path in the file of the value at these keys of a state dict."""
    return "/".join(map(str, keys))


def _check_storable(fqn: str, properties: Any) -> None:
    """Raise for tensors that HDF5 has no form for."""
    reason = ""
    if properties.layout is not torch.strided:
        reason = f"a sparse tensor of layout {properties.layout} (save .to_dense(), or its parts)"
    elif stored_dtype(properties.dtype) is None:
        reason = f"a tensor of dtype {name_of(properties.dtype)} (convert it to another dtype)"
    if reason:
        raise TypeError(f"HDF5Writer: the state dict holds {reason} at {fqn!r}.")


def _paths_of(plans: list[SavePlan]) -> dict[str, Keys]:
    """Return by name the keys of each value; planners that flatten dicts report them."""
    paths: dict[str, Keys] = {}
    for plan in plans:
        known = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        paths |= {i.index.fqn: tuple(known.get(i.index.fqn, (i.index.fqn,))) for i in plan.items}
    return paths


def _check_paths(paths: Mapping[str, Keys], tensors: Iterable[str]) -> None:
    """Raise for keys that cannot be paths in a file, and for tensors whose paths conflict."""
    for path in paths.values():
        if "/" in str(path[0]):
            raise ValueError(
                f"HDF5Writer: the key {path[0]!r} at the top of the state dict contains '/', which "
                "separates groups of the file. Put the state dict under a name: "
                '{"model": state}.'
            )
        check_path(_path(path))
    check_disjoint([_path(paths[fqn]) for fqn in tensors])


def _header(step: int, num_ranks: int) -> Header:
    strategy = world_strategy()
    library = "none"
    if strategy is not None:
        library = context.collectives_of(strategy).channel.transport.library
    return Header(step=step, num_replicas=num_ranks, mpi_library=library)


def _item_of(path: str, item: WriteItem) -> Item:
    """Return the dataset for a tensor, in its global shape."""
    data: Any = item.tensor_data
    dtype: Any = stored_dtype(data.properties.dtype)
    own = name_of(data.properties.dtype)
    return variable_item(path, None, shape=tuple(data.size), dtype=dtype, tensor_dtype=own)


def _with_tasks(plans: list[SavePlan], room: Room) -> list[SavePlan]:
    """Return the plans, each with the task of its rank."""
    workers: list[Worker] = [plan.storage_data for plan in plans]
    sizes = {name: each.num_bytes for name, each in room.extents.items()}
    is_spread = len({host for host, _ in workers}) > 1
    # Keys stay in the store after a save, so the next save needs different ones.
    meeting = Meeting(f"mpistrat/dcp/{uuid.uuid4().hex}", len(plans))
    result = []
    for rank, (plan, runs) in enumerate(zip(plans, runs_of_ranks(sizes, len(plans)), strict=True)):
        paths = _paths_of([plan])
        names = {_path(paths[i.index.fqn]) for i in plan.items if i.tensor_data is not None}
        own = room.only(names.union(each.name for each in runs))
        num_threads = divide_work({}, workers, rank).num_threads
        task = _Task(own, runs, num_threads, is_spread, meeting)
        result.append(dataclasses.replace(plan, storage_data=task))
    return result


def _write_shard(
    handle: int, item: WriteItem, name: str, room: Room, planner: SavePlanner
) -> WriteResult:
    data: Any = item.tensor_data
    tensor: Any = planner.resolve_data(item)
    box = Box(tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    values = on_host(tensor)
    if values.shape != box.sizes or values.dtype.itemsize != room.extents[name].item_bytes:
        raise ValueError(
            f"{_WHAT}: the plan has a part of shape {box.sizes} of {item.index.fqn!r}, but it "
            f"is a tensor of {name_of(tensor.dtype)} of shape {values.shape}. The state dict "
            "must not change during a save."
        )
    return WriteResult(item.index, values.nbytes, room.write_part(handle, name, box, values))


def _write_value(item: WriteItem, path: tuple[str | int, ...], planner: SavePlanner) -> WriteResult:
    """Return the JSON of a value, which the coordinator writes."""
    owner, *below = map(str, path)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        with torch.serialization.safe_globals(_classes_of_numpy()):
            value = torch.load(data, weights_only=True)
    except Exception:  # torch's error for other classes has no public name
        raise TypeError(
            f"{_WHAT}: the value at {item.index.fqn!r} of the state dict is neither a tensor nor a "
            "NumPy array, number, text, boolean, None, or a list, tuple or dict of these. Convert "
            "it, or leave it out of the state dict."
        ) from None
    text = dump_json(json_part(value, owner, "/".join(below)))
    return WriteResult(item.index, len(text), text)


@functools.cache
def _classes_of_numpy() -> list[Any]:
    """Return what a pickle of NumPy's arrays and scalars names, which torch refuses by default."""
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGUS"}
    # Their modules have other names in NumPy 1.
    reconstruct = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    # Pickle makes no bytes, those of an empty array, by their class.
    return [np.ndarray, np.dtype, reconstruct, scalar, bytes, *dtypes]


def _like(tensors: Mapping[str, str], fqn: str, leaf: Any) -> Any:
    return torch.empty((), device="meta") if fqn in tensors else leaf


def _check_reversible(leaves: dict[str, Any], paths: dict[str, Keys]) -> None:
    """Raise for values that a load would look up under different names."""
    found, _ = flatten_state_dict(unflatten_state_dict(leaves, paths))
    for fqn in leaves.keys() ^ found.keys():
        raise ValueError(
            f"HDF5Writer: the value at {fqn!r} of the state dict could not be found again in the "
            "file. Use a planner with flatten_state_dict=True."
        )
