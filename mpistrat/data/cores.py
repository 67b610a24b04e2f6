"""Cores of a rank: its share of those of the node, for the threads of data sets."""

from __future__ import annotations

import os
import re

from mpistrat.settings import environment
from mpistrat.system.cpu import num_cores

__all__ = ["cores_of_rank"]

_RANKS_OF_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "PALS_LOCAL_SIZE",
)
"""Variables of launchers for the number of ranks that share this node."""


def cores_of_rank() -> int:
    """Return this rank's share of the cores that it may use, at least one."""
    cores = num_cores()
    if cores == os.cpu_count():  # else the launcher has bound this rank to its own cores
        cores //= _ranks_of_node()
    return max(cores, 1)


def _ranks_of_node() -> int:
    variables = environment()
    for name in _RANKS_OF_NODE:
        digits = re.match(r"\d+", variables.get(name, ""))  # of Slurm's "4(x2),3" the first
        if digits:
            return max(int(digits[0]), 1)
    return 1
