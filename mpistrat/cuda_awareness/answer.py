"""What is known of CUDA-awareness, and what follows from it. Pure logic."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Answer", "CudaAwareness", "Evidence", "Outcome", "Trial", "judge", "weigh"]


class Answer(enum.IntEnum):
    """Whether MPI may be given device memory. The weakest of several answers is the smallest."""

    NO = 0
    """Nothing speaks for it, or it was tried and failed."""
    CLAIMED = 1
    """Something speaks for it, but no exchange between processes has shown it."""
    PROVED = 2
    """Processes have exchanged device memory with the right numbers, or the user vouches."""


@dataclass(frozen=True)
class Evidence:
    """One thing that was found out without using device memory."""

    is_claim: bool
    """Whether it speaks for CUDA-awareness. What does not, does not speak against it either."""
    words: str


class Outcome(enum.Enum):
    """How an exchange in child processes has ended."""

    PASSED = "all numbers were right"
    FAILED = "the processes died of it, or numbers were wrong"
    OPEN = "it shows nothing"


@dataclass(frozen=True)
class Trial:
    """An exchange of device memory in child processes."""

    outcome: Outcome
    words: str
    num_processes: int = 0
    """How many took part, in a world of their own; 0 where that is not known."""


@dataclass(frozen=True)
class CudaAwareness:
    """Whether the ranks of a world may give device memory to MPI, and why."""

    answer: Answer
    reasons: tuple[str, ...]
    """One line for each piece of evidence, as found on `rank`."""
    rank: int = 0
    """The lowest rank among those with the weakest answer."""

    def __str__(self) -> str:
        lines = [f"CUDA-aware: {self.answer.name.lower()} (rank {self.rank})", *self.reasons]
        return "\n  ".join(lines)


def judge(device_kind: str, override: bool | None, evidence: Sequence[Evidence]) -> CudaAwareness:
    """Return the answer before any exchange. Local.

    Parameters
    ----------
    device_kind : str
        ``"cpu"`` or ``"gpu"``, where the replica computes.
    override : bool or None
        What the user says, ``None`` for nothing.
    evidence : sequence of Evidence
        Not looked at where the first two decide.
    """
    if device_kind != "gpu":
        return CudaAwareness(Answer.NO, ("the replica computes in host memory",))
    if override is True:
        return CudaAwareness(Answer.PROVED, ("MPISTRAT_CUDA_AWARE=on: the user vouches for it",))
    if override is False:
        return CudaAwareness(Answer.NO, ("MPISTRAT_CUDA_AWARE=off",))
    answer = Answer.CLAIMED if any(each.is_claim for each in evidence) else Answer.NO
    return CudaAwareness(answer, tuple(each.words for each in evidence))


def weigh(claimed: CudaAwareness, trials: Sequence[Trial]) -> CudaAwareness:
    """Return the answer after exchanges were tried. Local.

    That a process alone can give device memory to MPI proves nothing of two: it may be a copy
    within the process. That it cannot disproves everything.
    """
    if any(each.outcome is Outcome.FAILED for each in trials):
        answer = Answer.NO
    elif any(each.outcome is Outcome.PASSED and each.num_processes > 1 for each in trials):
        answer = Answer.PROVED
    else:
        answer = Answer.CLAIMED
    reasons = claimed.reasons + tuple(each.words for each in trials)
    return replace(claimed, answer=answer, reasons=reasons)
