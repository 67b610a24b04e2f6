"""The ranks that train one model with a trainer of a different library, and what they exchange."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import is_one_of_several
from mpistrat.settings import environment

_REMEDY = (
    "Call mpistrat.torch.init() before the trainer is created, or start the program by torchrun."
)


def rank_and_size(who: str, remedy: str = _REMEDY) -> tuple[int, int]:
    """Return this rank and the number of ranks; a single process is rank 0 of 1. Local."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if is_one_of_several() or environment().get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"{who}: this process is one of several, but there is no process group, so each would "
            f"train by itself and write the same files. {remedy}"
        )
    return 0, 1


def check_trainer_size(who: str, size_of_trainer: int, remedy: str) -> None:
    """Raise LaunchError if a trainer does not use all ranks of the process group. Local."""
    _, size = rank_and_size(who)
    if size_of_trainer != size:
        raise LaunchError(
            f"{who}: the trainer trains on {size_of_trainer} rank(s), but the process group has "
            f"{size}. {remedy}"
        )


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. **Collective**."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def from_root(value: Any) -> Any:
    """Return rank 0's value. **Collective**."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]
