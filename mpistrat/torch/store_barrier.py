"""Barrier of ranks in torch's store, for work outside of collectives."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed import distributed_c10d

from mpistrat.errors import CollectiveTimeoutError

_POLL_S = 0.001
_LONGEST_POLL_S = 0.05


@dataclass(frozen=True)
class Meeting:
    """Ranks that report their progress to each other through the store. Can be pickled.

    A collective would need the process group, which torch does not pass to storages, and would
    interleave with the collectives that the program issues on a different thread.
    """

    key: str
    """A unique key, equal on all ranks."""
    num_ranks: int

    def stage(self, name: str) -> Stage:
        """Return a context manager for this rank's part of a stage."""
        return Stage(self.key + "/" + name, self.num_ranks)


class Stage:
    """One stage of the work: each rank reports whether it has done its part."""

    def __init__(self, key: str, num_ranks: int) -> None:
        self._key = key
        self._num_ranks = num_ranks
        self._has_failed = False

    def _store(self) -> Any:
        return distributed_c10d._get_default_store()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._num_ranks > 1:
            # In this order: a rank that sees all ranks here also sees that one of them has failed.
            if kind is not None:
                self._store().add(f"{self._key}/failed", 1)
            self._store().add(f"{self._key}/here", 1)

    def is_everywhere(self) -> bool:
        """Wait for all ranks, and return whether all have done their part."""
        if self._num_ranks == 1:
            return True
        store, limit = self._store(), distributed_c10d.default_pg_timeout
        began, pause_s = time.monotonic(), _POLL_S
        # Adding 0 reads the counter, even if no rank has set it yet. `get` would wait for the key.
        while store.add(f"{self._key}/here", 0) < self._num_ranks:
            if store.add(f"{self._key}/failed", 0):
                return False
            if time.monotonic() - began > limit.total_seconds():
                raise CollectiveTimeoutError(
                    f"Not all of {self._num_ranks} ranks came to {self._key} within "
                    f"{limit.total_seconds():g} s. Look for a rank that writes slowly."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return bool(store.add(f"{self._key}/failed", 0) == 0)
