"""Warnings about slips in the program of a user, each given once per place.

They are about parts of batches without an example, whose mean is NaN, and about batches that `run`
gives whole to every replica. Looking for either costs nothing unless there is one.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable
from types import CodeType
from typing import Any

from mpistrat import nests
from mpistrat.errors import ScopeWarning
from mpistrat.system.callsite import call_site, users_place, users_stacklevel

_given: set[tuple[str, CodeType | None, int]] = set()
"""The messages that were given, each with the user's instruction that it is about."""


def warn_once(message: str, category: type[ScopeWarning] = ScopeWarning, key: str = "") -> None:
    """Warn at the user's line that called this package, the first time that it gets there.

    Messages that differ from time to time are one if they have the same `key`.
    """
    # Not left to the filters of `warnings`: under "always" a training loop would warn at each step.
    place = users_place(sys._getframe(1))
    given = (key or message, *(place or (None, 0)))
    if given in _given:
        return
    # The line stands in the text too, as the filename of a warning may be a file of this package
    # where the program's line is on another thread.
    warnings.warn(f"{call_site()}: {message}", category, stacklevel=users_stacklevel())
    _given.add(given)  # not where the warning has become an error


empty_parts: dict[int, str] = {}
"""The replicas of this process with an empty part of the batch that was handed out last: the place
and the batch, as messages call them, by replica."""


def note_part(replica: int, batch: str | None) -> None:
    """Record that `replica` has got its part of a batch; `batch` names the batch if it is empty."""
    if batch is not None:
        empty_parts[replica] = batch
    elif empty_parts:
        empty_parts.pop(replica, None)


def warn_of_nan(replica: int, named: Iterable[tuple[str, Any]]) -> None:
    """Warn once if `replica` has an empty part, and one of the `named` arrays holds a NaN."""
    batch = empty_parts.get(replica)
    if batch is None:
        return
    found = [name for name, array in named if _has_nan(array)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn_once(
            f"{found[0]}{more} is NaN on {batch} (from 0): this replica has no example of that "
            "batch, and the mean of nothing is NaN, which spreads to all replicas. Divide a sum by "
            "the global batch size instead of taking a mean, skip a part of length 0, or use "
            "batch(..., drop_remainder=True).",
            key="empty part",
        )


def _has_nan(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, float | complex) and value != value
    # PyTorch's dtypes have no kind.
    if getattr(dtype, "kind", "f") in "biuSUOMm" or getattr(dtype, "names", None):
        return False
    return bool((value != value).any())  # bfloat16 too, which isnan may not know


latest_batch: list[weakref.ref[Any]] = []
"""The arrays of the batch that the program got last; no batch is kept alive."""


def note_batch(batch: Any) -> None:
    """Record a batch that a program takes from a dataset that was not distributed."""
    latest_batch.clear()
    for leaf in nests.flatten(batch)[0]:
        with contextlib.suppress(TypeError):  # numbers have no weak references
            latest_batch.append(weakref.ref(leaf))


def warn_if_whole(arguments: Any) -> None:
    """Warn once if `arguments` of `run` contain an array of the batch that was noted last."""
    # Only arrays that still exist: a new object may have the id of one that was freed.
    whole = {id(array) for each in latest_batch if (array := each()) is not None}
    if whole and any(id(leaf) in whole for leaf in nests.flatten(arguments)[0]):
        warn_once(
            "strategy.run got a batch of a dataset that was not distributed: each replica computes "
            "with the whole batch, so sums over the replicas count each example once per replica. "
            "Iterate over strategy.distribute_dataset(dataset), which gives each replica its part. "
            "If every replica needs the whole batch, filter mpistrat.errors.ScopeWarning here.",
            key="whole batch",
        )
