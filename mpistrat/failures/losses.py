"""Losses of ranks: whether the job can go on without one, and how a process leaves then."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat.agreement.channel import Channel
from mpistrat.failures import logs
from mpistrat.failures.process_state import process
from mpistrat.mpi.launcher import launch_command
from mpistrat.settings import environment
from mpistrat.system import exit_hooks
from mpistrat.system.text import rank_list

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "FLAG",
    "has_proven_tolerance",
    "leave_out",
    "leave_without",
    "warn_of_intolerance",
    "why_not_tolerant",
]

FLAG = "mpiexec --with-ft ulfm"
"""Of Open MPI: what keeps a job alive that has lost a rank."""

_logger = logging.getLogger("mpistrat")

_PRINT_S = 0.3
"""For a launcher to read the last line."""


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
        # The variable alone makes MPI report a loss, and the launcher ends the job all the same.
        return f"the job was not started with {FLAG}, though its variable is set"
    return ""


def _has_flag(command: list[str]) -> bool:
    return any(
        each.lstrip("-").startswith("with-ft") and "ulfm" in " ".join(command[i : i + 2])
        for i, each in enumerate(command)
    )


def has_proven_tolerance(comm: MPI.Intracomm) -> bool:
    """Return whether the ranks of `comm` outlive one that dies. **Collective**."""
    return all(not why for why in comm.allgather(why_not_tolerant()))


@functools.cache
def warn_of_intolerance() -> None:
    """Print once what a lost rank will mean: when one is lost, the launcher ends this rank too."""
    logs.print_line(
        "If a rank of this parameter-server job dies, the whole job ends. Started with Open MPI's "
        f"{FLAG}, it goes on without a worker."
    )


def leave_out(channel: Channel, lost: Collection[int]) -> None:
    """Have this process end without the ranks that are `lost`: no last round, no end of MPI."""
    # MPI_Finalize of Open MPI mostly ends without them too, but sometimes waits for ever.
    if channel in process.channels:
        process.channels.remove(channel)
    process.has_left = True
    logs.flush()
    _logger.info("The job ends without %s.", rank_list(sorted(lost)))
    _ExitCode.keep()


class _ExitCode:
    """The exit code of this process, which ends itself."""

    code = 0
    _exit: Any = None

    @classmethod
    def keep(cls) -> None:
        """Keep the code that the program gives, and end the process with it at its end."""
        if cls._exit is not None:
            return
        cls._exit = sys.exit
        sys.exit = cls._note
        exit_hooks.at(exit_hooks.Phase.FAILED, cls._note_failure)
        exit_hooks.at(exit_hooks.Phase.AFTER_LAST_ROUND, cls._end)

    @classmethod
    def _note(cls, status: Any = None, /) -> NoReturn:
        cls.code = status if isinstance(status, int) else int(status is not None)
        cls._exit(status)
        raise AssertionError  # sys.exit has raised

    @classmethod
    def _note_failure(cls, failure: exit_hooks.Failure) -> None:
        cls.code = 1

    @classmethod
    def _end(cls) -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(cls.code & 0xFF)


def leave_without(lost: int, what: str, is_first: bool) -> None:
    """End this process at once, because nothing can go on without the rank that is `lost`."""
    # Not by an exception: the end of MPI would wait for that rank.
    if is_first:
        logs.print_line(f"{rank_list([lost])} {what}")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_PRINT_S)
    os._exit(1)
