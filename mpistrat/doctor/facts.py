"""Facts of each rank, and the findings of checks."""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpistrat.arrays import Device
from mpistrat.cuda_api import count_gpus, nccl_library
from mpistrat.mpi.launcher import Launcher
from mpistrat.mpi.world import World
from mpistrat.native import missing_libraries
from mpistrat.settings import environment
from mpistrat.strategies.devices import Offer, make_offer
from mpistrat.system.cpu import own_cores
from mpistrat.version import __version__


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but perhaps not as intended."""
    PROBLEM = "problem"
    """A job would fail, or be much slower than necessary."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    """Subject of the check."""
    level: Level
    seen: str
    why: str = ""
    """Why it matters; empty for `Level.OK`."""
    remedy: str = ""
    """Command or change that helps."""
    short: str = ""
    """Short form of `seen` for the printed report; empty if `seen` is short."""

    @property
    def brief(self) -> str:
        """Text for the printed report."""
        return self.short or self.seen

    @classmethod
    def ok(cls, topic: str, seen: str, short: str = "") -> Finding:
        """Return a finding that needs no attention."""
        return cls(topic, Level.OK, seen, short=short)

    @classmethod
    def warning(cls, topic: str, seen: str, why: str, remedy: str) -> Finding:
        """Return a finding that may be intended."""
        return cls(topic, Level.WARNING, seen, why, remedy)

    @classmethod
    def problem(cls, topic: str, seen: str, why: str, remedy: str) -> Finding:
        """Return a finding that makes the exit code 1."""
        return cls(topic, Level.PROBLEM, seen, why, remedy)


# Open MPI, MPICH, Intel MPI and MVAPICH are called libmpi.so. Cray's name contains the compiler.
_NAME = re.compile(r"libmpi(ch)?(_(gnu|cray|intel|nvidia|amd|aocc)\w*)?\.so[.\d]*")


def mpi_libraries(files: Iterable[str]) -> list[str]:
    """Return the MPI libraries among `files`, with links resolved."""
    found = (each for each in files if _NAME.fullmatch(os.path.basename(each)))
    return sorted({os.path.realpath(each) for each in found})


_PACKAGES = ("mpi4py", "numpy", "h5py", "cupy", "cupy-cuda12x", "cupy-cuda13x")

_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_GPUS = (
    "CUDA_VISIBLE_DEVICES",
    "SLURM_GPUS_ON_NODE",
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "SLURM_GPUS_PER_TASK",
)


@dataclass(frozen=True)
class RankFacts:
    """Facts that a rank knows about itself."""

    rank: int = 0
    node: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    library: str = ""
    """Name and version of the MPI library; empty if it cannot be loaded."""
    cores: tuple[int, ...] = ()
    """Cores that it may use."""
    blas_threads: int = 1
    """Number of threads that NumPy's linear algebra starts."""
    thread_variables: Mapping[str, str] = field(default_factory=dict)
    offer: Offer | None = None
    """GPUs that it sees."""
    gpu_names: tuple[str, ...] = ()
    no_gpu: str = ""
    """Why it sees no GPU."""
    gpu_variables: Mapping[str, str] = field(default_factory=dict)
    nccl: str = ""
    """Version of NCCL; empty if there is none."""
    not_compiled: tuple[str, ...] = ()
    """Parts of the package that run without compiled code."""

    @property
    def asked_threads(self) -> int:
        """Number of threads for which the variables ask; `blas_threads` if none does."""
        asked = [int(text) for text in self.thread_variables.values() if text.isdecimal()]
        return max(asked, default=self.blas_threads)


def collect_facts(world: World | None, library: str, launcher: Launcher) -> RankFacts:
    """Return the facts of this rank. This does not raise."""
    variables = environment()
    offer, names, no_gpu = _look_at_gpus(world.local_rank if world else 0)
    return RankFacts(
        rank=world.rank if world else 0,
        node=launcher.node_name or platform.node(),
        versions=_versions(),
        library=library,
        cores=tuple(sorted(own_cores())),
        blas_threads=_count_blas_threads(),
        thread_variables={name: variables[name] for name in _THREADS if name in variables},
        offer=offer,
        gpu_names=names,
        no_gpu=no_gpu,
        gpu_variables={name: variables[name] for name in _GPUS if name in variables},
        nccl=_nccl_version() if offer is not None else "",
        not_compiled=missing_libraries(),
    )


def _versions() -> dict[str, str]:
    versions = {"mpistrat": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _count_blas_threads() -> int:
    # It sees only loaded libraries. The imports of this module have loaded NumPy's.
    from threadpoolctl import threadpool_info

    pools: list[dict[str, Any]] = threadpool_info()
    return max((int(pool["num_threads"]) for pool in pools), default=1)


def _look_at_gpus(local_rank: int) -> tuple[Offer | None, tuple[str, ...], str]:
    if importlib.util.find_spec("cupy") is None:
        return None, (), "CuPy is not installed"
    try:
        offer = make_offer("auto", local_rank)
        names = [Device("gpu", index).describe_gpu() for index in range(count_gpus())]
    except Exception as error:  # cupy raises its own types
        return None, (), f"CuPy cannot use a GPU: {error}"
    return offer, tuple(names), "" if names else "CuPy sees no GPU"


def _nccl_version() -> str:
    try:
        number = int(nccl_library().get_version())
    except Exception:
        return ""
    major, rest = divmod(number, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def count_allocated_gpus(facts: list[RankFacts]) -> int | None:
    """Return the number of GPUs of a node by its ranks' variables, or ``None`` if none is set."""
    # Use Slurm's variables first. If a GPU is bound to each task, CUDA_VISIBLE_DEVICES is 0 in all
    # tasks.
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        counts = [_count(each.gpu_variables[name]) for each in facts if name in each.gpu_variables]
        if counts:
            return max(counts)
    lists = [
        each.gpu_variables["CUDA_VISIBLE_DEVICES"].split(",")
        for each in facts
        if "CUDA_VISIBLE_DEVICES" in each.gpu_variables
    ]
    if not lists:
        return None
    return len({gpu.strip() for each in lists for gpu in each} - {"", "-1", "NoDevFiles"})


def _count(text: str) -> int:
    """Return the count in a number, such as ``"4"``, or in a list, such as ``"0,1,3"``."""
    if text.isdecimal() and "," not in text:
        return int(text)
    return len([part for part in text.split(",") if part.strip()])


def check_lightning() -> list[Finding]:
    """Return what a user of Lightning must know about MPI; nothing if it is not installed."""
    for package in ("lightning", "pytorch-lightning"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            advice = (
                "as mpi4py is installed, its Trainer() starts MPI to look for ranks: pass "
                "plugins=MPIEnvironment() under mpiexec or srun, LightningEnvironment() elsewhere"
            )
            return [Finding.ok("lightning", f"{package} {version}: {advice}")]
    return []
