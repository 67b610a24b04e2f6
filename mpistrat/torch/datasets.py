"""IterableDataset of PyTorch: this rank's part of each global batch, as tensors."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from mpistrat import nests
from mpistrat.arguments import as_bool, as_integer
from mpistrat.data.dataset import Dataset, pipeline_of, policy_of
from mpistrat.data.hdf5.source import Hdf5Source
from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import is_one_of_several
from mpistrat.ragged import Ragged
from mpistrat.settings import environment
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.strategies.one_replica import OneDeviceStrategy
from mpistrat.strategies.strategy import Strategy
from mpistrat.torch.group_strategy import strategy_of_group
from mpistrat.values import localize

_NO_WORKERS = (
    "num_workers must be 0: mpistrat reads in threads, and a fork of a rank may not "
    "communicate. Use DataLoader(dataset, batch_size=None), and prefetch(n) of the dataset to "
    "prepare batches ahead."
)
_NO_BATCH_SIZE = (
    "batch_size must be None: the dataset yields batches already, and the loader would stack "
    "them. Use DataLoader(dataset, batch_size=None), and batch(global_batch_size) of the dataset."
)


class HDF5Dataset(IterableDataset[Any]):
    """The part of each global batch that this rank gets, as tensors.

    **Collective** over `group`: every rank creates one from the same `dataset`. Iterate over it
    directly, or through ``DataLoader(dataset, batch_size=None)``. Each iteration is the next epoch.
    The order is the same as in ``Strategy.distribute_dataset``: global batch k holds
    the same examples at any number of ranks, and rank r gets its r-th slice. If the last batch is
    short, some ranks may get no examples of it: their tensors have length 0, whose mean is NaN.
    Drop such a batch by ``batch(..., drop_remainder=True)``, or let DDP continue without these
    ranks by ``Join``.

    Tensors share the memory of the arrays that were read, without a copy, and nothing else writes
    to it. Values that a function passed to `map` returns are yielded unchanged, unless they are
    arrays. Arrays of a dtype that PyTorch does not have, such as strings, remain NumPy arrays. A
    `Ragged`, which ``ragged_batch`` returns, becomes a nested tensor in the jagged layout, whose
    ``values()`` and ``offsets()`` share its memory, even on a rank that gets no example of a batch.

    ``len()`` of the dataset and of its loader is `num_batches`, and raises TypeError if that is
    unknown.

    Parameters
    ----------
    dataset : mpistrat.data.Dataset
        Dataset whose batches are the global batches. The same on all ranks.
    group : torch.distributed.ProcessGroup, optional
        A group of any backend, such as mpistrat, gloo or NCCL. Default: the world group. A single
        process needs no group.
    pin_memory : bool
        Whether tensors are in page-locked memory, from which copies to an accelerator can overlap
        with computation. Files are read straight into it; other tensors are copied, as
        ``DataLoader(pin_memory=True)`` does with all tensors.

    Raises
    ------
    LaunchError
        If the process is one of several, and there is no process group.
    TypeError
        If this rank is not a member of `group`, or `dataset` is not an `mpistrat.data.Dataset`.
    ValueError
        If `dataset` was not batched.
    DataError
        If the ranks pass different datasets, or files are missing or damaged.

    Examples
    --------
    >>> fields = ("train/image", "train/label")
    >>> batches = ms.data.Dataset.from_hdf5("data/digits.h5", fields).shuffle(1).batch(64)
    >>> dataset = mst.HDF5Dataset(batches)
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=None)
    >>> dataset.set_epoch(3)
    >>> image, label = next(iter(loader))
    >>> dataset.load_state_dict(dataset.state_dict())
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        group: dist.ProcessGroup | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._pins = as_bool("pin_memory", pin_memory) and _can_pin()
        if self._pins:
            dataset = _read_into_pinned_memory(dataset)
        self.strategy = _strategy_of(group)
        """The strategy of the group, for a checkpoint; ``None`` without one.

        For a group that MPI does not run, it has only rank, size, `barrier`, `broadcast_object`
        and `gather_objects`. Everything else raises `NotImplementedError`.
        """
        if isinstance(self.strategy, MPIStrategy):
            dist.barrier(group)  # after pending asynchronous operations
        divides = self.strategy or OneDeviceStrategy()
        self._batches = divides.experimental_distribute_dataset(dataset)
        self._is_restored = False

    def __repr__(self) -> str:
        return f"<HDF5Dataset of {self._batches!r}>"

    @property
    def num_batches(self) -> int | None:
        """The number of batches per epoch, on each rank; ``None`` if endless or unknown. Local."""
        count = self._batches.cardinality()
        return None if count < 0 else count

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(
                f"the number of batches of {self!r} is unknown: it is endless, or filtered. Count "
                "steps instead, or take(n) of the dataset."
            )
        return self.num_batches

    def __bool__(self) -> bool:
        return True  # of unknown length too

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Local.

        For loops that number their epochs themselves; call it on every rank. A position within this
        epoch that `load_state_dict` has restored is kept.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0 on; the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `epoch` is not an integer of at least 0.
        """
        epoch = as_integer("epoch", epoch, 0)
        if not (self._is_restored and self.state_dict()["pass"] == epoch):
            self._batches.load_state_dict({"pass": epoch, "batch": 0})

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded. Local.

        Returns
        -------
        dict
            JSON values, the same on all ranks. The position is valid at any number of ranks.
        """
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration resume at a position. Local; call it on every rank.

        Parameters
        ----------
        state : dict
            A position that `state_dict` returned; the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `state` is not a position, or not a position in this dataset.
        """
        self._batches.load_state_dict(state)
        self._is_restored = True

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ValueError(_NO_WORKERS)
        # A loader does not tell its dataset that it batches; its fetcher is the caller here.
        fetcher = sys._getframe(1).f_locals.get("self")
        if getattr(fetcher, "auto_collation", False):
            raise ValueError(_NO_BATCH_SIZE)
        return self._elements()

    def _elements(self) -> Iterator[Any]:
        # The epoch begins with its first batch: loaders also create iterators just for their state.
        self._is_restored = False
        with closing(iter(self._batches)) as elements:
            yield from map(functools.partial(nests.map_nest, self._tensor), elements)

    def _tensor(self, leaf: Any) -> Any:
        leaf = localize(leaf)
        if isinstance(leaf, Ragged):
            values, offsets = map(self._tensor, (leaf.values, leaf.row_splits))
            return torch.nested.nested_tensor_from_jagged(values, offsets)
        if not isinstance(leaf, np.ndarray):
            return leaf
        return _pinned(leaf) if self._pins else _as_tensor(leaf)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"An HDF5Dataset cannot be pickled. {_NO_WORKERS}")


def _strategy_of(group: dist.ProcessGroup | None) -> Strategy | None:
    """Return the strategy of `group`, ``None`` for a single process."""
    if group is not None or dist.is_initialized():
        return strategy_of_group(group)
    if is_one_of_several() or environment().get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            "HDF5Dataset: this process is one of several, but there is no process group, so each "
            "would read all data. Call mpistrat.torch.init() or "
            "torch.distributed.init_process_group(...) first."
        )
    return None


def _as_tensor(array: np.ndarray) -> Any:
    """Return a tensor that shares the memory of `array`; `array` if PyTorch lacks its dtype."""
    if _torch_dtype(array.dtype) is None:
        return array
    # An array that a function passed to `map` returns may be read-only, reversed, or in a different
    # byte order.
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except ValueError:
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


@functools.cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None


def _can_pin() -> bool:
    """Return whether there is an accelerator, and warn as PyTorch's loaders do if not."""
    if torch.accelerator.is_available():
        return True
    warnings.warn(
        "HDF5Dataset: pin_memory is True, but there is no accelerator, so batches are in ordinary "
        "memory.",
        stacklevel=3,
    )
    return False


def _read_into_pinned_memory(dataset: Any) -> Any:
    """Return `dataset` with its files read into page-locked memory."""
    pipeline = pipeline_of(dataset) if isinstance(dataset, Dataset) else None
    if pipeline is None or not isinstance(pipeline.source, Hdf5Source):
        return dataset
    source = pipeline.source.with_memory(_pinned_array)
    return Dataset(dataclasses.replace(pipeline, source=source), policy_of(dataset))


def _pinned_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array in page-locked memory; in ordinary memory if PyTorch lacks the dtype."""
    known = _torch_dtype(dtype)
    if known is None:
        return np.empty(shape, dtype)
    array: np.ndarray = torch.empty(shape, dtype=known, device="cpu", pin_memory=True).numpy()
    return array


def _pinned(array: np.ndarray) -> Any:
    """Return a tensor in page-locked memory: that of `array`, or a copy."""
    # PyTorch waits for copies before it reuses the memory only for tensors that it allocated.
    owner: Any = array.base
    if isinstance(owner, torch.Tensor) and owner.is_pinned():
        return owner
    if _torch_dtype(array.dtype) is None:
        return array
    tensor = _as_tensor(array)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
        tensor
    )
