"""CUDA-aware MPI: proved, claimed, or claimed and not there."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpistrat.arrays import Device
from mpistrat.cuda_awareness import Answer, CudaAwareness, cuda_awareness
from mpistrat.cuda_awareness.answer import Evidence
from mpistrat.cuda_awareness.claims import (
    gather_claims,
    list_libraries,
    list_switches,
    loaded_files,
)
from mpistrat.doctor.findings import Finding, ok, problem, warning
from mpistrat.doctor.libraries import mpi_libraries
from mpistrat.settings import environment, settings_at_the_end
from mpistrat.world import World

__all__ = ["CudaFacts", "check_cuda_awareness", "collect_cuda_facts", "has_cuda_part"]

_FUNCTIONS = (b"cuPointerGetAttribute", b"cudaPointerGetAttributes", b"cuMemcpy")
"""Without one of them a library cannot tell device memory from that of the host."""


@dataclass(frozen=True)
class CudaFacts:
    """What speaks for and against CUDA-awareness on rank 0, and what was tried."""

    claims: tuple[str, ...] = ()
    """What the library and its environment say for it."""
    only_switches: bool = True
    """Whether variables alone make the claim."""
    is_vouched_for: bool = False
    """Whether the user has set MPISTRAT_CUDA_AWARE=on."""
    has_part: bool = False
    """Whether the library has code for device memory."""
    tried: CudaAwareness | None = None
    """The answer of all ranks; ``None`` where not all of them have GPUs."""


def collect_cuda_facts(world: World, device: Device, all_have_gpus: bool) -> CudaFacts:
    """Return what this rank finds, and try it where all have GPUs. **Collective**."""
    override = settings_at_the_end().cuda_aware
    tried = None
    if all_have_gpus:
        tried = cuda_awareness(world, device, override)
    evidence: Sequence[Evidence] = gather_claims(world.comm)
    switches = list_switches(environment())
    claims = [each.words for each in evidence if each.is_claim]
    files = loaded_files()
    return CudaFacts(
        claims=tuple(claims),
        only_switches=claims == ([switches.words] if switches.is_claim else []),
        is_vouched_for=override is True,
        has_part=has_cuda_part(files),
        tried=tried,
    )


def has_cuda_part(files: Sequence[str]) -> bool:
    """Return whether the MPI library of a process, or a part beside it, can use CUDA. Local.

    Parameters
    ----------
    files : sequence of str
        Those that the process has loaded.
    """
    if list_libraries(files).is_claim:
        return True
    for library in map(Path, mpi_libraries(files)):
        if list_libraries(map(str, library.parent.glob("*/*cuda*.so*"))).is_claim:
            return True
        own = {each.resolve() for each in library.parent.glob("libopen-pal.so*")}
        if any(_names_cuda(each) for each in {library, *own}):
            return True
    return False


def _names_cuda(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            text = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            with text:
                return any(text.find(name) >= 0 for name in _FUNCTIONS)
    except (OSError, ValueError):
        return False


def check_cuda_awareness(facts: CudaFacts) -> Finding:
    """Return whether MPI is what it is said to be. Local."""
    said = "; ".join(facts.claims)
    if facts.is_vouched_for and not facts.has_part:
        return problem(
            "cuda-aware",
            "claimed by MPISTRAT_CUDA_AWARE=on, but the MPI library has no code for CUDA",
            "mpistrat gives GPU memory to MPI then, and the job ends with a segmentation fault.",
            "unset MPISTRAT_CUDA_AWARE",
        )
    if facts.tried is not None:
        return _judge_trial(facts.tried, said)
    if facts.claims and facts.only_switches and not facts.has_part:
        names = " ".join(each.partition("=")[0] for each in said.removeprefix("set: ").split(", "))
        return problem(
            "cuda-aware",
            f"claimed, but not there: {said}, while the MPI library has no code for CUDA",
            "Programs that believe the variable crash; mpistrat tries first, which costs seconds.",
            f"unset {names}, or use a CUDA-aware MPI",
        )
    if facts.claims:
        return ok("cuda-aware", f"claimed ({said}); no GPU here to prove it")
    return ok("cuda-aware", "no; arrays of GPUs would travel by NCCL or through host memory")


def _judge_trial(tried: CudaAwareness, said: str) -> Finding:
    evidence = "; ".join(tried.reasons)
    if tried.answer is Answer.PROVED:
        return ok("cuda-aware", f"proved: {tried.reasons[-1] if tried.reasons else ''}")
    if tried.answer is Answer.CLAIMED:
        return warning(
            "cuda-aware",
            f"claimed, not proved: {evidence}",
            "Arrays travel by NCCL or through host memory until it is proved.",
            "srun -N 2 -n 2 --gpus-per-task=1 python -m mpistrat.cuda_awareness; if that passes: "
            "export MPISTRAT_CUDA_AWARE=on",
        )
    if said:
        return problem(
            "cuda-aware",
            f"claimed, but not there: {evidence}",
            "Programs that believe it crash or compute with wrong numbers; mpistrat does not.",
            "export MPISTRAT_CUDA_AWARE=off saves the trial; or use another MPI library",
        )
    return ok("cuda-aware", "no; arrays travel by NCCL or through host memory")
