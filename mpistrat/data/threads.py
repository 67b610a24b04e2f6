"""How many threads decode chunks."""

from __future__ import annotations

import os
import re

from mpistrat.cores import num_cores
from mpistrat.settings import environment, settings

__all__ = ["num_decoding_threads"]

_MAX_THREADS = 8
"""Python's own part of reading a chunk keeps more from helping."""

_RANKS_OF_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "PALS_LOCAL_SIZE",
)
"""Variables in which launchers tell how many ranks share this node."""


def num_decoding_threads() -> int:
    """Return the number of threads of a reader. Local.

    ``MPISTRAT_DATA_THREADS``; by default this rank's share of the cores, up to eight.
    """
    chosen = settings().data_threads
    if chosen is not None:
        return chosen
    cores = num_cores()
    if cores == os.cpu_count():  # else the launcher has given this rank cores of its own
        cores //= _ranks_of_node()
    return max(1, min(cores, _MAX_THREADS))


def _ranks_of_node() -> int:
    variables = environment()
    for name in _RANKS_OF_NODE:
        digits = re.match(r"\d+", variables.get(name, ""))  # of Slurm's "4(x2),3" the first
        if digits:
            return max(int(digits[0]), 1)
    return 1
