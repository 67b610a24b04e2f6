"""Warnings about mistakes in the user's program, which appear once per place.

One is about a replica whose part of a batch has no example, so that a mean is NaN. The other is
about a batch that `run` passes whole to every replica. The checks cost nothing in other cases.
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
"""Messages that were shown, each with the instruction of the user's code that caused it."""


def warn_once(message: str, category: type[ScopeWarning] = ScopeWarning, key: str = "") -> None:
    """Warn once at the line of the user's code that called this package.

    Messages with the same `key` count as one, even if they differ.
    """
    # The filters of `warnings` are not enough: under "always" a training loop would warn at each
    # step.
    place = users_place(sys._getframe(1))
    given = (key or message, *(place or (None, 0)))
    if given in _given:
        return
    # Put the line into the text too: if the user's line is on a different thread, the filename of
    # the warning may be a file of this package.
    warnings.warn(f"{call_site()}: {message}", category, stacklevel=users_stacklevel())
    _given.add(given)  # not reached if a filter turns the warning into an error


empty_parts: dict[int, str] = {}
"""For each replica of this process whose part of the latest batch is empty: the place and the
batch, as text for messages."""


def note_part(replica: int, batch: str | None) -> None:
    """Record that `replica` got its part of a batch; `batch` names the batch if that is empty."""
    if batch is not None:
        empty_parts[replica] = batch
    elif empty_parts:
        empty_parts.pop(replica, None)


def warn_of_nan(replica: int, named: Iterable[tuple[str, Any]]) -> None:
    """Warn once if `replica` has an empty part and one of the `named` arrays contains a NaN."""
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
    return bool((value != value).any())  # isnan may not support bfloat16


latest_batch: list[weakref.ref[Any]] = []
"""Arrays of the latest batch. The weak references do not keep the batch alive."""


def note_batch(batch: Any) -> None:
    """Record a batch that the program takes from a dataset that was not distributed."""
    latest_batch.clear()
    for leaf in nests.flatten(batch)[0]:
        with contextlib.suppress(TypeError):  # numbers have no weak references
            latest_batch.append(weakref.ref(leaf))


def warn_if_whole(arguments: Any) -> None:
    """Warn once if the `arguments` of `run` contain an array of the latest batch."""
    # Compare only arrays that still exist: a new object may have the id of a freed one.
    whole = {id(array) for each in latest_batch if (array := each()) is not None}
    if whole and any(id(leaf) in whole for leaf in nests.flatten(arguments)[0]):
        warn_once(
            "strategy.run got a batch of a dataset that was not distributed: each replica computes "
            "with the whole batch, so sums over the replicas count each example once per replica. "
            "Iterate over strategy.distribute_dataset(dataset), which gives each replica its part. "
            "If every replica needs the whole batch, filter mpistrat.errors.ScopeWarning here.",
            key="whole batch",
        )
