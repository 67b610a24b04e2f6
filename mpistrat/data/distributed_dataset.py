"""Distributed datasets: the part of each batch that a rank reads, and its copy to the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrat import nests, values
from mpistrat.arrays import Array, Device, host_view, is_array, is_number, is_on_host, place
from mpistrat.cuda_api import Stream, has_device_dtype, pinned_empty
from mpistrat.data.fingerprint import position_layout
from mpistrat.data.iterators import ElementIterator, Position
from mpistrat.data.pipeline import Pipeline, Prepare
from mpistrat.data.sources.memory import GeneratorSource, generators_of
from mpistrat.data.spec import empty_batch, open_batch
from mpistrat.errors import CollectiveError, DataError
from mpistrat.ragged import Ragged, map_ragged
from mpistrat.system.text import rank_list, ranks_by_value
from mpistrat.user_warnings import note_part, warn_once
from mpistrat.values import PerReplica

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

_NEXT_BATCH = "next batch"
"""Name of the collectives of an iteration in error messages."""


class DistributedDataset:
    """The batches of a dataset; each rank reads only its part of a batch.

    `Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`
    create it. Each element is a nest of `PerReplica`. Iterating again starts the next epoch, that
    is, the next pass over the data. Epochs are counted from 0; those that a loop leaves early count
    too.

    If one rank cannot read or map an element, for example because its part of a file is damaged,
    that rank raises the error. The other ranks raise a `CollectiveMismatchError` that names it, at
    their next collective, or at the end of the epoch at the latest.

    Parameters
    ----------
    parts : sequence of ReplicaPart
        One per replica of this rank.
    collectives : Collectives
        The collectives that report an error to the other ranks.
    replicas : ReplicaSet, optional
        The replicas of this rank if it has several.

    Examples
    --------
    >>> batches = strategy.distribute_dataset(ms.data.Dataset.range(8).batch(4))
    >>> batches.cardinality()
    2
    >>> batch = next(iter(batches))
    >>> state = batches.state_dict()
    >>> state["pass"], state["batch"]
    (0, 1)
    >>> batches.load_state_dict(state)
    """

    def __init__(
        self, parts: Sequence[ReplicaPart], collectives: Collectives, replicas: Any = None
    ) -> None:
        self.strategy: Any = None
        """The strategy that divides the dataset, for a checkpoint that saves the position."""
        self._check_context: Callable[[], None] | None = None
        """Raises an error unless the program is in the context of this strategy."""
        self._parts, self._replica_set = parts, replicas
        self._rank_dataset = rank_dataset = parts[0].rank_dataset
        self._collectives = collectives
        self._position = Position()
        self._generators: list[GeneratorSource] = []
        """The generators that must yield the same elements on every rank."""
        if isinstance(rank_dataset, BatchSlices) and collectives.layout.num_replicas > 1:
            self._generators = generators_of(rank_dataset.pipeline.source)

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one rank's element, batch dimension ``None``. Local."""
        return self._rank_dataset.element_spec

    def cardinality(self) -> int:
        """Return the number of elements per epoch. Local.

        Returns
        -------
        int
            At least 0, the same on all ranks; -1 if the dataset is endless, -2 if the number is
            unknown.
        """
        return self._rank_dataset.length

    def __iter__(self) -> ElementIterator:
        pass_number, start, on_step = self._position.begin(self._warn_of_nothing)
        elements = self._elements(pass_number, start)
        on_element = _numbering(pass_number, start)
        return ElementIterator(elements, on_step, self._check_context, self, on_element)

    def __repr__(self) -> str:
        return f"<DistributedDataset {self._rank_dataset}{self._position}>"

    def _warn_of_nothing(self) -> None:
        if self._collectives.layout.num_replicas > 1:
            warn_once(
                f"{self!r} has no batch at all, so a loop over it does nothing. Is the dataset or "
                "the result of a filter empty, or does it have fewer examples than a batch and "
                "drop_remainder=True? Use a smaller batch or drop_remainder=False.",
                key="no batch",
            )

    def _elements(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of a pass; all ranks learn of an error of one. **Collective**."""
        try:
            yield from self._own_elements(pass_number, start)
        # A collective has raised this error on the other ranks too, so they would not take part in
        # a report.
        except CollectiveError:
            raise
        except Exception as error:
            with contextlib.suppress(Exception):  # this rank raises `error`, which says more
                self._meet(error)
            raise
        # A rank without rows of a batch has not seen the errors that other ranks report in it.
        self._meet()
        if self._generators and not self._collectives.is_elastic:
            self._compare_generators()

    def _meet(self, error: Exception | None = None) -> None:
        """Wait for the other ranks at the end of the pass, or report an `error`. **Collective**."""

        def meet() -> None:
            with self._collectives.call(_NEXT_BATCH) as call:
                if error is not None:
                    raise error
                call.agree("the end of the pass")

        self._collectives.as_unit(_NEXT_BATCH, meet)

    def _compare_generators(self) -> None:
        """Warn if a generator has yielded different elements on different ranks. **Collective**."""
        seen_here = [each.seen for each in self._generators]
        of_ranks = self._collectives.gather_json(seen_here, _NEXT_BATCH)
        for number, generator in enumerate(self._generators):
            seen = [of_rank[number] for of_rank in of_ranks]
            # If one rank has stopped earlier, the digests cannot be compared.
            if len({count for count, _ in seen}) == 1 and len({digest for _, digest in seen}) > 1:
                groups = ranks_by_value((rank, digest) for rank, (_, digest) in enumerate(seen))
                warn_once(
                    f"{generator!r} returned different elements on "
                    f"{' and '.join(map(rank_list, groups.values()))}, but every rank keeps its "
                    "slice of the same sequence, so some examples are missing and others are "
                    "repeated. Use the same seed of random generators on every rank, and sort "
                    "sets and lists of files; if each rank has its own data, use "
                    "distribute_datasets_from_function.",
                    key=f"generator {number}",
                )

    def _own_elements(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        """Return this rank's elements of a pass, each array as a `PerReplica`."""
        if self._replica_set is None:
            return self._parts[0].elements(pass_number, start)
        return self._joined_elements(pass_number, start)

    def _joined_elements(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        """Yield elements whose parts are created by the replicas of this rank, one part each."""
        replicas, number = self._replica_set, start
        while True:  # in an elastic job this rank may have got more replicas
            ids = replicas.ids
            # All start at the next batch, so a replica that has moved to this rank continues there.
            parts = [self._part(each).elements(pass_number, number) for each in ids]
            with contextlib.ExitStack() as stack:
                for part in parts:
                    stack.enter_context(contextlib.closing(part))
                while ids == replicas.ids:
                    elements = replicas.each(lambda: next(replicas.own(parts), _END))  # noqa: B023
                    if elements[0] is _END:
                        return
                    number += 1
                    yield self._joined(elements, pass_number, number - 1)
                    # Otherwise this frame would keep the batch while the next one is created.
                    del elements

    def _part(self, replica: int) -> ReplicaPart:
        """Return the part of a replica of this rank."""
        first: int = self._replica_set.ids[0]
        return self._parts[replica - first]

    def _joined(self, elements: Sequence[Any], pass_number: int, number: int) -> Any:
        """Return one element with the components of all replicas on this rank."""
        flat = [nests.flatten(each) for each in elements]
        rows = zip(*(leaves for leaves, _ in flat), strict=True)
        return nests.unflatten(flat[0][1], [self._joined_leaf(row) for row in rows])

    def _joined_leaf(self, leaves: Sequence[Any]) -> Any:
        if not isinstance(leaves[0], PerReplica):
            return leaves[0]
        return self._replica_set.per_replica([leaf.values[0] for leaf in leaves])

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and how many of its batches were returned. Local.

        Returns
        -------
        dict
            JSON values, the same on all ranks. ``pass`` is the number of the epoch, ``batch`` the
            number of batches that were returned, and ``order`` a description of the order of
            examples.
        """
        return self._position.state(self._rank_dataset.layout)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a position: the next ``iter()`` continues that epoch. Local.

        Parameters
        ----------
        state : dict
            A result of `state_dict`, from a dataset with the same files, order and batch size. If
            batches are global, the number of ranks may differ.

        Raises
        ------
        TypeError, ValueError
            If `state` is not a position, or is in the middle of an epoch of a different dataset.
        """
        self._position.load(state, self._rank_dataset.layout, self._rank_dataset.length)


_END = object()


class ReplicaPart:
    """The part of one replica. Its elements are placed on `device`; ``None`` is host memory."""

    def __init__(
        self, rank_dataset: RankDataset, device: Device | None, collectives: Collectives
    ) -> None:
        self.rank_dataset, self.device = rank_dataset, device
        self._collectives = collectives

    def elements(self, pass_number: int, start: int) -> Generator[Any, None, None]:
        """Yield the elements of a pass on the device, each array as a `PerReplica`."""
        layout = self._collectives.layout
        replica, has_others = layout.replica_id, layout.num_replicas > 1
        numbers = itertools.count(start)
        place = f"rank {layout.rank} of {layout.num_ranks}"
        if layout.num_replicas > layout.num_ranks:
            place = f"replica {replica} of {layout.num_replicas}"
        is_empty = False

        def per_replica_of(leaf: Any) -> Any:
            nonlocal is_empty
            if type(leaf) is not np.ndarray:  # otherwise, as is common, it is in place already
                leaf = transfer.end(leaf)
                if not values.is_value(leaf):
                    return leaf
            shape = getattr(leaf, "shape", None)  # which a Ragged lacks
            is_empty = not len(leaf) if shape is None else shape[:1] == (0,)
            return values.PerReplica(leaf)

        def noted(element: Any) -> Any:
            number = next(numbers)
            if has_others:
                note_part(replica, f"{place} in batch {number}" if is_empty else None)
            return element

        # They are closed in reverse order: the thread that creates elements, which may still begin
        # copies, ends before the transfer waits for the copies.
        with contextlib.ExitStack() as stack:
            transfer = stack.enter_context(contextlib.closing(transfer_to(self.device)))
            stack.callback(note_part, replica, None)  # after the pass no part is in use
            elements = self.rank_dataset.elements(pass_number, start, transfer.begin)
            stack.enter_context(contextlib.closing(elements))
            while True:
                try:
                    # A name for the element would keep it in memory until the next one is there.
                    yield noted(nests.map_nest(per_replica_of, next(elements)))
                except StopIteration:
                    return


NextElement = Callable[[Iterator[Any]], tuple[Any, bool]]
"""Takes the next element of this rank's iterator. Returns it, or ``None`` past the end, and
whether any rank has one. May be collective."""


def _numbering(pass_number: int, start: int) -> Callable[[Any], None]:
    """Return a function that marks each batch with its number, which the ranks compare in `run`."""
    numbers = itertools.count(start)

    def number(element: Any) -> None:
        batch = pass_number, next(numbers)
        for leaf in nests.flatten(element)[0]:
            if isinstance(leaf, values.PerReplica):
                leaf._batch = batch

    return number


class RankDataset(Protocol):
    """One rank's part of a distributed dataset."""

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one element, with the batch dimension ``None``."""

    @property
    def length(self) -> int:
        """Number of elements per pass, the same on all ranks, or `ENDLESS` or `UNKNOWN`."""

    @property
    def layout(self) -> dict[str, Any]:
        """The settings that must stay the same for a position within a pass: JSON values."""

    def elements(
        self, pass_number: int, start: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return `prepare` of each element of a pass, from element `start` on."""


@dataclass(frozen=True)
class BatchSlices:
    """One rank's part of each global batch."""

    pipeline: Pipeline
    size: int
    rank: int

    def __str__(self) -> str:
        return f"{self.pipeline}, for rank {self.rank} of {self.size}"

    def of_replica(self, replica: int) -> BatchSlices:
        """Return the part of any replica."""
        return replace(self, rank=replica)

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one part."""
        return open_batch(self.pipeline.element_spec)

    @property
    def length(self) -> int:
        """Number of global batches."""
        return self.pipeline.length

    @cached_property
    def layout(self) -> dict[str, Any]:
        """The settings that decide the global batches; the number of ranks is not one of them."""
        return position_layout(self.pipeline)

    def elements(
        self, pass_number: int, start: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return the parts of this rank."""
        return self.pipeline.elements(pass_number, start, self.size, self.rank, prepare)


@dataclass(frozen=True)
class RankPipeline:
    """Whole batches of this rank's own pipeline, then arrays of length 0 until all ranks end."""

    pipeline: Pipeline
    size: int
    length: int
    """Number of elements of the longest pipeline, `ENDLESS` or `UNKNOWN`."""
    found_spec: Any
    """The nest of `ArraySpec` of one batch. If this rank has no example to find it, it is taken
    from a different rank; ``None`` if no rank has one."""
    order: str
    """A digest of the settings that decide the order of the examples of all ranks."""
    next_element: NextElement | None
    """How to take each element; ``None`` if `length` is certain."""
    pipeline_of: Callable[[int], Pipeline]
    """Returns the pipeline of any replica, which an elastic job needs after a loss."""

    def __str__(self) -> str:
        return f"{self.pipeline}, one of {self.size} pipelines"

    def of_replica(self, replica: int) -> RankPipeline:
        """Return the part of any replica, if `pipeline_of` can create it."""
        return replace(self, pipeline=self.pipeline_of(replica))

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one batch of this rank."""
        if self.found_spec is None:
            raise DataError(
                "The element_spec of datasets with map is found by mapping one example, but the "
                "datasets of all ranks are empty."
            )
        return open_batch(self.found_spec)

    @cached_property
    def layout(self) -> dict[str, Any]:
        """The order and the number of ranks, which together decide which rank gets an example."""
        batch = self.pipeline.batch
        batches = {} if batch is None else {"replica_batch_size": batch.batch_size}
        return {"num_replicas": self.size} | batches | {"order": self.order}

    def elements(
        self, pass_number: int, start: int, prepare: Prepare
    ) -> Generator[Any, None, None]:
        """Return the batches of this rank. Collective if the length is not certain."""
        nothing: Any = None
        with closing(self.pipeline.elements(pass_number, start, prepare=prepare)) as own:
            for _ in self._numbers(start):
                if self.next_element is None:
                    element = next(own, None)
                else:
                    element, has_any_rank = self.next_element(own)
                    if not has_any_rank:
                        return
                if element is None:
                    # As many elements as on the rank with the longest pipeline: the program calls
                    # collectives for each, and all ranks must call them equally often.
                    if nothing is None:
                        nothing = prepare(empty_batch(self.element_spec))
                    yield nothing
                else:
                    yield element

    def _numbers(self, start: int) -> Iterator[int]:
        if self.length < 0 or self.next_element is not None:
            return itertools.count(start)
        return iter(range(start, self.length))


class _Transfer(Protocol):
    """Copies elements to a device in two steps; several copies may be under way."""

    def begin(self, element: Any) -> Any:
        """Start the copy of an element, in any thread."""

    def end(self, leaf: Any) -> Any:
        """Return the copy of a leaf that `begin` has returned."""

    def close(self) -> None:
        """Wait for copies that are still under way."""


class _HostTransfer:
    """Transfer to host memory, where elements are created."""

    def begin(self, element: Any) -> Any:
        """Return the element."""
        return element

    def end(self, leaf: Any) -> Any:
        """Return the array in host memory."""
        if isinstance(leaf, Ragged):
            return map_ragged(host_view, leaf)
        return host_view(leaf) if _is_moved(leaf) else leaf

    def close(self) -> None:
        """Nothing to do: no copy is under way."""


class _DeviceTransfer:
    """Transfer to a GPU, through page-locked memory and in a separate stream."""

    # The thread that uses the elements creates this object, because its current stream is the one
    # in which the program uses them. Copies in a separate stream overlap with computations.

    def __init__(self, device: Device) -> None:
        self._device = device
        with device.current():
            self._namespace = device.namespace()
            self._stream, self._consumer = Stream.new(), Stream.current()
        self._under_way: deque[_Arrival] = deque()

    def begin(self, element: Any) -> Any:
        """Queue copies of the arrays in host memory."""
        begun: list[_Arrival] = []
        with self._device.current():
            element = nests.map_nest(functools.partial(self._prepare, begun), element)
            if begun:
                # The memory of the targets may have belonged to arrays that the program has
                # released, while kernels that it has queued still use it.
                self._stream.wait_event(self._consumer.record())
                for each in begun:
                    self._stream.copy(each.target, each.source)
                event = self._stream.record()
                for each in begun:
                    each.event = event
        # The memory pools do not check events, so an array that is still being copied must be kept.
        while self._under_way and self._under_way[0].event.done:
            self._under_way.popleft()
        self._under_way += begun
        return element

    def _prepare(self, begun: list[_Arrival], leaf: Any) -> Any:
        """Return the target of a leaf; if it must be copied, add the copy to `begun`."""
        if isinstance(leaf, Ragged):
            return map_ragged(functools.partial(self._prepare, begun), leaf)
        if not _is_moved(leaf):
            return leaf
        if not is_on_host(leaf):
            return place(leaf, self._device)
        source = np.asarray(leaf)
        if not has_device_dtype(source):
            return source
        if not source.size:
            return place(source, self._device)
        if not (source.flags.c_contiguous and source.dtype.isnative and _is_for_transfer(source)):
            # CUDA copies only page-locked memory in the background. The buffer also keeps the
            # values if the program writes to its array before the copy ends.
            buffer = pinned_empty(source.size, source.dtype.newbyteorder("="))
            buffer = buffer.reshape(source.shape)
            buffer[...] = source
            source = buffer
        target = self._namespace.empty(source.shape, dtype=source.dtype)
        begun.append(_Arrival(target, source))
        return begun[-1]

    def end(self, leaf: Any) -> Any:
        """Return the copy; kernels that the program queues from now on wait for it."""
        if isinstance(leaf, Ragged):
            return map_ragged(self.end, leaf)
        if not isinstance(leaf, _Arrival):
            return leaf
        with self._device.current():
            # The stream of the program waits for the copy, not this thread.
            Stream.current().wait_event(leaf.event)
        return leaf.target

    def close(self) -> None:
        """Wait for all copies."""
        while self._under_way:
            self._under_way[0].event.synchronize()
            self._under_way.popleft()


class _Arrival:
    """An array that is being copied to the device. The event is set when the copy is queued."""

    __slots__ = ("event", "source", "target")

    def __init__(self, target: Array, source: np.ndarray) -> None:
        self.target, self.source = target, source
        self.event: Any = None


def _is_moved(leaf: Any) -> bool:
    return is_array(leaf) or is_number(leaf)


def transfer_to(device: Device | None) -> _Transfer:
    """Return the transfer to `device`, with ``None`` for host memory."""
    if device is not None and device.kind == "gpu":
        return _DeviceTransfer(device)
    return _HostTransfer()


_MAX_STAGED_BYTES = 2**26
"""Larger arrays get usual memory: page-locked memory is scarce and slow to allocate."""


def memory_for(device: Device | None) -> Callable[[tuple[int, ...], np.dtype], np.ndarray] | None:
    """Return a function that allocates arrays which `transfer_to` copies without a buffer.

    ``None`` if usual memory is sufficient. Such an array must not change once it has been
    transferred.
    """
    if device is None or device.kind != "gpu":
        return None

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape)
        if dtype.hasobject or not 0 < size * dtype.itemsize <= _MAX_STAGED_BYTES:
            return np.empty(shape, dtype)
        with device.current():
            memory = _ReadMemory(pinned_empty(size * dtype.itemsize, np.dtype(np.uint8)))
        return np.asarray(memory).view(dtype).reshape(shape)

    return empty


class _ReadMemory:
    """Owns page-locked memory that is not written to once it has been transferred."""

    # The class marks such memory: a program's own page-locked arrays may be written to at any time.

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


def _is_for_transfer(array: np.ndarray) -> bool:
    """Return whether a function returned by `memory_for` has allocated the memory of `array`."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, _ReadMemory)
