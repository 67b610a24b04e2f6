"""Launchers: finds the one that started this process, and how many ranks share its node."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpistrat.errors import LaunchError
from mpistrat.settings import environment
from mpistrat.system.cpu import num_cores


@dataclass(frozen=True)
class Launcher:
    """Program that started this rank."""

    name: str
    """``slurm``, ``openmpi``, ``mpich``, ``intel``, ``flux``, ``pals``, ``lsf`` or ``none``."""
    num_tasks: int
    """Number of tasks that it started, including this one; 1 if it is unknown."""
    node_name: str | None
    """Name of the node, if the launcher sets one."""
    task: int = 0
    """Number of this task among all tasks."""
    local_task: int | None = None
    """Number of this task among the tasks of its node; ``None`` if the launcher does not say."""
    protocol: str | None = None
    """Value of ``srun --mpi``, from the flag or the site's default; ``None`` if it is unknown."""
    has_only_pmix: bool = False
    """Whether a library can find the other tasks only by PMIx."""
    is_inherited: bool = False
    """Whether a rank started this process, which then has its variables but not its connection."""

    @property
    def title(self) -> str:
        """Usual name of the launcher."""
        return _TITLES[self.name]

    def remedy(self, library: str) -> str:
        """Return how to start tasks so that they find each other with the MPI library `library`."""
        if self.is_inherited:
            unset = _UNSET_PMIX if self.has_only_pmix else _UNSET_PMI
            return (
                f"Start this process without them: env {unset}. mpistrat.testing.run_on_ranks does "
                "so."
            )
        if self.name == "slurm":
            flag, family = srun_flag(library)
            first = f"Start the job with srun {flag} ({family}). " if flag else ""
            return f"{first}--mpi=pmi2 is for MPICH and its relatives, --mpi=pmix for Open MPI."
        if self.name == "flux":
            return (
                "Start the job with flux run -o pmi=pmix (Open MPI; the plugin is called "
                "flux-pmix), or flux run -o pmi=simple (MPICH)."
            )
        if self.name == "pals":
            return (
                "Start the job with mpiexec --pmi=pmix (Open MPI, Intel MPI), or take the library "
                "that belongs to this launcher (Cray MPICH)."
            )
        return f"Start the job with the mpiexec of this library, {library}."


_UNSET_PMI = "-u PMI_FD -u PMI_RANK -u PMI_SIZE -u SLURM_STEP_ID"
_UNSET_PMIX = "-u PMIX_NAMESPACE -u PMIX_RANK -u OMPI_COMM_WORLD_SIZE -u SLURM_STEP_ID"

_TITLES = {
    "slurm": "Slurm",
    "openmpi": "mpiexec of Open MPI",
    "mpich": "mpiexec of MPICH (Hydra)",
    "intel": "mpiexec of Intel MPI",
    "flux": "Flux",
    "pals": "mpiexec of PALS",
    "lsf": "jsrun of LSF",
    "none": "no launcher",
}

_SRUN_FLAGS = (
    ("Open MPI", "--mpi=pmix", "Open MPI"),
    ("CRAY", "--mpi=cray_shasta", "Cray MPICH"),
    ("Intel", "--mpi=pmi2", "Intel MPI, with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so"),
    ("MVAPICH", "--mpi=pmi2", "MVAPICH"),
    ("MPICH", "--mpi=pmi2", "MPICH"),
)
"""Mark in the library's version, flag, name. MPICH comes last: the others derive from it."""


def srun_flag(library: str) -> tuple[str, str]:
    """Return srun's flag ``--mpi`` for an MPI library, and the name of the library."""
    for mark, flag, family in _SRUN_FLAGS:
        if mark in library:
            return flag, family
    return "", ""


@dataclass(frozen=True)
class _Marks:
    """Environment variables of a launcher."""

    name: str
    present: tuple[str, ...]
    """Variables that it sets, and that no launcher further down in the list sets all."""
    num_tasks: str
    task: str
    local_task: str


_HYDRA = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")

# Check mpiexec's variables before a batch system's, because an mpiexec inside a batch job is the
# launcher. jsrun starts a relative of Open MPI, and also sets Open MPI's variables.
_LAUNCHERS = (
    _Marks(
        "lsf",
        ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
        *("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
    ),
    _Marks(
        "openmpi",
        ("OMPI_COMM_WORLD_SIZE",),
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    _Marks("intel", ("I_MPI_HYDRA_PMI_CONNECT",), *_HYDRA),
    _Marks(
        "flux",
        ("FLUX_TASK_RANK",),
        *("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ),
    # Slurm's pmi2 plugin sets PMI_RANK like Hydra, but not MPI_LOCALNRANKS. In a job on several
    # nodes, Hydra's ranks are also in a step of Slurm, the step of Hydra's proxies.
    _Marks("mpich", ("PMI_RANK", "MPI_LOCALNRANKS"), *_HYDRA),
    _Marks("slurm", ("SLURM_STEP_ID", "SLURM_PROCID"), *_SLURM),
    _Marks("pals", ("PALS_RANKID",), *("PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID")),
    _Marks("mpich", ("PMI_RANK",), *_HYDRA),
)


def find_launcher(variables: Mapping[str, str] | None = None) -> Launcher:
    """Return the launcher of this process."""
    variables = environment() if variables is None else variables
    node_name = variables.get("SLURMD_NODENAME")
    for marks in _LAUNCHERS:
        if all(name in variables for name in marks.present):
            return Launcher(
                marks.name,
                _number(variables, marks.num_tasks) or 1,
                node_name,
                _number(variables, marks.task) or 0,
                _number(variables, marks.local_task),
                variables.get("SLURM_MPI_TYPE") if marks.name == "slurm" else None,
                "PMIX_NAMESPACE" in variables and "PMI_FD" not in variables,
                _is_inherited(variables),
            )
    return Launcher("none", 1, node_name)


def is_on_one_node() -> bool:
    """Return whether the launcher says that all its tasks run on this node."""
    variables = environment()
    launcher = find_launcher(variables)
    if launcher.name == "slurm":
        return variables.get("SLURM_STEP_NUM_NODES") == "1"
    tasks_here = _number(variables, _TASKS_HERE.get(launcher.name, ""))
    return tasks_here is not None and tasks_here == launcher.num_tasks


_TASKS_HERE = {
    "openmpi": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpich": "MPI_LOCALNRANKS",
    "intel": "MPI_LOCALNRANKS",
    "lsf": "JSM_NAMESPACE_LOCAL_SIZE",
}
"""Variable with the number of tasks on this node, by launcher."""


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


def is_one_of_several() -> bool:
    """Return whether a launcher with a PMI or PMIx connection started this process."""
    # A child of a rank inherits the variables, but neither the open connection nor the process id.
    variables = environment()
    if "PMIX_RANK" in variables and variables.get("SLURM_TASK_PID") == str(os.getpid()):
        return int(variables.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if variables.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return _parent_program() in _OPEN_MPI_DAEMONS
    return variables.get("PMI_SIZE", "1") != "1" and _is_connected(variables)


def check_torchrun(size: int) -> None:
    """Raise `LaunchError` if PyTorch's launcher started processes that MPI does not connect."""
    found = _task_of_torchrun()
    if size > 1 or found is None:
        return
    tasks, rank = found
    error = LaunchError(
        f"torchrun (torch.distributed.run) started {tasks} processes, but MPI sees a world of one "
        "rank, so every process would be a separate job. Start the program without torchrun, with "
        f"mpistrat run -n {tasks} program.py, mpiexec or srun. If there is no torchrun, unset RANK "
        "and WORLD_SIZE, which are left over from a different job."
    )
    error._is_reported_elsewhere = rank != 0
    raise error


def unconnected_task() -> tuple[str, int, int] | None:
    """Return launcher, number of processes and number of this one, if MPI does not connect them.

    Returns ``None`` if no launcher started this process, or if it started only this one.
    """
    found = _task_of_torchrun()
    if found is not None:
        return "torchrun", *found
    launcher = find_launcher()
    is_task = launcher.name == "slurm" and not launcher.is_inherited and not is_one_of_several()
    if is_task and launcher.num_tasks > 1:
        return "srun", launcher.num_tasks, launcher.task
    return None


def _task_of_torchrun() -> tuple[int, int] | None:
    variables = environment()
    tasks, rank = variables.get("WORLD_SIZE", ""), variables.get("RANK", "")
    if not tasks.isdecimal() or not rank.isdecimal() or int(tasks) <= 1:
        return None
    return int(tasks), int(rank)


def keeps_survivors() -> bool:
    """Return whether MPICH's mpiexec, on this node, has the option to keep ranks after a crash."""
    try:
        # The parent is Hydra's proxy on this node, and its parent is mpiexec if that runs here.
        of_proxy = Path(f"/proc/{os.getppid()}/stat").read_text()
        pid = int(of_proxy.rpartition(")")[2].split()[1])
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return False
    is_told = any(each.lstrip(b"-") == b"disable-auto-cleanup" for each in arguments)
    return is_told and _parent_program().startswith("hydra")


def launch_command() -> list[str]:
    """Return the command line of the parent process, or an empty list if it is unknown."""
    try:
        text = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return text.decode(errors="replace").rstrip("\0").split("\0")


_OPEN_MPI_DAEMONS = ("prterun", "prted", "orterun", "orted")


def _parent_program() -> str:
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        return ""


def _is_inherited(variables: Mapping[str, str]) -> bool:
    """Return whether the rank's variables belong to a process that has started this one."""
    if "PMI_FD" in variables:
        return not _is_connected(variables)
    if "PMIX_NAMESPACE" not in variables:
        return False
    # PMIx accepts a second process with the same name, which then waits for ranks that never come.
    pid, own = os.getppid(), _pmix_name(variables)
    while pid > 1:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            pairs = (entry.partition("=") for entry in entries.split("\0"))
            # A parent without this name is the launcher, so this process is the rank itself.
            if _pmix_name({name: value for name, _, value in pairs}) != own:
                return False
            # A script that only starts the rank also has the variables, but no MPI library.
            if _MPI_LIBRARY.search(Path(f"/proc/{pid}/maps").read_text(errors="replace")):
                return True
            status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            pid = int(status.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def _pmix_name(variables: Mapping[str, str]) -> tuple[str | None, str | None]:
    return variables.get("PMIX_NAMESPACE"), variables.get("PMIX_RANK")


_MPI_LIBRARY = re.compile(r"/libmpi[^/]*\.so")


def _is_connected(variables: Mapping[str, str]) -> bool:
    if "PMI_FD" not in variables:
        return False
    try:
        mode = os.fstat(int(variables["PMI_FD"])).st_mode
    except (OSError, ValueError):
        return False
    # A child that has inherited the variable may have opened a file with this number.
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


# Variables that a launcher sets for its ranks, and that a second launcher must not see.
_LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX_", "MPI_LOCAL"),
    *("HYDI_", "HYDRA_", "I_MPI_HYDRA_"),
    *("OMPI_", "PRTE_"),
    *("MPIRUN_", "MPISPAWN_", "MV2_COMM_WORLD_", "MVP_COMM_WORLD_"),
    *("SLURM_", "FLUX_", "PALS_", "JSM_"),
)
# Parameters of Open MPI and its parts have such names too, and must be kept, except those that
# mpiexec has set for its own ranks.
_PARAMETERS = re.compile(
    r"(OMPI|PMIX|PRTE)_MCA_(?!PREFIXES$|cpu_type$|initial_wdir$|num_procs$|"
    r"(orte|prte|ess|plm|ras|grpcomm|pmix)(_|$))"
)


def without_launcher(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without the variables that a launcher sets for its ranks.

    `variables` is by default the environment of this process.
    """
    own = environment() if variables is None else variables
    return {
        name: value
        for name, value in own.items()
        if not name.startswith(_LAUNCHER_PREFIXES) or _PARAMETERS.match(name)
    } | {
        # The launcher of this process was also allowed to run as root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


_RANKS_OF_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "PALS_LOCAL_SIZE",
)
"""Variables in which launchers pass the number of ranks on this node."""


def cores_of_rank() -> int:
    """Return this rank's share of the cores that it may use, at least one."""
    cores = num_cores()
    if cores == os.cpu_count():  # otherwise the launcher has bound this rank to its own cores
        cores //= _ranks_of_node()
    return max(cores, 1)


def _ranks_of_node() -> int:
    variables = environment()
    for name in _RANKS_OF_NODE:
        digits = re.match(r"\d+", variables.get(name, ""))  # in Slurm's "4(x2),3" the first one
        if digits:
            return max(int(digits[0]), 1)
    return 1
