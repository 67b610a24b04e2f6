"""Ledger of collectives: the progress of a rank, as the digest that the ranks compare."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from mpistrat.system.xxh3 import digest_of_values, mixed_digest

_MASK = 2**64 - 1
# Odd constants spread small counters over all 64 bits, so that two counters never cancel.
SPREAD = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
    0xFF51AFD7ED558CCD,
    0xC4CEB9FE1A85EC53,
)


class Status(enum.IntEnum):
    """The status that a rank contributes to a round."""

    CALL = 0
    """A collective that the rank is ready to make."""
    REFUSAL = 1
    """An error: the arguments of its call are bad, or its part of some work failed."""
    END = 2
    """The rank has left the program."""


class Outcome(enum.Enum):
    """The result of a round."""

    ALL_CALL = "every rank is ready to do the same"
    ALL_REFUSE = "every rank refuses"
    MIXED = "the ranks differ"


class Signature(tuple[Any, ...]):
    """The tuple that ranks compare, with its digest, for calls that are repeated."""

    digest: int | None = None


def call_name(signature: object) -> str:
    """Return the name of the public function to which `signature` belongs."""
    return str(signature[0]) if isinstance(signature, tuple) else str(signature)


def digest_of(signature: Any) -> int:
    """Return 64 bits of `signature`, the same on every rank."""
    known: int | None = signature.digest if type(signature) is Signature else None
    if known is None:
        # hash() of a string is not the same on every rank.
        text = repr(signature).encode()
        known = int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
        if type(signature) is Signature:
            signature.digest = known
    return known


@dataclass
class Ledger:
    """Counters of one rank on one channel, equal on ranks that agree."""

    usual_at: int = -1
    """The collective for which the first replica of a rank has found nothing unusual."""
    sequence: int = 0
    """Number of the next collective."""
    runs: int = 0
    """Number of calls of `Strategy.run` that have begun."""
    merge_calls: int = 0
    """Number of calls of `ReplicaContext.merge_call` that have begun."""
    updates: int = 0
    """Number of calls of `StrategyExtended.update` that have begun."""
    failures: int = 0
    """Number of functions passed to those three that raised."""
    last_failure: str = ""
    """The error of the last such function, and where it was raised."""
    batches: int = 0
    """64 bits that represent the batches passed to `Strategy.run`."""
    batch: tuple[int, int] | None = None
    """The last batch: its epoch, and its number in that epoch."""
    _mixed: tuple[tuple[int, ...], int] = ((), 0)
    """The counters except `sequence` at the last digest, and the number that they add to it."""

    def as_json(self) -> dict[str, Any]:
        """Return all counters except `sequence` as JSON values."""
        names = "runs", "merge_calls", "updates", "failures", "last_failure", "batches", "batch"
        return {name: getattr(self, name) for name in names}

    def note_batch(self, batch: tuple[int, int]) -> None:
        """Count a batch that this rank works on; all ranks must do so at the same time."""
        # The hash of integers is the same in every process.
        self.batches = (self.batches + hash(batch)) & _MASK
        self.batch = batch

    def digest(self, signature: Any) -> int:
        """Return 64 bits of the next collective's `signature` and the counters."""
        # `count` in native/fast_reduction.c computes the same sum. If only one of the two changes,
        # a rank on the fast path disagrees with a rank that is not.
        base = signature.digest if type(signature) is Signature else None
        if base is None:
            base = digest_of(signature)
        counters = self.runs, self.merge_calls, self.failures, self.updates, self.batches
        # These counters change far less often than `sequence`, so their part of the sum is kept.
        if counters != self._mixed[0]:
            mixed = sum(map(operator.mul, counters, SPREAD[1:]))
            self._mixed = (counters, mixed)
        return (base + self.sequence * SPREAD[0] + self._mixed[1]) & _MASK


def compared_values(arrays: Iterable[np.ndarray]) -> tuple[int, str]:
    """Return 64 bits that represent the values of arrays, and a text for error messages."""
    listed = list(arrays)
    if not listed:
        return 0, ""
    digest = mixed_digest([digest_of_values(array) for array in listed])
    if len(listed) == 1 and listed[0].size == 1:
        return digest, f"with the value {listed[0].item()}"
    return digest, f"with values of digest {digest:016x}"
