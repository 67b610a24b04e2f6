"""Rollback state of an elastic job: copies of variables, which are restored after a loss.

Ranks send each other the results of replicas as pickle, which is never written to a file.
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.agreement.call import Call
from mpistrat.agreement.ledger import Signature
from mpistrat.arrays import Array, host_copy, is_on_host, place
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.objects import as_bytes, from_bytes
from mpistrat.elastic.moved_replicas import ElasticReplicas
from mpistrat.layout import Layout
from mpistrat.options import VariableSynchronization
from mpistrat.system.units import on_undo
from mpistrat.variables.variable import device_of, storage_of

_MAX_RESULT = 2**20
"""Largest size in bytes of a replica's result that other ranks keep."""

_HEAD = struct.Struct("=q")
"""Format of a length."""
_NUMBERS = struct.Struct("=2q")
"""Format of the number of a variable, and of the size in bytes of each of its components."""

Copies = Sequence[tuple[Array, Array]]
"""Pairs of the memory of a mirrored variable and its copy."""


class ElasticState:
    """The variables of an elastic job."""

    def __init__(self) -> None:
        self._mirrored: dict[int, weakref.ref[Any]] = {}
        self._copies: list[tuple[Array, Array]] | None = None
        """Copies of all mirrored variables; ``None`` once a variable was added or deleted."""
        self._on_read: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._num_on_read = 0
        self._kept: Sequence[bytes] = ()
        """The bytes that each rank sent at the end of the last unit that wrote variables."""
        self._kept_layout: Layout | None = None
        """The replicas of each rank at that time."""
        self._signatures: dict[str, Signature] = {}

    def add(self, variable: Any) -> None:
        """Restore `variable` before a unit is repeated."""
        if variable.synchronization is VariableSynchronization.ON_READ:
            self._add_on_read(variable)
        else:
            self._add_mirrored(variable)

    def _add_mirrored(self, variable: Any) -> None:
        """Copy `variable` before each unit that may write to it."""
        key = id(variable)

        def forget(_: object) -> None:
            self._mirrored.pop(key, None)
            self._copies = None

        # A weak reference, or the job would keep every variable of the program alive.
        self._mirrored[key] = weakref.ref(variable, forget)
        self._copies = None

    def _add_on_read(self, variable: Any) -> None:
        """Keep the components of `variable` on all ranks."""
        number = self._num_on_read
        self._num_on_read += 1
        self._on_read[number] = variable
        # The value of a replica for which no rank has kept a component.
        variable._at_first = host_copy(variable._components[0])
        on_undo(functools.partial(setattr, self, "_num_on_read", number))

    def copy(self, writes: bool | Sequence[Any]) -> Copies:
        """Copy the mirrored variables in `writes`, and return their memory with the copies."""
        if not isinstance(writes, bool):
            return [(memory, memory.copy()) for memory in map(storage_of, writes)]
        if not writes:
            return ()
        if self._copies is None:
            found = [each() for each in self._mirrored.values()]
            arrays = [storage_of(each) for each in found if each is not None]
            self._copies = [(each, each.copy()) for each in arrays]
        else:
            # The memory of the last copies is reused, because a job copies once per step.
            for storage, copy in self._copies:
                copy[...] = storage
        return self._copies

    def restore(self, copies: Copies) -> None:
        """Restore the old values of all variables, for the replicas that this rank has now."""
        for storage, copy in copies:
            # In place, because views of the variable and prepared steps refer to this memory.
            storage[...] = copy
        of_variables = self._kept_components()
        for number, variable in list(self._on_read.items()):
            _restore_components(variable, of_variables.get(number, {}))

    def _kept_components(self) -> dict[int, dict[int, bytes]]:
        """Return the kept components of SyncOnRead variables, by variable number and replica."""
        found: dict[int, dict[int, bytes]] = {}
        layout = self._kept_layout
        if layout is None:
            return found
        for rank, text in enumerate(self._kept):
            begin, end = _HEAD.size, _end_of_variables(text)
            while begin < end:
                number, size = _NUMBERS.unpack_from(text, begin)
                begin += _NUMBERS.size
                # Uses the layout of that time, because ranks send the components without the
                # numbers of the replicas.
                for replica in layout.replicas_of(rank):
                    found.setdefault(number, {})[replica] = text[begin : begin + size]
                    begin += size
        return found

    def share(self, ranks: Collectives, what: str, result: Any) -> Callable[[], None]:
        """Exchange this rank's components and results after the unit `what`. **Collective**.

        Return a function that keeps the received data.
        """
        leaves = [] if result is None else nests.flatten(result)[0]
        values = {i: each for i, each in enumerate(leaves) if isinstance(each, ElasticReplicas)}
        parts: list[Any] = [b""]
        size = 0
        for number, variable in self._on_read.items():
            num_bytes, components = _as_buffers(variable._components)
            parts.append(_NUMBERS.pack(number, num_bytes))
            parts += components
            size += _NUMBERS.size + num_bytes * len(components)
        parts[0] = _HEAD.pack(size)
        if values:
            short = {i: each.short_components(_MAX_RESULT) for i, each in values.items()}
            parts.append(as_bytes(short))
        with ranks.call(what) as call:
            texts = call.agree_with(self._signature(call), b"".join(parts))
        return functools.partial(self._keep, ranks.layout, texts, values)

    def meet(self, ranks: Collectives, what: str) -> None:
        """Wait for all ranks at the end of the unit `what`. **Collective**."""
        with ranks.call(what) as call:
            call.agree_on(self._signature(call))
            call.is_moving = False

    def _signature(self, call: Call) -> Signature:
        signature = self._signatures.get(call.kind)
        if signature is None or signature[2] != call.owner:
            signature = self._signatures[call.kind] = Signature(call.signature("end"))
        return signature

    def _keep(
        self, layout: Layout, texts: Sequence[bytes], values: dict[int, ElasticReplicas]
    ) -> None:
        self._kept_layout, self._kept = layout, texts
        for position, value in values.items():
            value.remember(functools.partial(_components_of, texts, position))


def _restore_components(variable: Any, of_replicas: Mapping[int, bytes]) -> None:
    """Set `variable` to the components of the replicas that this rank has now."""
    first, device = variable._at_first.tobytes(), device_of(variable)
    components = [
        np.ndarray(variable.shape, variable.dtype, of_replicas.get(each, first)).copy()
        for each in variable.strategy.extended.local_replica_ids
    ]
    variable._keep_components([place(each, device) for each in components])


def _as_buffers(components: Sequence[Array]) -> tuple[int, Sequence[Any]]:
    """Return the size of each component in bytes, and the bytes of all."""
    first = components[0]
    has_buffers = is_on_host(first) and first.dtype.kind in "biufc"
    return first.nbytes, components if has_buffers else [each.tobytes() for each in components]


def _end_of_variables(text: bytes) -> int:
    """Return where the components of variables end in the bytes that a rank has sent."""
    return int(_HEAD.size + _HEAD.unpack_from(text)[0])


def _components_of(texts: Sequence[bytes], position: int) -> dict[int, Any]:
    """Return the components of one leaf of the results of all ranks, by replica."""
    found: dict[int, Any] = {}
    for each in texts:
        if of_values := each[_end_of_variables(each) :]:
            found |= from_bytes(of_values).get(position, {})
    return found
