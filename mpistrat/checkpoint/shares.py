"""Which rank does what, where several read or write the variables of one file."""

from __future__ import annotations

import heapq
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpistrat.collectives import Collectives
from mpistrat.cores import cores_of_mask, mask_of_cores, own_cores

__all__ = ["Shares", "agree_on_shares", "share_out"]


@dataclass(frozen=True)
class Shares:
    """Who does what, and this rank's own part."""

    owners: Mapping[str, int]
    """The rank of each variable."""
    own: Sequence[str]
    """The variables of this rank."""
    num_threads: int
    """How many threads have a core here, 0 where this rank does not take part."""


def agree_on_shares(ranks: Collectives, sizes: Mapping[str, int], takes_part: bool) -> Shares:
    """Share out variables among the ranks that take part. **Collective**.

    Parameters
    ----------
    ranks : Collectives
    sizes : mapping of str to int
        Bytes of each variable, equal on all ranks.
    takes_part : bool
        Whether this rank does. Without `sizes` it may be none.
    """
    host = socket.gethostname()
    own = mask_of_cores(own_cores()) if takes_part else 0
    seats = ranks.gather_json([host, own] if takes_part else None)
    owners = share_out(sizes, [rank for rank, seat in enumerate(seats) if seat])
    beside = [seat[1] for seat in seats if seat and seat[0] == host]
    return Shares(
        owners,
        [name for name, owner in owners.items() if owner == ranks.rank],
        _num_threads(own, beside),
    )


def share_out(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Return which of `ranks` has each variable, so that each has about as many bytes. Local."""
    loads = [(0, rank) for rank in ranks]
    owners = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


def _num_threads(own: int, masks: Sequence[int]) -> int:
    """Return this rank's part of the cores that it may use, where others may use them too."""
    return round(sum(1 / sum(m >> core & 1 for m in masks) for core in cores_of_mask(own)))
