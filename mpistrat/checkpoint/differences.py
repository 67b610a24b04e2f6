"""Differences between ranks that a save has found: some raise an error, others only warn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError, ReplicaDriftError, ReplicaDriftWarning
from mpistrat.layout import Layout
from mpistrat.system.text import rank_list
from mpistrat.user_warnings import warn_once
from mpistrat.variables import Variable

_MAX_NAMES = 8


class _DriftAtSaveError(ReplicaDriftError, CheckpointError):
    """A save with ``drift="raise"`` has found replicas that differ."""


# Tracebacks show the name of the public class.
_DriftAtSaveError.__name__ = _DriftAtSaveError.__qualname__ = ReplicaDriftError.__name__


def drifted_variables(
    collectives: Collectives,
    what: str,
    variables: Mapping[str, Variable],
    own: Mapping[str, str],
    drift: str,
) -> set[str]:
    """Return the paths of values that differ, and warn or raise. **Collective**.

    `own` has this rank's digests of mirrored variables and of tensors. Ranks that hold the same
    part of a variable are compared: all ranks, unless the variable is split over the ranks of a
    replica.
    """
    of_ranks: list[Mapping[str, str]] = collectives.gather_json(own, what)
    layout, differing = collectives.layout, {}
    for path in own:
        others = [
            rank
            for rank, each in enumerate(of_ranks)
            if each[path] != of_ranks[_first_with_part(layout, variables.get(path), rank)][path]
        ]
        if others:
            differing[path] = others
    if differing:
        _report(what, variables, differing, drift)
    return set(differing)


def _first_with_part(layout: Layout, variable: Variable | None, rank: int) -> int:
    """Return the first rank that holds the same part of `variable` as `rank`."""
    return 0 if variable is None or variable.split_axis is None else layout.shard_of(rank)


def _report(
    what: str,
    variables: Mapping[str, Variable],
    differing: Mapping[str, Sequence[int]],
    drift: str,
) -> None:
    shown = [
        f"{path!r}{_name_beside(path, variables.get(path))} on {rank_list(ranks)}"
        for path, ranks in list(differing.items())[:_MAX_NAMES]
    ]
    rest = len(differing) - len(shown)
    more = f" and {rest} more" if rest else ""
    text = (
        f"{what}: values that should be equal on all replicas have drifted apart; from rank 0's "
        f"differ: {', '.join(shown)}{more}."
    )
    remedy = (
        " Writes in update context, to variable.storage or from random numbers must be the same "
        "on every rank, and so must the weights and steps of a PyTorch module outside of "
        "DistributedDataParallel; assert_replicas_agree, of the strategy or of mpistrat.torch, "
        "finds the step after which they are not."
    )
    if drift == "raise":
        raise _DriftAtSaveError(f"{text} Nothing is saved.{remedy}")
    warn_once(f"{text} Rank 0's values are saved.{remedy}", ReplicaDriftWarning)


def _name_beside(path: str, variable: Variable | None) -> str:
    return "" if variable is None or path == variable.name else f" (variable {variable.name!r})"


def refuse_differing(collectives: Collectives, what: str, path: str, own: Sequence[str]) -> None:
    """Raise on every rank how the first rank with different objects differs. **Collective**.

    `own` are the paths of the objects on this rank.
    """
    first = collectives.broadcast_json(own)
    with collectives.common_outcome(what, path):
        if own != first:
            differing = sorted(set(own) ^ set(first)) or "only in their order"
            raise ValueError(
                f"{what}: the objects on rank {collectives.rank} of {collectives.size} differ from "
                f"those on rank 0: {differing}. Every rank must save the same objects in the same "
                "order."
            )


def refuse_differing_state(collectives: Collectives, what: str, digests: Mapping[str, str]) -> None:
    """Raise on every rank which states are not equal on all ranks. **Collective**."""
    of_ranks = collectives.gather_json(digests, what)
    lines = []
    for name, digest in of_ranks[0].items():
        others = [rank for rank, each in enumerate(of_ranks) if each[name] != digest]
        if others:
            lines.append(f"  {name}: differs between rank 0 and {rank_list(others)}")
    raise CheckpointError(
        f"{what}: state that differs between ranks cannot be saved as one:\n"
        + "\n".join(lines)
        + "\nWrap each of these as ms.PerReplicaState(obj) to save all of them, or make them "
        "equal. Random numbers from ms.get_replica_context().rng(...) have no state to save."
    )
