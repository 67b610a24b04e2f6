"""Which checkpoints of a folder stay when a new one has come. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.checkpoint.folder import Entry

__all__ = ["Retention"]


class Retention:
    """The rule of `max_to_keep` and `keep_every_n_hours`, and the files that it governs.

    Parameters
    ----------
    max_to_keep : int or None
        So many of the newest stay; ``None`` keeps all.
    keep_every_s : float or None
        Of the older ones, one stays whenever so many seconds lie between it and the last that
        stayed for this reason.
    found : sequence of Entry
        What the folder holds already, oldest first. Files beyond `max_to_keep` are there
        because they were kept before.
    now_s : float
        Where the count of seconds begins in an empty folder.
    """

    def __init__(
        self,
        max_to_keep: int | None,
        keep_every_s: float | None,
        found: Sequence[Entry],
        now_s: float,
    ) -> None:
        self._max_to_keep = max_to_keep
        self._keep_every_s = keep_every_s
        self._count_from_s = float("-inf")
        self._recent = list(found)
        self._kept: list[Entry] = []
        self._keep_some_of(self._older())
        if not self._kept:
            self._count_from_s = found[0].created_s if found else now_s

    def __copy__(self) -> Retention:
        twin = object.__new__(Retention)
        vars(twin).update(vars(self))
        twin._recent, twin._kept = list(self._recent), list(self._kept)
        return twin

    @property
    def entries(self) -> list[Entry]:
        """All files, oldest first. Local."""
        return sorted(self._kept + self._recent)

    def add(self, entry: Entry) -> list[Entry]:
        """Take in a new file, and return those that are to go. Local."""
        self._kept = [each for each in self._kept if each.path != entry.path]
        self._recent = [each for each in self._recent if each.path != entry.path]
        self._recent.append(entry)
        surplus = self._keep_some_of(self._older())
        self._recent = [each for each in self._recent if each not in surplus]
        return surplus

    def _older(self) -> list[Entry]:
        if self._max_to_keep is None:
            return []
        return self._recent[: max(len(self._recent) - self._max_to_keep, 0)]

    def _keep_some_of(self, older: Sequence[Entry]) -> list[Entry]:
        """Keep those that the rule keeps for good, and return the rest."""
        surplus = []
        for entry in older:
            if self._keep_every_s is None or (
                entry.created_s - self._count_from_s < self._keep_every_s
            ):
                surplus.append(entry)
            else:
                self._count_from_s = entry.created_s
                self._kept.append(entry)
                self._recent.remove(entry)
        return surplus
