"""Counting communicator, which records every operation that is called on it or its duplicates.

It counts what the package sends whatever its code does, because every message passes one of these
methods. Importing this module starts MPI.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from tools.scaling.work import COLLECTIVES, Work

__all__ = ["MpiCall", "counted", "total_work"]

_DERIVING = ("Create", "Create_group", "Split", "Split_type")
"""Methods that return a communicator of mpi4py's own class; a duplicate keeps the class."""

_ROOTED = ("Gather", "Gatherv", "Scatter", "Scatterv")
"""Only the root gives the buffer of all ranks; the others give their part of it."""


@dataclass(frozen=True)
class MpiCall:
    """One MPI operation that a rank has called."""

    operation: str
    """Its name in MPI without the prefix of a variant: Iallreduce is an Allreduce."""
    num_bytes: int
    """Of the largest buffer; for gathers and scatters that of all ranks together."""
    num_ranks: int

    @property
    def work(self) -> Work:
        """The work for one rank by the textbook."""
        return COLLECTIVES[self.operation](self.num_ranks, self.num_bytes)


def total_work(calls: Sequence[MpiCall]) -> Work:
    """Return the work of all `calls` together."""
    return sum((call.work for call in calls), Work())


def counted(comm: MPI.Intracomm, calls: list[MpiCall]) -> MPI.Intracomm:
    """Return a duplicate of `comm` that appends every operation to `calls`. **Collective**."""
    # A duplicate, because strategies on one communicator share their channel. Receives are not
    # recorded, nor what goes through shared memory; communicators derived from it are.
    return _counting_class(calls)(comm.Dup())


def _counting_class(calls: list[MpiCall]) -> type[MPI.Intracomm]:
    members: dict[str, Any] = {}
    for operation in COLLECTIVES:
        for variant in (operation, f"I{operation.lower()}"):
            if hasattr(MPI.Intracomm, variant):
                members[variant] = _noting(variant, operation, calls)
        if hasattr(MPI.Intracomm, f"{operation}_init"):
            members[f"{operation}_init"] = _noting_starts(operation, calls)
    kind: type[MPI.Intracomm] = type("CountingIntracomm", (MPI.Intracomm,), members)
    for name in _DERIVING:
        setattr(kind, name, _deriving(name, kind))
    return kind


def _noting(variant: str, operation: str, calls: list[MpiCall]) -> Callable[..., Any]:
    original = getattr(MPI.Intracomm, variant)

    @functools.wraps(original)
    def method(comm: MPI.Intracomm, *args: Any, **kwargs: Any) -> Any:
        calls.append(_call(comm, operation, args, kwargs))
        return original(comm, *args, **kwargs)

    return method


def _noting_starts(operation: str, calls: list[MpiCall]) -> Callable[..., Any]:
    original = getattr(MPI.Intracomm, f"{operation}_init")

    @functools.wraps(original)
    def method(comm: MPI.Intracomm, *args: Any, **kwargs: Any) -> Any:
        call = _call(comm, operation, args, kwargs)
        return _noting_request(original(comm, *args, **kwargs), lambda: calls.append(call))

    return method


def _noting_request(request: MPI.Prequest, note: Callable[[], object]) -> MPI.Prequest:
    def start(own: MPI.Prequest) -> None:
        note()
        MPI.Prequest.Start(own)

    kind: type[MPI.Prequest] = type("CountingPrequest", (MPI.Prequest,), {"Start": start})
    return kind(request)


def _deriving(name: str, kind: type[MPI.Intracomm]) -> Callable[..., Any]:
    original = getattr(MPI.Intracomm, name)

    @functools.wraps(original)
    def method(comm: MPI.Intracomm, *args: Any, **kwargs: Any) -> MPI.Intracomm:
        return kind(original(comm, *args, **kwargs))

    return method


def _call(
    comm: MPI.Intracomm, operation: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> MpiCall:
    num_ranks = comm.Get_size()
    sizes = [_num_bytes(each) for each in (*args, *kwargs.values())]
    if operation in _ROOTED:
        # The part of one rank is known on all of them.
        parts = [each for each in sizes if each]
        return MpiCall(operation, min(parts, default=0) * num_ranks, num_ranks)
    return MpiCall(operation, max(sizes, default=0), num_ranks)


def _num_bytes(buffer: Any) -> int:
    """Return the bytes of a buffer as mpi4py takes it, 0 for other arguments."""
    if isinstance(buffer, list | tuple):
        return _num_bytes(buffer[0]) if buffer else 0
    if isinstance(getattr(buffer, "nbytes", None), int):
        return int(buffer.nbytes)
    return len(buffer) if isinstance(buffer, bytes | bytearray) else 0
