"""Drift at a save: digests of mirrored variables and tensors, compared over ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mpistrat.checkpoint.state_json import SplitState
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError, ReplicaDriftError, ReplicaDriftWarning
from mpistrat.layout import Layout
from mpistrat.system.text import rank_list
from mpistrat.system.xxh3 import digest_of_values
from mpistrat.user_warnings import warn_once
from mpistrat.variables import MirroredVariable, Variable
from mpistrat.variables.drift import digest_of

_WHEN_DRIFTED = ("warn", "raise", "ignore")
"""What a save does about replicas that differ."""

_MAX_NAMES = 8


class _DriftAtSaveError(ReplicaDriftError, CheckpointError):
    """A save with ``drift="raise"`` has found replicas that differ."""


# Tracebacks show the name of the public class.
_DriftAtSaveError.__name__ = _DriftAtSaveError.__qualname__ = ReplicaDriftError.__name__


def check_drift_option(drift: object) -> None:
    """Refuse another value of the argument `drift` than `_WHEN_DRIFTED`."""
    if drift not in _WHEN_DRIFTED:
        allowed = ", ".join(map(repr, _WHEN_DRIFTED))
        raise ValueError(f"drift must be one of {allowed}, not {drift!r}.")


def mirrored_digests(variables: Mapping[str, Variable]) -> dict[str, str]:
    """Return a digest of this rank's values of each mirrored variable, by path. Local."""
    return {
        path: f"{digest_of(variable._storage):016x}"
        for path, variable in variables.items()
        if isinstance(variable, MirroredVariable)
    }


def tensor_digests(
    states: Mapping[str, SplitState], keys: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Return a digest of each tensor at the `keys` of the states, by path. Local."""
    return {
        f"{name}/{key}": f"{digest_of_values(np.asarray(array)):016x}"
        for name, own in keys.items()
        for key, array in states[name][1].items()
        if key in own and (isinstance(array, np.ndarray) or not array.num_ranks)
    }


def drifted_variables(
    collectives: Collectives,
    what: str,
    variables: Mapping[str, Variable],
    own: Mapping[str, str],
    drift: str,
) -> set[str]:
    """Return the paths of values that differ, and warn or raise. **Collective**.

    `own` has digests of mirrored variables and of tensors. The ranks that hold the same part of a
    variable are compared: all of them, unless it is split over the ranks of a replica.
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
