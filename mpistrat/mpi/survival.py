"""ULFM: checks whether MPI survives the loss of a rank, and finds the lost ranks.

User-Level Failure Mitigation is a chapter that is proposed for the MPI standard. Open MPI 5 has it.
mpi4py always has the functions, but they are stand-ins if the library has none.
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
"""Command and flag of Open MPI that keep a job alive after the loss of a rank."""

_PROOF_S = 1.5
"""How long to wait, after an error of MPI, until MPI knows which rank has caused it."""
_POLL_S = 0.005


def why_not_tolerant() -> str:
    """Return why this process would not survive the death of another rank. Local.

    The text is empty if the process does survive it.
    """
    # Do not look for mpi4py's functions: they are stand-ins if the library has none.
    from mpi4py import MPI

    if MPI.ERR_PROC_FAILED == MPI.ERR_UNKNOWN:
        return "this MPI library has no fault tolerance (ULFM); Open MPI 5 has"
    if environment().get("OMPI_MCA_mpi_ft_enable", "").lower() not in ("1", "true"):
        return f"the job was not started with {FLAG}"
    command = launch_command()
    if command and os.path.basename(command[0]) != "prted" and not _has_flag(command):
        # With only the variable, MPI reports a loss, but the launcher still ends the job.
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
    """Return whether MPI knows that a rank of `comm` is dead. Cheap. Local."""
    if not _is_tolerant():
        return False
    failed = comm.Get_failed()
    size = failed.size
    failed.Free()
    return size > 0


def failed_ranks_now(comm: MPI.Comm) -> list[int]:
    """Let MPI receive reports of failures, and return `failed_ranks`. Local."""
    from mpi4py import MPI

    if not _is_tolerant():
        return []
    MPI.COMM_SELF.Iprobe()  # MPI receives the reports when it makes progress
    return failed_ranks(comm)


def failed_ranks_soon(comm: MPI.Comm) -> list[int]:
    """Return `failed_ranks` as soon as there are any, or after a time limit. Local."""
    ranks, until = failed_ranks(comm), time.monotonic() + _PROOF_S
    while _is_tolerant() and not ranks and time.monotonic() < until:
        time.sleep(_POLL_S)
        ranks = failed_ranks_now(comm)
    return ranks


def lost_ranks(comm: MPI.Comm, error: BaseException) -> list[int] | None:
    """Return the ranks of `comm` whose death has caused `error`, or ``None`` if none has."""
    # If a connection breaks, the error comes before MPI knows why, and has a different class.
    from mpi4py import MPI

    if not isinstance(error, MPI.Exception) or not _is_tolerant():
        return None
    ranks = failed_ranks_soon(comm)
    if ranks or is_loss(error) or error.Get_error_class() == MPI.ERR_REVOKED:
        return ranks
    return None


def revoke(comm: MPI.Comm) -> None:
    """Make every rank leave its calls on `comm`, because a rank of it is lost. Local."""
    from mpi4py import MPI

    if _is_tolerant() and comm != MPI.COMM_NULL:
        comm.Revoke()


def is_revoked(comm: MPI.Comm) -> bool:
    """Return whether a rank has revoked `comm`. `comm` may be freed already. Local."""
    from mpi4py import MPI

    if not _is_tolerant() or comm == MPI.COMM_NULL:
        return False
    MPI.COMM_SELF.Iprobe()  # MPI receives the revocation when it makes progress
    return comm.Is_revoked()


@contextlib.contextmanager
def revoked_on_loss(comm: MPI.Comm) -> Iterator[None]:
    """Revoke `comm` if a loss ends the ``with`` block, so that no rank keeps waiting there."""
    try:
        yield
    except BaseException as error:
        if lost_ranks(comm, error) is not None:
            revoke(comm)
        raise


def finalize_within(limit_s: float) -> bool:
    """Call MPI_Finalize, which may wait for dead ranks forever, and return whether MPI has ended.

    Local. After `limit_s` seconds this returns, while a thread keeps waiting.
    """
    from mpi4py import MPI

    # mpi4py's own function keeps Python's lock, so all threads would wait.
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(MPI.__file__).MPI_Finalize
        thread = threading.Thread(target=function, name="mpistrat-finalize", daemon=True)
        thread.start()
        thread.join(limit_s)
    return bool(MPI.Is_finalized())
