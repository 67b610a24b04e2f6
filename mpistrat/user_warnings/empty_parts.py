"""Parts of batches that have no example, and the NaN that a mean over one of them makes.

When a batch has fewer examples than there are replicas, some of them get arrays of length 0, and
the mean of those is NaN. Whoever takes what a replica has computed asks here whether its part was
empty, which costs nothing unless it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpistrat.user_warnings.once import warn_once

of_replicas: dict[int, str] = {}
"""The replicas of this process with an empty part of the batch that was handed out last: the place
and the batch, as messages call them, by replica."""


def note_part(replica: int, batch: str | None) -> None:
    """Record that `replica` has got its part of a batch; `batch` names the batch if it is empty."""
    if batch is not None:
        of_replicas[replica] = batch
    elif of_replicas:
        of_replicas.pop(replica, None)


def warn_of_nan(replica: int, named: Iterable[tuple[str, Any]]) -> None:
    """Warn once if `replica` has an empty part, and one of the `named` arrays holds a NaN."""
    batch = of_replicas.get(replica)
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
