"""The world of ranks: the only module that touches ``COMM_WORLD``.

A strategy works on a private duplicate of the user's communicator, so that no message of the
user can meet one of ours. All strategies on one communicator share the duplicate and with it
one sequence of collectives. After an epoch error the next strategy gets a fresh one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat.errors import LaunchError
from mpistrat.launcher import Launcher, find_launcher, is_one_of_several

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "World",
    "abort_world",
    "attached",
    "communicator",
    "detach",
    "library_version",
    "open_world",
    "started_world",
    "world_ranks",
    "world_size",
]


_keyval: int | None = None
"""MPI's key of our attribute, made with the first world."""


@dataclass(frozen=True)
class World:
    """What a rank knows about the job that it is part of."""

    comm: MPI.Intracomm
    """The communicator that the user gave, or COMM_WORLD."""
    rank: int
    size: int
    local_rank: int
    """Number of this rank among those of its node."""
    hosts: tuple[str, ...]
    """One name per node, in the order of the lowest rank on each."""
    launcher: Launcher


def communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Start MPI if need be, and return the communicator that `comm` means. Local.

    Raises
    ------
    TypeError
        If `comm` is not an mpi4py intracommunicator.
    ValueError
        If this rank is not part of it.
    LaunchError
        If the launcher started several tasks but MPI sees one.
    """
    from mpi4py import MPI

    if comm is None:
        _check_launch(MPI.COMM_WORLD.size, find_launcher())
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(
            f"comm must be an mpi4py intracommunicator or None, not {type(comm).__name__}."
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "comm is COMM_NULL: this rank is not part of the communicator. "
            "Make the strategy only on ranks that are."
        )
    return comm


def open_world(comm: MPI.Intracomm | None) -> World:
    """Return the world of `comm`. **Collective** over `comm`, and starts MPI if need be.

    Raises
    ------
    TypeError, ValueError, LaunchError
        As `communicator`.
    """
    comm = communicator(comm)
    launcher = find_launcher()
    facts = attached(comm, "node map", lambda: _map_nodes(comm, launcher))
    return World(comm, comm.rank, comm.size, facts[0], facts[1], launcher)


def started_world() -> MPI.Intracomm | None:
    """Return COMM_WORLD if this process is one rank of several, else ``None``. Local.

    Starts MPI only in a process that a launcher has started as one of several ranks.
    """
    if "mpi4py.MPI" not in sys.modules and not is_one_of_several():
        return None
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return None
    return MPI.COMM_WORLD


def _check_launch(size: int, launcher: Launcher) -> None:
    if size == 1 and launcher.num_tasks > 1:
        error = LaunchError(
            f"Slurm started {launcher.num_tasks} tasks in this step, but MPI sees a world of one "
            f"rank: every task would train alone. Start the job with {launcher.mpi_flag_hint}."
        )
        error.is_told_elsewhere = launcher.task != 0
        raise error


def _map_nodes(comm: MPI.Intracomm, launcher: Launcher) -> tuple[int, tuple[str, ...]]:
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = node.bcast(comm.rank)
    node.Free()
    # Where Slurm names the node it knows best: MPI libraries have taken ranks of one for several.
    mark = launcher.node_name or lowest
    marks_and_names = comm.allgather((mark, launcher.node_name or MPI.Get_processor_name()))
    local_rank = [each for each, _ in marks_and_names[: comm.rank]].count(mark)
    names: dict[Any, str] = {}
    for each, name in marks_and_names:
        names.setdefault(each, name)
    return local_rank, tuple(names.values())


def attached(comm: MPI.Intracomm, key: str, make: Callable[[], Any]) -> Any:
    """Return what is attached to `comm` under `key`, made by `make` the first time.

    MPI's own attribute caching holds it (MPI 4.1, section 7.7), so it goes with the
    communicator. **Collective** where `make` is.
    """
    from mpi4py import MPI

    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval()
    shelf: Any = comm.Get_attr(_keyval)
    if shelf is None:
        shelf = {}
        comm.Set_attr(_keyval, shelf)
    if key not in shelf:
        shelf[key] = make()
    return shelf[key]


def detach(comm: MPI.Intracomm, key: str) -> None:
    """Forget what is attached to `comm` under `key`. Local."""
    if _keyval is not None:
        shelf: Any = comm.Get_attr(_keyval)
        if shelf is not None:
            shelf.pop(key, None)


def library_version() -> str:
    """Return name and version of the MPI library in one line. Local; starts MPI."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n")[0].rstrip("\0").split())


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the rank in COMM_WORLD of each rank of `comm`. Local."""
    from mpi4py import MPI

    own, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = own.Translate_ranks(None, world)
    own.Free()
    world.Free()
    return list(ranks)


def world_size() -> int:
    """Return the number of ranks in COMM_WORLD. Local; starts MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def abort_world(exit_code: int) -> None:
    """End every process of the job. Local."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(exit_code)
