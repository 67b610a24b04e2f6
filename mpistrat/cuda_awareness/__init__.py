"""CUDA-awareness of the MPI library: gathers evidence, and weighs it with the result of a trial.

Each source of evidence is wrong somewhere. The library's own query says no in builds of Open MPI
in which UCX does move device memory (open-mpi/ompi#7963), and yes in builds of MVAPICH in which the
support is switched off. A wrong yes ends the job with a segmentation fault or with wrong numbers.
So evidence only decides whether a trial is worth its seconds.
"""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat.settings import environment

if TYPE_CHECKING:
    from mpi4py import MPI


class Answer(enum.IntEnum):
    """Whether we may pass device memory to MPI. The weakest answer is the smallest."""

    NO = 0
    """There is no evidence for it, or a trial failed."""
    CLAIMED = 1
    """There is evidence for it, but no exchange between processes has confirmed it."""
    PROVED = 2
    """Processes have exchanged device memory correctly, or the user vouches for it."""


@dataclass(frozen=True)
class Evidence:
    """One piece of evidence, which was found without using device memory."""

    is_claim: bool
    """Whether it is evidence for CUDA-awareness. False does not mean evidence against it."""
    text: str


class Outcome(enum.Enum):
    """Result of an exchange in child processes."""

    PASSED = "all numbers were right"
    FAILED = "the processes died of it, or numbers were wrong"
    OPEN = "it shows nothing"


@dataclass(frozen=True)
class Trial:
    """Exchange of device memory in child processes."""

    outcome: Outcome
    text: str
    num_processes: int = 0
    """Number of processes in their own world; 0 if it is unknown."""


@dataclass(frozen=True)
class CudaAwareness:
    """Whether the ranks of a world may pass device memory to MPI, and why."""

    answer: Answer
    reasons: tuple[str, ...]
    """One line per piece of evidence that `rank` has found."""
    rank: int = 0
    """Lowest rank with the weakest answer."""

    def __str__(self) -> str:
        lines = [f"CUDA-aware: {self.answer.name.lower()} (rank {self.rank})", *self.reasons]
        return "\n  ".join(lines)


def judge(device_kind: str, override: bool | None, evidence: Sequence[Evidence]) -> CudaAwareness:
    """Return the answer before a trial. `evidence` counts on GPUs if `override` is ``None``."""
    if device_kind != "gpu":
        return CudaAwareness(Answer.NO, ("the replica computes in host memory",))
    if override is True:
        return CudaAwareness(Answer.PROVED, ("MPISTRAT_CUDA_AWARE=on: the user vouches for it",))
    if override is False:
        return CudaAwareness(Answer.NO, ("MPISTRAT_CUDA_AWARE=off",))
    answer = Answer.CLAIMED if any(each.is_claim for each in evidence) else Answer.NO
    return CudaAwareness(answer, tuple(each.text for each in evidence))


def weigh(claimed: CudaAwareness, trials: Sequence[Trial]) -> CudaAwareness:
    """Return the answer after trials."""
    # If a process exchanges device memory with itself, that proves nothing about two processes,
    # because MPI may copy within the process. But if it fails, two processes will fail too.
    if any(each.outcome is Outcome.FAILED for each in trials):
        answer = Answer.NO
    elif any(each.outcome is Outcome.PASSED and each.num_processes > 1 for each in trials):
        answer = Answer.PROVED
    else:
        answer = Answer.CLAIMED
    reasons = claimed.reasons + tuple(each.text for each in trials)
    return replace(claimed, answer=answer, reasons=reasons)


_MPIX_GPU_SUPPORT_CUDA = 0  # as in MPICH's mpi.h

_SWITCHES = {
    "I_MPI_OFFLOAD": "Intel MPI",
    "MPICH_GPU_SUPPORT_ENABLED": "Cray MPICH",
    "MPIR_CVAR_ENABLE_GPU": "MPICH",
    "MV2_USE_CUDA": "MVAPICH2",
    "MVP_ENABLE_GPU": "MVAPICH-Plus",
    "MVP_USE_CUDA": "MVAPICH",
    "OMPI_MCA_opal_cuda_support": "Open MPI",
    "PSP_CUDA": "ParaStation MPI",
}
"""Variables that switch GPU support on and off, and their MPI libraries."""

_OFF = {"", "0", "disable", "false", "n", "no", "off"}

_GPU_PARTS = re.compile(
    r"libmpi_gtl_cuda|libuc[tm]_cuda|libucc_\w+_cuda|mca_(accelerator|btl|coll|common)_(sm)?cuda"
)
"""Names of components of MPI libraries and UCX that are loaded only for CUDA memory."""


def gather_claims(comm: MPI.Intracomm) -> list[Evidence]:
    """Return the evidence from the library and the environment of this process. Starts MPI."""
    from mpi4py import MPI

    try:
        # The extension is linked to the MPI library, so it gives access to the library's symbols.
        library: Any = ctypes.CDLL(MPI.__file__)
    except OSError:
        library = None
    info = comm.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    return [
        ask_library(library),
        read_memory_kinds(kinds),
        list_switches(environment()),
        list_libraries(loaded_files()),
    ]


def ask_library(library: Any) -> Evidence:
    """Return the evidence from the query function of an MPI library. MPI must be started."""
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        return _evidence(query() == 1, "MPIX_Query_cuda_support says")
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is not None:
        supported = ctypes.c_int(0)
        failed = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(supported))
        return _evidence(not failed and supported.value == 1, "MPIX_GPU_query_support says")
    return Evidence(False, "the MPI library has no query for CUDA support")


def _evidence(is_claim: bool, text: str) -> Evidence:
    return Evidence(is_claim, f"{text} {'yes' if is_claim else 'no'}")


def read_memory_kinds(kinds: str | None) -> Evidence:
    """Return the evidence from a communicator's memory kinds, such as "mpi,system,cuda:device"."""
    # MPI 4.1, section 11.4.3.
    if kinds is None:
        return Evidence(False, "the communicator has no mpi_memory_alloc_kinds (MPI 4.1)")
    named = [kind.strip().lower() for kind in kinds.split(",")]
    is_claim = not {"cuda", "cuda:device"}.isdisjoint(named)
    return Evidence(is_claim, f"mpi_memory_alloc_kinds is {kinds}")


def list_switches(variables: Mapping[str, str], names: Iterable[str] = _SWITCHES) -> Evidence:
    """Return the evidence from variables that switch GPU support on or off."""
    found = {name: variables[name] for name in names if name in variables}
    if not found:
        return Evidence(False, "no variable switches GPU support on")
    is_claim = any(value.strip().lower() not in _OFF for value in found.values())
    shown = (f"{name}={value} ({_SWITCHES[name]})" for name, value in found.items())
    return Evidence(is_claim, f"set: {', '.join(shown)}")


def list_libraries(files: Iterable[str]) -> Evidence:
    """Return the evidence from loaded `files` that are components only for device memory."""
    names = sorted({Path(file).name for file in files if _GPU_PARTS.search(Path(file).name)})
    if not names:
        return Evidence(False, "no part of MPI or UCX for CUDA is loaded")
    return Evidence(True, f"loaded: {', '.join(names)}")


def loaded_files() -> list[str]:
    """Return the files that are mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    # Address, permissions, offset, device and inode precede the path, which may contain spaces.
    fields = (line.split(maxsplit=5) for line in lines)
    return [each[5] for each in fields if len(each) == 6]
