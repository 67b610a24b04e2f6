"""Remote variables: a server or the chief holds them, and other ranks access them by messages."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arrays import Array, host_view
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.reduction import dtype_name
from mpistrat.parameter_server.server_job import job_of
from mpistrat.parameter_server.store import (
    WRITES,
    Operation,
    ParameterClient,
    Part,
    Request,
    slot_key,
)
from mpistrat.sharding import cut, part_lengths
from mpistrat.values import IndexedSlices, PerReplica
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.placement import BYTES_PER_PIECE, Remote
from mpistrat.variables.sharded import ShardedVariable, rows_named_by
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import DenseWrite, Write


class RemoteVariable(Variable):
    """Variable of `ParameterServerStrategy`, whose memory is on one rank.

    A read returns a copy of the value at one moment. A write is one message, and exact whatever
    other ranks do. But if you read, add and write back, other ranks may write in between.
    """

    _parts: tuple[Part, ...]

    def _begin(
        self, call: CollectiveCall, initial: InitialValue
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        job = job_of(self.strategy)
        job.check_may_make_variable(self._name)
        with job.group.call("Variable", self._name) as agreed:
            initial.check()
            whole = None if initial.is_made_in_parts else initial.whole(self._name)
            shape = (initial.shape or ()) if whole is None else whole.shape
            dtype = initial.dtype if whole is None else whole.dtype
            modes = self._checked_modes(dtype)
            ranges = _ranges(shape, initial.num_parts)
            self._parts = job.placed(self._name, ranges, initial.is_replicated)
            places = tuple(part.holders for part in self._parts)
            agreed.agree(f"on ranks {places}", (dtype_name(dtype), shape), modes)
            for part in self._parts:
                self._begin_part(agreed, part, shape, initial, whole)
        self._placement = Remote(shape, is_in_parts=self._is_sharded)
        return np.empty(0, dtype), shape

    def _begin_part(
        self,
        call: CollectiveCall,
        part: Part,
        shape: tuple[int, ...],
        initial: InitialValue,
        whole: np.ndarray | None,
    ) -> None:
        """Send the initial value of one part to its holders. **Collective**, once agreed."""
        rank, own = call.channel.rank, (len(part.rows), *shape[1:]) if shape else ()
        store = job_of(self.strategy).store
        store.shapes[part.key] = own
        if whole is None:
            if rank in part.holders:
                rows = np.zeros(own, initial.dtype)
                if part.rows:
                    rows = np.array(initial.rows(self._name, part.rows))
                store.add(part.key, rows)
            return
        rows = np.ascontiguousarray(whole[part.rows.start : part.rows.stop] if shape else whole)
        for holder in part.holders:
            if rank == 0 == holder:
                # Copy, because `whole` may be an array of the program.
                store.add(part.key, rows.copy().reshape(own))
            elif rank in (0, holder):
                with call.communicator() as comm:
                    if rank == 0:
                        comm.Send(_bytes_of(rows), holder)
                    else:
                        received = np.empty(own, whole.dtype)
                        comm.Recv(_bytes_of(received), 0)
                        store.add(part.key, received)

    def _keep(self, storage: Array) -> None:
        """Only register the variable, because the store holds the parts of this rank."""
        job_of(self.strategy).variables.append(self)

    @property
    def _storage(self) -> Any:  # type: ignore[override]
        self._refuse("Its memory")

    @property
    def storage(self) -> Array:
        """Raises `NotImplementedError`: the holder has the memory. Use `value` and `assign`."""
        self._refuse("storage")

    @property
    def part(self) -> Array:
        """Raises `NotImplementedError`: only the holder has rows. Use `lookup` and `value`."""
        self._refuse("part")

    @property
    def row_range(self) -> range:
        """Raises `NotImplementedError`: only the holder has rows. Use `lookup` and `value`."""
        self._refuse("row_range")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{what}: the variable {self.name!r} is on {', '.join(self._devices)}, and reading it "
            "needs messages. Read some rows with lookup(ids), or all of them with value()."
        )

    @property
    def _client(self) -> ParameterClient:
        return job_of(self.strategy).client

    @property
    def _devices(self) -> tuple[str, ...]:
        """Device string of each part."""
        job = job_of(self.strategy)
        return tuple(job.device_of_rank(part.holders[0]) for part in self._parts)

    @property
    def device(self) -> str:
        """Device of its holder, such as ``"/job:ps/replica:0/task:0/device:CPU:0"``. Local."""
        return self._devices[0]

    @property
    def values(self) -> tuple[Array, ...]:
        """The value, in a tuple of one, because there is a single replica."""
        return (self.value(),)

    def _shown_values(self) -> str | None:
        return None

    def value(self) -> Array:
        """Return a read-only copy of the value at one moment. One message per part."""
        whole = self._read()
        whole.setflags(write=False)
        return whole

    def read_value(self) -> Array:
        """Return a copy of the value. One message per part."""
        return self._read()

    def numpy(self) -> npt.NDArray[Any]:
        """Return a copy of the value. One message per part."""
        return self._read()

    def _request(self, part: Part, operation: Operation, **details: Any) -> tuple[int, Request]:
        return part.holders[0], Request(operation, part.key, self.dtype, **details)

    def _read(self) -> np.ndarray:
        self._check_context()
        self._check_may_gather()
        what = f"read of variable {self.name!r}"
        found = self._client.ask_each(
            what, [self._request(part, Operation.READ) for part in self._parts]
        )
        parts = [buffers[0].view(self.dtype) for buffers in found]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(self.shape)

    def _check_may_gather(self) -> None:
        """Raise an error if the value is too large to read on one rank."""

    def _check_context(self) -> None:
        context.mode_for(self._strategy, f"The variable {self.name!r}")

    def lookup(self, ids: npt.ArrayLike) -> Array:
        """Return copies of the rows with these numbers: see `Variable.lookup`. By messages."""
        self._check_context()
        rows = self._checked_rows(ids)
        flat, row = rows.reshape(-1), self.shape[1:]
        found = np.empty((flat.size, *row), self.dtype)
        wanted = list(self._split(flat))
        answers = self._client.ask_each(
            f"lookup of variable {self.name!r}",
            [
                self._request(part, Operation.ROWS, buffers=[flat[mine] - part.rows.start])
                for part, mine in wanted
            ],
        )
        for (_, mine), (buffer,) in zip(wanted, answers, strict=True):
            found[mine] = buffer.view(self.dtype).reshape(mine.size, *row)
        return found.reshape(*rows.shape, *row)

    def _split(self, rows: np.ndarray) -> Iterator[tuple[Part, np.ndarray]]:
        """Yield each part that holds some of `rows`, and the positions of these in `rows`."""
        for part in self._parts:
            mine = np.flatnonzero((rows >= part.rows.start) & (rows < part.rows.stop))
            if mine.size:
                yield part, mine

    def _write(self, write: Write, value: Any, read_value: bool) -> Array | None:
        self._check_context()
        if isinstance(value, Variable):
            value = value.value()
        if isinstance(value, PerReplica):
            raise ValueError(
                f"{write.how} of the variable {self.name!r} takes one value, not a PerReplica of "
                "another strategy."
            )
        checked = write.checked(self._target, value)
        is_one = len(self._parts) == 1
        how = WRITES.index(write)
        if read_value and is_one:
            how |= Request.RETURNS
        requests = list(self._requests(write, how, checked))
        answers = self._client.ask_each(f"{write.how} of variable {self.name!r}", requests)
        if not read_value:
            return None
        after: Array | None = self._value_after(answers[0] if answers else [])
        return after

    def _requests(self, write: Write, how: int, checked: Any) -> Iterator[tuple[int, Request]]:
        """Yield each holder and the request to send to it for a write."""
        if isinstance(write, DenseWrite):
            array = host_view(checked)
            for part in self._parts:
                own = array[part.rows.start : part.rows.stop] if self.shape else array
                # Every server keeps a copy of a counter, and all must get the write.
                for holder in part.holders:
                    yield (
                        holder,
                        Request(
                            Operation.WRITE, part.key, self.dtype, [np.ascontiguousarray(own)], how
                        ),
                    )
            return
        yield from self._requests_of_slices(how, checked)

    def _requests_of_slices(self, how: int, slices: IndexedSlices) -> Iterator[tuple[int, Request]]:
        leading = len(self.shape) - slices.values.ndim + 1
        per_row = max(math.prod(self.shape[1:leading]), 1)
        places = host_view(slices.indices).astype(np.int64)
        values = host_view(slices.values)
        is_alone = len(self._parts) == 1
        split = [(self._parts[0], slice(None))] if is_alone else self._split(places // per_row)
        for part, mine in split:
            own = places[mine] - part.rows.start * per_row
            buffers = [own, np.ascontiguousarray(values[mine])]
            yield self._request(part, Operation.SLICES, buffers=buffers, how=how, start=leading)

    def _value_after(self, answer: Sequence[np.ndarray]) -> Any:
        """Return the value after a write, from the answer of the holder."""
        value = answer[0].view(self.dtype).reshape(self.shape)
        value.setflags(write=False)
        return value

    def _save_value(self) -> Array | None:
        return self._read()

    def _load_value(self, array: np.ndarray) -> None:
        flat = np.ascontiguousarray(array).reshape(-1)
        for each in cut(flat.size, max(1, BYTES_PER_PIECE // self.dtype.itemsize)):
            self._load_piece(each.start, flat[each])

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        size = math.prod(self.shape[1:])
        requests = []
        for part in self._parts:
            first = max(start, part.rows.start * size)
            last = min(start + piece.size, part.rows.stop * size)
            if first < last:
                own = np.ascontiguousarray(piece[first - start : last - start])
                begin = first - part.rows.start * size
                requests += [
                    (
                        holder,
                        Request(Operation.PIECE, part.key, self.dtype, [own], start=begin),
                    )
                    for holder in part.holders
                ]
        self._client.ask_each(f"restore of variable {self.name!r}", requests)

    def _zeros(self, name: str, dtype: np.dtype) -> Variable:
        raise NotImplementedError(
            f"{name}: this kind of state is not kept for variables of a ParameterServerStrategy."
        )

    def _slot(self, name: str, dtype: np.dtype, optimizer: int, number: int) -> RemoteVariable:
        """Return this rank's view of a slot, on the same holders as this variable. Local."""
        # Skip __init__, which is collective: the holder creates a slot, of zeros, when it first
        # needs it.
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._name, twin._trainable = name, False
        twin._parts = tuple(
            dataclasses.replace(part, key=slot_key(part.key, optimizer, number))
            for part in self._parts
        )
        twin._target = dataclasses.replace(self._target, name=name, dtype=np.dtype(dtype))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise copy.Error(
            f"The variable {self.name!r} is on {', '.join(self._devices)} and cannot be copied. "
            "Create a second one with its value in the scope of the strategy, before serve()."
        )


class RemoteShardedVariable(RemoteVariable, ShardedVariable):
    """Sharded variable of `ParameterServerStrategy`, with its parts on the servers in turn."""

    @property
    def row_ranges(self) -> tuple[range, ...]:
        """Row range of each part. Local."""
        return tuple(part.rows for part in self._parts)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device string of each part. Local."""
        return self._devices

    def _check_may_gather(self) -> None:
        ShardedVariable._check_may_gather(self)

    def __getitem__(self, index: Any) -> Any:
        """Return ``value()[index]``, with messages for only the rows that are needed."""
        given = index if isinstance(index, tuple) else (index,)
        rows = rows_named_by(given[0], len(self)) if given else None
        if rows is None:
            return self.value()[index]
        numbers, first = rows
        if isinstance(numbers, IndexError):
            raise numbers
        index = (first, *given[1:])
        part = self.lookup(numbers)[index]
        # A view would keep all looked-up rows in memory.
        return part.copy() if getattr(part, "base", None) is not None else part

    def _value_after(self, answer: Sequence[np.ndarray]) -> Any:
        return self

    def _pieces_for_root(self) -> Iterator[np.ndarray | None]:
        """Yield the elements in order, a limited number at a time."""
        size = math.prod(self.shape[1:])
        for part in self._parts:
            for each in cut(len(part.rows) * size, max(1, BYTES_PER_PIECE // self.dtype.itemsize)):
                (buffer,) = self._client.ask(
                    f"save of variable {self.name!r}",
                    *self._request(
                        part, Operation.READ, start=each.start, count=each.stop - each.start
                    ),
                )
                yield buffer.view(self.dtype)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name} in {len(self._parts)} parts on "
            f"{', '.join(dict.fromkeys(self._devices))}>"
        )


def _ranges(shape: tuple[int, ...], num_parts: int) -> list[range]:
    """Return the row range of each part."""
    num_rows = shape[0] if shape else 1
    lengths = part_lengths(num_rows, max(1, min(num_parts, num_rows)))
    stops = np.cumsum(lengths).tolist()
    return [range(*pair) for pair in zip([0, *stops], stops, strict=False)]


def _bytes_of(array: np.ndarray) -> np.ndarray:
    flat: np.ndarray = array.reshape(-1).view(np.uint8)
    return flat


def parts_of(variable: Variable) -> tuple[Part, ...]:
    """Return the parts of a remote variable, which name their holders."""
    assert isinstance(variable, RemoteVariable)
    return variable._parts
