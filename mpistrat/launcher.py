"""What started this process, read from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mpistrat.settings import environment

__all__ = ["Launcher", "find_launcher", "is_one_of_several"]


@dataclass(frozen=True)
class Launcher:
    """The program that started this rank."""

    name: str
    """One of ``slurm``, ``openmpi``, ``mpich``, ``intel``, ``flux``, ``pals``, ``none``."""
    num_tasks: int
    """How many tasks `srun` started in this step; 1 where another launcher did."""
    node_name: str | None
    """The node's name where the launcher gives one."""
    task: int = 0
    """Number of this task among them."""
    mpi_flag_hint: str = "srun --mpi=pmi2 (MPICH) or srun --mpi=pmix (Open MPI)"
    """What to type where the tasks do not find each other."""


# mpiexec inside a batch job is mpiexec: its own variables are looked for first.
_MARKS = (
    ("openmpi", "OMPI_COMM_WORLD_SIZE"),
    ("intel", "I_MPI_HYDRA_PMI_CONNECT"),
    ("flux", "FLUX_TASK_RANK"),
)


def find_launcher(variables: Mapping[str, str] | None = None) -> Launcher:
    """Return the launcher of this process. Local."""
    variables = environment() if variables is None else variables
    step_tasks = int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    node_name = variables.get("SLURMD_NODENAME")
    for name, mark in _MARKS:
        if mark in variables:
            return Launcher(name, 1, node_name)
    # Slurm's pmi2 plugin sets PMI_RANK as Hydra does, but not this one. On several nodes of a job
    # Hydra's ranks are in a step of Slurm too, that of its proxies.
    if "PMI_RANK" in variables and "MPI_LOCALNRANKS" in variables:
        return Launcher("mpich", 1, node_name)
    if "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables:
        return Launcher("slurm", step_tasks, node_name, int(variables["SLURM_PROCID"]))
    if "PALS_RANKID" in variables:
        return Launcher("pals", 1, node_name)
    if "PMI_RANK" in variables:
        return Launcher("mpich", 1, node_name)
    return Launcher("none", 1, node_name)


def is_one_of_several() -> bool:
    """Return whether a launcher with a PMI or PMIx connection started this very process. Local.

    A child of a rank inherits the variables, but neither the open connection nor the process id.
    """
    variables = environment()
    if "PMIX_RANK" in variables and variables.get("SLURM_TASK_PID") == str(os.getpid()):
        return int(variables.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if int(variables.get("PMI_SIZE", "1")) == 1 or "PMI_FD" not in variables:
        return False
    try:
        os.fstat(int(variables["PMI_FD"]))
    except (OSError, ValueError):
        return False
    return True
