"""StorageReader of torch.distributed.checkpoint that reads checkpoints in HDF5."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import uuid
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mpistrat.checkpoint.digests import check_digest
from mpistrat.checkpoint.format import VariableInfo, checked_path
from mpistrat.checkpoint.raw_io import (
    Extent,
    digests_in_file,
    divide_work,
    read_box,
    share_out,
    this_worker,
)
from mpistrat.checkpoint.reader import CheckpointReader, naming_damage, open_checkpoint
from mpistrat.checkpoint.state_json import join_state, tied_paths
from mpistrat.errors import CheckpointCorruptError
from mpistrat.sharding import Box
from mpistrat.torch.store_barrier import Meeting
from mpistrat.torch.stored import as_tensor, on_host, tensor_dtype

_WHAT = "HDF5Reader"


@dataclasses.dataclass(frozen=True)
class _Task:
    """Instructions of the coordinator for one rank, in the plan of that rank."""

    verified: tuple[str, ...]
    """The datasets whose digests this rank checks."""
    num_threads: int
    meeting: Meeting


class HDF5Reader(StorageReader):
    """Storage of `torch.distributed.checkpoint.load`: an HDF5 file.

    It reads files that `HDF5Writer` and `mpistrat.Checkpoint` have written, on any number of ranks.
    Each rank reads its own shards, one hyperslab per shard. All digests of this data are checked
    before any tensor changes; the ranks share this work. As with torch's own storages, tensors of a
    different dtype are converted.

    **Local**; `torch.distributed.checkpoint.load` is **Collective** over its process group. All
    ranks must see the file.

    Parameters
    ----------
    path : str or path
        The file to read, the same on all ranks. ``checkpoint_id=`` of a load replaces it.

    Raises
    ------
    TypeError
        If `path` is not a path.

    Notes
    -----
    A load raises its errors in a ``CheckpointException`` of torch, by rank:
    `CheckpointError` if there is no such file, `CheckpointCorruptError` if it is damaged.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> model = torch.nn.Linear(64, 10)
    >>> state = {"model": model.state_dict(), "step": 0}
    >>> metadata = dcp.save(state, storage_writer=mst.HDF5Writer("last.h5"))
    >>> dcp.load(state, storage_reader=mst.HDF5Reader("last.h5"))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = checked_path(_WHAT, path)
        self._contents = _Contents()

    def __repr__(self) -> str:
        return f"HDF5Reader({self._path!r})"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of the file `checkpoint_id` if it is passed.

        **Local**. torch calls it at the start of each load.

        Parameters
        ----------
        checkpoint_id : str or path, optional
            Path of the file to read. By default the path stays as it is.
        """
        self._contents = _Contents()
        if checkpoint_id is not None:
            self._path = checked_path(_WHAT, checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the file. Local."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is the path of a file.

        **Local**.

        Parameters
        ----------
        checkpoint_id : str or path
            The path to look at.

        Returns
        -------
        bool
            Whether there is such a file. Its contents are not examined.
        """
        return os.path.isfile(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return a description of the file's contents, without the values of tensors.

        **Local**.

        Returns
        -------
        torch.distributed.checkpoint.Metadata
            Names, shapes and dtypes of the tensors, and names of the other values.

        Raises
        ------
        CheckpointError
            If there is no such file.
        CheckpointCorruptError
            If it is damaged.
        """
        self._contents = _Contents.of(self._path)
        return self._contents.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: `read_metadata` has read the description already.

        **Local**.

        Parameters
        ----------
        metadata : torch.distributed.checkpoint.Metadata
            The result of `read_metadata`. It is not used.
        is_coordinator : bool
            Whether this rank coordinates the load. It is not used.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Report which cores this rank has, and which datasets it reads.

        **Local**.

        Parameters
        ----------
        plan : torch.distributed.checkpoint.LoadPlan
            The tensors and values that this rank loads.

        Returns
        -------
        torch.distributed.checkpoint.LoadPlan
            The same plan, with a description of this rank for the coordinator.
        """
        names = {self._contents.names[each] for each in _tensors_of(plan)}
        return dataclasses.replace(plan, storage_data=(this_worker(), names))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Divide the datasets to read among the ranks, which check their digests.

        **Local**; only the coordinator calls it.

        Parameters
        ----------
        plans : list of torch.distributed.checkpoint.LoadPlan
            The plans of all ranks, in their order.

        Returns
        -------
        list of torch.distributed.checkpoint.LoadPlan
            The plans, each with the datasets whose digests its rank checks.
        """
        workers = [plan.storage_data[0] for plan in plans]
        names = set().union(*(plan.storage_data[1] for plan in plans))
        sizes = {name: self._contents.infos[name].size_bytes for name in names}
        owners = share_out(sizes, range(len(plans)))
        meeting = Meeting(f"mpistrat/dcp/{uuid.uuid4().hex}", len(plans))
        return [
            dataclasses.replace(
                plan,
                storage_data=_Task(
                    tuple(name for name, owner in owners.items() if owner == rank),
                    divide_work({}, workers, rank).num_threads,
                    meeting,
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Check digests, then fill this rank's tensors and values.

        **Collective** over the ranks of the load.

        Parameters
        ----------
        plan : torch.distributed.checkpoint.LoadPlan
            What this rank reads, from `prepare_global_plan`.
        planner : torch.distributed.checkpoint.LoadPlanner
            Receives the values, and returns the tensors to fill.

        Returns
        -------
        torch.futures.Future
            Complete already; its value is ``None``.

        Raises
        ------
        CheckpointCorruptError
            If the data that this rank checks or reads is damaged.
        """
        task: _Task = plan.storage_data
        contents = self._contents
        with contents.open(self._path) as (handle, reader):
            with task.meeting.stage("verified") as verified:
                contents.verify(self._path, handle, reader, task)
            if verified.is_everywhere():  # else a different rank raises
                for item in plan.items:
                    if item.type is LoadItemType.BYTE_IO:
                        planner.load_bytes(item, contents.value(item.storage_index.fqn))
                    else:
                        with naming_damage(self._path, item.storage_index.fqn):
                            contents.fill(handle, reader, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _tensors_of(plan: LoadPlan) -> set[str]:
    return {i.storage_index.fqn for i in plan.items if i.type is not LoadItemType.BYTE_IO}


class _Contents:
    """The contents of a file: torch's names of tensors and values, and their places in it."""

    def __init__(self) -> None:
        self.infos: dict[str, VariableInfo] = {}
        self.names: dict[str, str] = {}
        """The dataset of each tensor."""
        self._extents: dict[str, Extent] = {}
        """Extents of the contiguous datasets."""
        self._leaves: dict[str, Any] = {}
        self._paths: Any = {}

    @classmethod
    def of(cls, path: str) -> _Contents:
        """Return the contents of the file `path`."""
        self = cls()
        with open_checkpoint(path) as reader:
            self.infos = reader.variables
            self._extents = reader.extents()
            nested, ties = _nested(reader)
        self._leaves, self._paths = flatten_state_dict(nested)
        for fqn, leaf in self._leaves.items():
            if isinstance(leaf, torch.Tensor):
                name = "/".join(map(str, self._paths[fqn]))
                self.names[fqn] = ties.get(name, name)
        return self

    def metadata(self) -> Metadata:
        """Return the metadata that torch's planners need."""
        described = {fqn: _describe(leaf) for fqn, leaf in self._leaves.items()}
        return Metadata(described, planner_data=self._paths)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[tuple[int, CheckpointReader | None]]:
        """Open the file for raw reads, and as a checkpoint if some datasets need that."""
        with contextlib.ExitStack() as stack:
            if self._extents.keys() == self.infos.keys():
                handle = os.open(path, os.O_RDONLY)
                stack.callback(os.close, handle)
                yield handle, None
            else:
                reader = stack.enter_context(open_checkpoint(path))
                yield reader.handle, reader

    def verify(self, path: str, handle: int, reader: CheckpointReader | None, task: _Task) -> None:
        """Check the digests of this rank's task, or raise an error that names all damage."""
        extents = {name: self._extents[name] for name in task.verified if name in self._extents}
        damage = []
        found = {}
        try:
            found = digests_in_file(handle, extents, task.num_threads)
        except OSError as reason:
            damage.append(f"The checkpoint {path} is damaged: {reason}.")
        for name in task.verified:
            try:
                if name in found:
                    with naming_damage(path, name):
                        check_digest(found[name].digest, self.infos[name].digest)
                elif name not in extents and reader is not None:
                    for _ in reader.read_pieces(name):
                        pass
            except CheckpointCorruptError as error:
                damage.append(str(error))
        if damage:
            raise CheckpointCorruptError("\n".join(damage))

    def value(self, fqn: str) -> io.BytesIO:
        """Return a value in the form that torch's planners take."""
        data = io.BytesIO()
        torch.save(self._leaves[fqn], data)
        data.seek(0)
        return data

    def fill(
        self, handle: int, reader: CheckpointReader | None, item: ReadItem, planner: LoadPlanner
    ) -> None:
        """Read one part of a tensor into the program's tensor."""
        fqn = item.storage_index.fqn
        name = self.names[fqn]
        info = self.infos[name]
        box = Box(info.shape, tuple(item.storage_offsets), tuple(item.lengths))
        target: torch.Tensor = planner.resolve_tensor(item).detach()
        own = tensor_dtype(info.dtype, info.dtype_name)
        is_direct = (
            name in self._extents
            and target.dtype == own
            and target.device.type == "cpu"
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        )
        # If direct, the array is the memory of the tensor: the file is read into it without a copy.
        array = on_host(target) if is_direct else np.empty(box.sizes, info.dtype)
        if name in self._extents:
            read_box(handle, self._extents[name], box, array)
        elif reader is not None:
            reader.read_part(name, box.offsets, array)
        if not is_direct:
            target.copy_(as_tensor(array, info.dtype_name))
        planner.commit_tensor(item, target)


def _nested(reader: CheckpointReader) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state dict of a file, its tensors without values, and the paths of tied ones."""
    nested: dict[str, Any] = {}
    ties: dict[str, str] = {}
    owned: set[str] = set()
    for owner in reader.state_paths:
        begin = f"{owner}/"
        rest = reader.read_state(owner)
        names = [name for name in reader.variables if name.startswith(begin)]
        owned.update(names)
        with naming_damage(reader.path, owner):
            blank = {name.removeprefix(begin): _blank(reader.variables[name]) for name in names}
            of_file = {id(each) for each in blank.values()}
            _put(nested, owner, _with_tensors(join_state(rest, blank, {}), of_file))
            ties |= {begin + name: begin + of for name, of in tied_paths(rest).items()}
    for name, info in reader.variables.items():
        if name not in owned:
            with naming_damage(reader.path, name):
                dtype = tensor_dtype(info.dtype, info.dtype_name)
                _put(nested, name, torch.empty(info.shape, dtype=dtype, device="meta"))
    return nested, ties


def _blank(info: VariableInfo) -> np.ndarray:
    return np.broadcast_to(np.zeros((), info.dtype), info.shape)


def _with_tensors(value: Any, of_file: Set[int]) -> Any:
    """Return a state in which arrays that are datasets, by their id, are tensors too."""
    if id(value) in of_file:
        dtype = tensor_dtype(value.dtype, value.dtype.name)
        return torch.empty(value.shape, dtype=dtype, device="meta")
    if isinstance(value, dict):
        return {key: _with_tensors(item, of_file) for key, item in value.items()}
    return [_with_tensors(each, of_file) for each in value] if isinstance(value, list) else value


def _put(nested: dict[str, Any], path: str, value: Any) -> None:
    *parents, name = path.split("/")
    for parent in parents:
        nested = nested.setdefault(parent, {})
    nested[name] = value


def _describe(leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(leaf, torch.Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * leaf.dim()), leaf.size())
    return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), leaf.size(), [whole])
