"""Position of a rank in its cluster, and printing on only one rank."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

from mpistrat import context
from mpistrat.mpi.world import world_rank


@dataclass(frozen=True)
class ClusterResolver:
    """Facts about the job and this rank's position in it."""

    task_id: int
    """The rank. In a parameter-server job, the number among the ranks of the same `task_type`."""
    num_workers: int
    """Number of ranks. In a parameter-server job, the number of workers."""
    local_rank: int
    """Number of this rank among the ranks of its node."""
    hosts: tuple[str, ...]
    """One name per node."""
    launcher: str
    """``"slurm"``, ``"openmpi"``, ``"mpich"``, ``"intel"``, ``"flux"``, ``"pals"``, ``"lsf"`` (for
    jsrun), or ``"none"``."""
    task_type: str = "worker"
    """``"worker"``: every rank computes. `ParameterServerStrategy` also has a ``"chief"`` and
    servers, ``"ps"``."""


def print_on_chief(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = True,
) -> None:
    """Print only on rank 0, like the builtin ``print``. Local.

    In the scope of a strategy of several ranks this is its rank 0, otherwise rank 0 of the job. The
    other ranks do nothing.

    Parameters
    ----------
    *values : object
        The values to print.
    sep, end, file
        As for the builtin ``print``.
    flush : bool
        Whether to flush the stream. The default is true, because launchers read through pipes.

    Examples
    --------
    >>> ms.print("epoch", 1)
    epoch 1
    """
    frame = context.current()
    collectives = None if frame is None else frame.collectives
    # A strategy with one rank exists on each rank of the job, so only rank 0 of the job may print.
    is_alone = collectives is None or collectives.size == 1
    if (world_rank() if is_alone or collectives is None else collectives.rank) == 0:
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
