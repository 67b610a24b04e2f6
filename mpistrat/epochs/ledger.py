"""What a rank has done so far, as far as the others must have done the same."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

__all__ = ["Ledger", "Signature"]

_MASK = 2**64 - 1
# Odd constants spread small counters over all 64 bits, so that two counters never cancel.
_SPREAD = (
    0x9E3779B97F4A7C15,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0xD6E8FEB86659FD93,
    0xFF51AFD7ED558CCD,
)

class Signature(tuple[Any, ...]):
    """What the ranks agree on, for calls that keep it: its digest is computed once."""

    digest: int | None = None


def _digest_of(signature: object) -> int:
    # It must be the same on every rank, which hash() of a string is not.
    return int.from_bytes(blake2b(repr(signature).encode(), digest_size=8).digest(), "big")


@dataclass
class Ledger:
    """Counters of one rank on one channel. Ranks that agree have equal ones."""

    sequence: int = 0
    """Number of the next collective."""
    runs: int = 0
    """Calls of `Strategy.run` begun."""
    merge_calls: int = 0
    """Calls of `ReplicaContext.merge_call` begun."""
    updates: int = 0
    """Calls of `StrategyExtended.update` begun."""
    failures: int = 0
    """Functions given to those three that raised."""
    last_failure: str = ""
    """What the last of them raised, and where."""
    _mixed: tuple[tuple[int, ...], int] = ((), 0)
    """The counters but `sequence` that were looked at last, and what they add to a digest."""

    def as_json(self) -> dict[str, Any]:
        """Return all but `sequence` in JSON values. Local."""
        names = "runs", "merge_calls", "updates", "failures", "last_failure"
        return {name: getattr(self, name) for name in names}

    def digest(self, signature: Any) -> int:
        """Return 64 bits of the next collective's `signature` and the counters. Local."""
        base = signature.digest if type(signature) is Signature else _digest_of(signature)
        if base is None:
            base = signature.digest = _digest_of(signature)
        counters = self.runs, self.merge_calls, self.failures, self.updates
        if counters != self._mixed[0]:
            mixed = sum(map(operator.mul, counters, _SPREAD[1:]))
            self._mixed = (counters, mixed)
        return (base + self.sequence * _SPREAD[0] + self._mixed[1]) & _MASK
