"""ULFM: proof that MPI outlives a rank, its lost ranks, and communicators without them.

User-Level Failure Mitigation is a chapter that is proposed for the MPI standard. Open MPI 5 has it;
mpi4py has the functions everywhere, as stand-ins where the library has nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpistrat.mpi.launcher import launch_command
from mpistrat.settings import environment

if TYPE_CHECKING:
    from mpi4py import MPI

FLAG = "mpiexec --with-ft ulfm"
"""Of Open MPI: what keeps a job alive that has lost a rank."""

_PROOF_S = 1.5
"""How long after an error of MPI to wait for the news of the rank that has caused it."""
_POLL_S = 0.005


def why_not_tolerant() -> str:
    """Return why this process would not outlive another rank; empty where it is proved. Local."""
    # Not by what mpi4py offers: it has stand-ins where the library has nothing.
    from mpi4py import MPI

    if MPI.ERR_PROC_FAILED == MPI.ERR_UNKNOWN:
        return "this MPI library has no fault tolerance (ULFM), as Open MPI 5 has it"
    if environment().get("OMPI_MCA_mpi_ft_enable", "").lower() not in ("1", "true"):
        return f"the job was not started with {FLAG}"
    command = launch_command()
    if command and os.path.basename(command[0]) != "prted" and not _has_flag(command):
        # The variable alone makes MPI report a loss, and the launcher ends the job anyway.
        return f"the job was not started with {FLAG}, though its variable is set"
    return ""


def _has_flag(command: list[str]) -> bool:
    return any(
        each.lstrip("-").startswith("with-ft") and "ulfm" in " ".join(command[i : i + 2])
        for i, each in enumerate(command)
    )


@functools.lru_cache
def _is_tolerant() -> bool:
    return not why_not_tolerant()


def is_loss(error: MPI.Exception) -> bool:
    """Return whether an error of MPI says that a rank has died."""
    from mpi4py import MPI

    losses = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_IN_STATUS)
    return MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN and error.Get_error_class() in losses


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of `comm` that MPI knows to be dead. Local."""
    if not _is_tolerant():
        return []
    failed, own = comm.Get_failed(), comm.Get_group()
    ranks = failed.Translate_ranks(None, own)
    failed.Free()
    own.Free()
    return sorted(ranks)


def has_failed(comm: MPI.Comm) -> bool:
    """Return whether MPI knows that a rank of `comm` is dead, at little cost. Local."""
    if not _is_tolerant():
        return False
    failed = comm.Get_failed()
    size = failed.size
    failed.Free()
    return size > 0


def failed_ranks_now(comm: MPI.Comm) -> list[int]:
    """Return `failed_ranks`, once what news there is has come. Local."""
    from mpi4py import MPI

    if not _is_tolerant():
        return []
    MPI.COMM_SELF.Iprobe()  # makes progress, with which the news comes
    return failed_ranks(comm)


def failed_ranks_soon(comm: MPI.Comm) -> list[int]:
    """Return `failed_ranks`, once there are any, or after a wait for the news. Local."""
    ranks, until = failed_ranks(comm), time.monotonic() + _PROOF_S
    while _is_tolerant() and not ranks and time.monotonic() < until:
        time.sleep(_POLL_S)
        ranks = failed_ranks_now(comm)
    return ranks


def lost_ranks(comm: MPI.Comm, error: BaseException) -> list[int] | None:
    """Return the ranks of `comm` whose death has caused `error`, ``None`` where none has."""
    # Where a connection breaks, the error comes before MPI knows why, and has another class.
    from mpi4py import MPI

    if not isinstance(error, MPI.Exception) or not _is_tolerant():
        return None
    ranks = failed_ranks_soon(comm)
    if ranks or is_loss(error) or error.Get_error_class() == MPI.ERR_REVOKED:
        return ranks
    return None


def revoke(comm: MPI.Comm) -> None:
    """Have every rank leave what it does on `comm`, where a rank of it is lost. Local."""
    from mpi4py import MPI

    if _is_tolerant() and comm != MPI.COMM_NULL:
        comm.Revoke()


def is_revoked(comm: MPI.Comm) -> bool:
    """Return whether a rank has revoked `comm`, which may be freed. Local."""
    from mpi4py import MPI

    if not _is_tolerant() or comm == MPI.COMM_NULL:
        return False
    MPI.COMM_SELF.Iprobe()  # makes progress, with which the news comes
    return comm.Is_revoked()


@contextlib.contextmanager
def revoked_on_loss(comm: MPI.Comm) -> Iterator[None]:
    """Revoke `comm` where a loss ends the ``with`` block, so that no rank of it waits there."""
    try:
        yield
    except BaseException as error:
        if lost_ranks(comm, error) is not None:
            revoke(comm)
        raise


def finalize_within(limit_s: float) -> bool:
    """End MPI, which may wait for dead ranks forever, and return whether MPI says that it has.

    Local. After `limit_s` a thread is left to wait.
    """
    from mpi4py import MPI

    # mpi4py's own function keeps Python's lock, and everything would wait with it.
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(MPI.__file__).MPI_Finalize
        thread = threading.Thread(target=function, name="mpistrat-finalize", daemon=True)
        thread.start()
        thread.join(limit_s)
    return bool(MPI.Is_finalized())
