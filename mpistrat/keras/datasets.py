"""`HDF5Dataset` for Keras: this rank's part of each global batch, for `fit` and `evaluate`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

import mpistrat.torch as mst
from mpistrat import nests
from mpistrat.data.dataset import Dataset
from mpistrat.keras.askers import (
    asker,
    call_of_keras,
    has_steps_per_epoch,
    learns_shapes,
    training_data,
)
from mpistrat.keras.batch_sizes import BatchSizes, starts_of

_NO_WORKERS = (
    "mpistrat.keras.HDF5Dataset needs workers=1 and use_multiprocessing=False: the batches are "
    "taken in order, and mpistrat reads them in its own threads; a fork of an MPI rank may not "
    "communicate. Use prefetch(n) of the dataset to prepare batches ahead."
)


class HDF5Dataset(keras.utils.PyDataset):
    """The part of each global batch that this rank gets, for ``fit``, ``evaluate``, ``predict``.

    **Collective** over `group`: every rank creates one from the same `dataset`. Each epoch of
    ``fit`` is the next pass over the data. The order is the same as in
    ``Strategy.distribute_dataset``, at any number of ranks; ``shuffle=`` of ``fit``
    does not change it, so shuffle by ``dataset.shuffle(seed)``. With ``steps_per_epoch``, an epoch
    continues where the last one ended, and the next pass follows. Batches are tensors that share
    the memory of the arrays that were read.

    One field of the dataset is the input, two are ``(x, y)``, three ``(x, y, sample_weight)``. A
    dict of fields is the input as it is.

    In ``evaluate`` and ``predict`` every example counts once. If a short batch leaves a rank
    without examples, it is joined with the batch before it, on all ranks.

    ``len()`` is the number of batches of an epoch; after a restored position within an epoch, the
    number of those that are left.

    Parameters
    ----------
    dataset : mpistrat.data.Dataset
        Dataset whose batches are the global batches, of files (``from_hdf5``) or of arrays
        (``from_arrays``). The same on all ranks. It may be endless (``repeat()``), with
        ``steps_per_epoch``.
    group : torch.distributed.ProcessGroup, optional
        The ranks that share each batch. Default: the world group. A single process needs no group.
    workers : int
        Must be 1.
    use_multiprocessing : bool
        Must be False.

    Raises
    ------
    LaunchError
        If the process is one of several, and there is no process group.
    TypeError
        If `dataset` is not an `mpistrat.data.Dataset`.
    ValueError
        If `dataset` was not batched, has an unknown number of batches, or more than three fields.
        In ``fit``: if a batch is shorter than the others, or leaves a rank without examples; if
        Keras would divide the batches again, by ``auto_shard_dataset``; if the same object is
        evaluated during its own training.
    DataError
        If the ranks pass different datasets, or files are missing or damaged. In ``evaluate``: if
        all batches leave a rank without examples.

    Warns
    -----
    UserWarning
        In ``fit``, if the global batch does not divide evenly among the ranks.

    Examples
    --------
    >>> fields = ("train/image", "train/label")
    >>> batches = ms.data.Dataset.from_hdf5("data/digits.h5", fields).shuffle(1)
    >>> data = mk.HDF5Dataset(batches.batch(64, drop_remainder=True))
    >>> image, label = next(iter(data))
    >>> data.set_epoch(3)
    >>> state = data.state_dict()
    >>> state["pass"], state["batch"]
    (3, 0)
    >>> data.load_state_dict(state)
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        group: dist.ProcessGroup | None = None,
        workers: int = 1,
        use_multiprocessing: bool = False,
    ) -> None:
        _check_workers(workers, use_multiprocessing)
        super().__init__()
        self._source = mst.HDF5Dataset(dataset, group=group)
        self.strategy: Any = self._source.strategy
        """The strategy of the group, for a checkpoint; ``None`` without one."""
        count = self._source.num_batches
        is_endless = dataset.cardinality() == -1
        if count is None and not is_endless:
            raise ValueError(
                f"Keras needs the number of batches of {dataset}, which is unknown. Use "
                "Dataset.from_hdf5, from_arrays or from_source, or repeat() with steps_per_epoch."
            )
        self._count = count
        self._size = 1 if self.strategy is None else self.strategy.size
        self._sizes = BatchSizes(dataset, self._size)
        self._batches: Iterator[Any] | None = None
        """The batches of the current pass, ``None`` between passes."""
        self._start = self._number = 0
        """The first batch of the current or next iteration, and the next one."""
        self._first: Any = None
        """The batch from which Keras has learnt the shapes, and the position before it."""
        self._begins = False
        """Whether Keras has begun an iteration since the last batch."""
        self._ends_at_once = False
        """Whether iterations have no batch."""

    def __repr__(self) -> str:
        return f"<keras.HDF5Dataset of {self._source!r}>"

    @property
    def workers(self) -> int:
        """Always 1."""
        return 1

    @workers.setter
    def workers(self, value: int) -> None:
        _check_workers(value, False)

    @property
    def use_multiprocessing(self) -> bool:
        """Always False."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        _check_workers(1, value)

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError(f"{self!r} is endless, so it has no length.")
        return self._count - self._start

    @property
    def num_batches(self) -> int | None:
        """The number of batches per epoch, as Keras needs it; ``None`` if endless."""
        asks = asker()
        if asks in ("get_data_adapter", "_get_iterator"):
            self._begins = True
            self._check_call()
        if self._ends_at_once and asks in ("_get_iterator", "_finite_generator"):
            return 0
        call = call_of_keras(self)
        if self._count is None or (call == "fit" and has_steps_per_epoch()):
            # Without an end, Keras keeps one iterator for all epochs. Of a number it only checks
            # here that shuffle=True has a meaning, or warns.
            return 1 if asks == "get_data_adapter" else None
        # Keras asks for the length of all epochs at once. If the first of them is resumed, it is
        # shorter, and ends when the batches end.
        start = self._start if asks == "_finite_generator" and not self._leaves_pass() else 0
        if call in ("evaluate", "predict"):
            return len(self._groups(start))
        return self._count - start

    def __getitem__(self, index: int) -> Any:
        # Keras permutes the indices for shuffle=True, but the order is the dataset's.
        if learns_shapes():
            if self._first is None:
                self._begin()
                position = self._source.state_dict()
                self._first = self._take(), position
            return self._first[0]
        if self._first is not None:
            (batch, _), self._first = self._first, None
        else:
            self._begin()
            batch = self._take()
        self._begins = False
        return batch

    def __iter__(self) -> Iterator[Any]:
        self._begins = True
        self._begin()
        self._begins = False
        for _ in itertools.repeat(None) if self._count is None else range(len(self)):
            yield self[0]

    def _begin(self) -> None:
        """Leave a pass that an earlier iteration has not ended, if a new iteration begins."""
        if self._leaves_pass():
            self._close()
            self._source.set_epoch(self._source.state_dict()["pass"] + 1)
            self._start = self._number = 0
        if self._batches is None:
            self._batches = iter(self._source)

    def _leaves_pass(self) -> bool:
        return self._begins and self._batches is not None and self._first is None

    def _take(self) -> Any:
        """Return the next batch; in an evaluation, several that are joined."""
        count = 1
        if self._count is not None and call_of_keras(self) in ("evaluate", "predict"):
            starts = starts_of(self._groups(self._start))
            place = starts.index(self._number - self._start)
            count = starts[place + 1] - starts[place]
        assert self._batches is not None
        batch = _joined([next(self._batches) for _ in range(count)])
        self._number += count
        if self._number == self._count:
            # The pass ends with its last batch, at which Keras stops: the position is then the next
            # pass, and the ranks hear of errors that others had.
            next(self._batches, None)
            self._close()
            self._start = self._number = 0
        return _as_arguments(batch)

    def _groups(self, start: int) -> list[int]:
        """Return how many batches each step of an evaluation joins, from batch `start` on."""
        if self._size == 1:
            return [1] * ((self._count or 0) - start)
        groups = self._sizes.groups(self._pass())
        starts = starts_of(groups)
        if start not in starts:
            return [1] * ((self._count or 0) - start)
        return groups[starts.index(start) :]

    def _pass(self) -> int:
        number: int = self.state_dict()["pass"]
        return number + 1 if self._leaves_pass() else number

    def _close(self) -> None:
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]
        self._batches = None

    def _check_call(self) -> None:
        """Raise for a call of Keras that would use the batches wrongly."""
        call = call_of_keras(self)
        distribution = keras.distribution.distribution()
        if distribution is not None and distribution.num_processes > 1:
            if distribution.auto_shard_dataset:
                raise ValueError(
                    "The distribution of Keras has auto_shard_dataset=True: each rank would take "
                    "only some of the batches, of which it gets its own part already. Set "
                    "distribution.auto_shard_dataset = False, or let mpistrat.keras.init() set "
                    "the distribution."
                )
            if distribution.num_data_shards != self._size:
                raise ValueError(
                    f"The distribution of Keras has {distribution.num_data_shards} data shards, "
                    f"but {self._size} ranks share each batch of this dataset. Pass group=, the "
                    "ranks that hold different data."
                )
        if call == "fit":
            self._sizes.check_for_fit(self._pass())
        elif call is not None and training_data() is self:
            raise ValueError(
                f"This HDF5Dataset is being trained on, and {call} would take batches out of its "
                f"order. Create a second one for {call}."
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Local; call it on every rank.

        A position within this epoch that `load_state_dict` has restored is kept.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0 on; the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `epoch` is not an integer of at least 0.
        """
        self._source.set_epoch(epoch)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that a step has taken. Local.

        Returns
        -------
        dict
            JSON values, the same on all ranks. The position is valid at any number of ranks.
        """
        return self._source.state_dict() if self._first is None else self._first[1]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next batch be the one at a position. Local; call it on every rank.

        Parameters
        ----------
        state : dict
            A position that `state_dict` returned; the same on all ranks.

        Raises
        ------
        TypeError, ValueError
            If `state` is not a position, or not a position in this dataset.
        """
        self._source.load_state_dict(state)
        self._forget()

    def _forget(self) -> None:
        """Begin again at the position of the source."""
        self._close()
        self._first, self._ends_at_once = None, False
        position = self._source.state_dict()
        if position["batch"] == self._count:  # the end of a pass, as other iterators save it
            position = {"pass": position["pass"] + 1, "batch": 0}
            self._source.load_state_dict(position)
        self._number = position["batch"]
        self._start = 0 if self._count is None else self._number


def end_at_once(data: HDF5Dataset, do: bool) -> None:
    """Let iterations over `data` have no batch, or end that. Local."""
    data._ends_at_once = do


def _check_workers(workers: Any, use_multiprocessing: Any) -> None:
    if workers != 1 or use_multiprocessing:
        raise ValueError(
            f"workers is {workers!r} and use_multiprocessing is {use_multiprocessing!r}. "
            f"{_NO_WORKERS}"
        )


def _as_arguments(batch: Any) -> Any:
    """Return a batch as Keras takes it: a dict, or a tuple of one to three parts."""
    if isinstance(batch, dict):
        return batch
    if not isinstance(batch, tuple | list):
        return (batch,)
    if not 1 <= len(batch) <= 3:
        raise ValueError(
            f"The dataset has {len(batch)} fields, but Keras takes x, y and sample_weight. Choose "
            "up to three, or map them to nests, such as ((a, b), y)."
        )
    return tuple(batch)


def _joined(batches: list[Any]) -> Any:
    """Return consecutive batches as one."""
    if len(batches) == 1:
        return batches[0]
    rows, structure = zip(*map(nests.flatten, batches), strict=True)
    return nests.unflatten(structure[0], [_concatenated(each) for each in zip(*rows, strict=True)])


def _concatenated(parts: tuple[Any, ...]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else parts[-1]
