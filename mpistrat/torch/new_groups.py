"""How the members of a new process group wait for each other, through the store of torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpistrat.errors import CollectiveMismatchError, CollectiveTimeoutError
from mpistrat.system.callsite import format_place, users_place
from mpistrat.system.text import rank_list

_POLL_S = 0.0005
_NOTICE_S = 0.05
"""After so long, a rank tells the others for which group it waits."""

_REMEDY = (
    "Every rank must call new_group equally often, in the same order, and with the same ranks."
)

_begun: set[str] = set()
"""Names of all groups that this process has begun to make."""


@dataclass(frozen=True)
class Call:
    """A call of new_group, in which a rank waits for the other members."""

    rank: int
    name: str
    """Torch's name of the group."""
    members: list[int]
    place: str

    def __str__(self) -> str:
        return f"rank {self.rank}: new_group({self.members}) at {self.place}"


def wait_for_members(
    store: Any, name: str, members: Sequence[int], own: int, limit_s: float
) -> None:
    """Wait until all members are about to create the group, or raise. **Collective** over them.

    Parameters
    ----------
    store : torch.distributed.Store
        The store of the group.
    name : str
        Torch's name of the group.
    members : sequence of int
        Ranks in the job.
    own : int
        This rank in the job.
    limit_s : float
        After this many seconds it raises.

    Raises
    ------
    CollectiveMismatchError
        If the ranks make different groups.
    CollectiveTimeoutError
        If a member has not come within the limit.
    """
    # MPI would wait without a limit for a rank that never arrives.
    call = Call(own, name, list(members), format_place(users_place(sys._getframe(1))))
    _begun.add(name)
    store.set(f"mpistrat/{own}", str(call))
    keys = [f"mpistrat/{rank}" for rank in members]
    began, has_told = time.monotonic(), False
    while not store.check(keys):
        waited_s = time.monotonic() - began
        if waited_s > _NOTICE_S:
            missing = [rank for rank in members if not store.check([f"mpistrat/{rank}"])]
            if not has_told:
                _tell(own, call)
                has_told = True
            _check_others(call, missing, waited_s, limit_s)
        time.sleep(_POLL_S)
    if has_told:
        _tell(own, None)
    # One by one, because stores in files cannot return several values at once.
    calls = [store.get(key).decode() for key in keys]
    # Two ranks may give one group different members, and wait in MPI for a third.
    if len({each.partition(": ")[2].partition(" at ")[0] for each in calls}) > 1:
        lines = "\n".join(f"  {each}" for each in calls)
        raise CollectiveMismatchError(f"The ranks make different groups:\n{lines}\n{_REMEDY}")


def _check_others(call: Call, missing: Sequence[int], waited_s: float, limit_s: float) -> None:
    """Raise if a missing rank waits for this one in the call of another group, or it is late."""
    others = list(_calls_of(missing))
    # This rank has begun the group of `each` if another thread waits in that call, or if the entry
    # is from an earlier call that has ended since.
    crossed = [each for each in others if each.name not in _begun and call.rank in each.members]
    lines = "\n".join(f"  {each}" for each in (call, *others))
    if crossed:
        raise CollectiveMismatchError(f"The ranks make different groups:\n{lines}\n{_REMEDY}")
    if waited_s > limit_s:
        raise CollectiveTimeoutError(
            f"{rank_list(list(missing))} did not come to new_group({call.members}) at {call.place} "
            f"within the timeout of {limit_s:g} s, as rank {call.rank} did:\n{lines}\n{_REMEDY}"
        )


def _tell(own: int, call: Call | None) -> None:
    """Tell all ranks of the job in which call this rank waits."""
    if dist.is_initialized():  # not while the group of all ranks is made
        text = "" if call is None else json.dumps(list(vars(call).values()))
        distributed_c10d._get_default_store().set(_key(own), text)


def _calls_of(ranks: Sequence[int]) -> Iterator[Call]:
    """Yield the calls in which others wait."""
    if dist.is_initialized():
        store = distributed_c10d._get_default_store()
        for key in map(_key, ranks):
            if store.check([key]) and (text := store.get(key).decode()):
                yield Call(*json.loads(text))


def _key(rank: int) -> str:
    return f"mpistrat/new_group/{rank}"
