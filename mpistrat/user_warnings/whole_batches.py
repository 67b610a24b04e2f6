"""Batches of a dataset that was not distributed, which `run` gives whole to every replica.

Each replica then computes the same on the whole batch, and sums over the replicas are too large by
their number.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from mpistrat import nests
from mpistrat.user_warnings.once import warn_once

latest: list[weakref.ref[Any]] = []
"""The arrays of the batch that the program got last; no batch is kept alive."""


def note_batch(batch: Any) -> None:
    """Record a batch that a program takes from a dataset that was not distributed."""
    latest.clear()
    for leaf in nests.flatten(batch)[0]:
        with contextlib.suppress(TypeError):  # numbers have no weak references
            latest.append(weakref.ref(leaf))


def warn_if_whole(arguments: Any) -> None:
    """Warn once if `arguments` of `run` contain an array of the batch that was noted last."""
    # Only arrays that still exist: a new object may have the id of one that was freed.
    whole = {id(array) for each in latest if (array := each()) is not None}
    if whole and any(id(leaf) in whole for leaf in nests.flatten(arguments)[0]):
        warn_once(
            "strategy.run got a batch of a dataset that was not distributed: each replica computes "
            "with the whole batch, so sums over the replicas count each example once per replica. "
            "Iterate over strategy.distribute_dataset(dataset), which gives each replica its part. "
            "If every replica needs the whole batch, filter mpistrat.errors.ScopeWarning here.",
            key="whole batch",
        )
