"""How a new world of ranks is started from here: the command, and a clean environment.

A process that a launcher has started finds the way to its world in variables. Its children
inherit them, and would look for a place in that world.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mpistrat.settings import environment

__all__ = ["mpiexec", "mpiexec_program", "without_launcher"]

# What a launcher leaves in the environment of its ranks, and must not reach the next launcher.
_LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "MPI_LOCAL"),
    *("HYDI_", "HYDRA_", "I_MPI_HYDRA_"),
    *("OMPI_", "PRTE_"),
    *("MPIRUN_", "MPISPAWN_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_"),
    *("SLURM_", "FLUX_", "PALS_", "JSM_"),
)
# Parameters of Open MPI and its parts have such names too; those that mpiexec has set for its own
# ranks are the exception.
_PARAMETERS = re.compile(
    r"(OMPI|PMIX|PRTE)_MCA_(?!PREFIXES$|cpu_type$|initial_wdir$|num_procs$|"
    r"(orte|prte|ess|plm|ras|grpcomm|pmix)(_|$))"
)


def without_launcher(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `variables` without those by which a launcher speaks to this process. Local.

    What tunes the MPI library stays.

    Parameters
    ----------
    variables : mapping, optional
        By default those of this process.
    """
    own = environment() if variables is None else variables
    return {
        name: value
        for name, value in own.items()
        if not name.startswith(_LAUNCHER_PREFIXES) or _PARAMETERS.match(name)
    } | {
        # The launcher that has started this process was allowed too.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def mpiexec_program() -> str | None:
    """Return the mpiexec beside this python, else the one on PATH, else ``None``. Local."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpiexec(ranks: int, limit_s: float = 60) -> list[str]:
    """Return the command that starts `ranks` ranks of a program on this machine. Local.

    Raises
    ------
    FileNotFoundError
        If there is none.
    OSError, subprocess.TimeoutExpired
        If it does not tell its version, within `limit_s` seconds.
    """
    program = mpiexec_program()
    if program is None:
        raise FileNotFoundError(f"There is no mpiexec beside {sys.executable} or on PATH.")
    version = subprocess.run(
        [program, "--version"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=limit_s,
    ).stdout
    flags = ["--oversubscribe"] if "Open MPI" in version else []
    return [program, *flags, "-n", str(ranks)]
