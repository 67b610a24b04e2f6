"""Replica drift: digests of variables, compared over ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, host_view
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.errors import ReplicaDriftError
from mpistrat.options import ReduceOp
from mpistrat.system.text import rank_list, ranks_by_value
from mpistrat.system.xxh3 import digest_of_values
from mpistrat.trackable import Reach, Trackable, has_attributes, walk_objects
from mpistrat.variables.kinds import SyncOnReadVariable
from mpistrat.variables.sharded import ShardedVariable
from mpistrat.variables.variable import Variable

_MAX_GROUPS = 16
"""Largest number of lines in a message, however many ranks there are."""


def variables_to_compare(kind: str, objects: Any) -> dict[str, Variable]:
    """Return the variables in `objects` by path, each once."""
    everything = list(_variables_in(kind, "", objects))
    found: dict[str, Variable] = {}
    known: set[int] = set()
    # Sorted, because ranks may have filled a dict in different orders.
    for path, variable in sorted(everything, key=lambda pair: pair[0]):
        if id(variable) not in known:
            known.add(id(variable))
            found[path] = variable
    if not found:
        raise ValueError(f"{kind}: there is no variable to compare in {objects!r}.")
    return found


def _variables_in(
    kind: str, root: str, objects: Any, reach: Reach = Reach.GIVEN
) -> Iterator[tuple[str, Variable]]:
    found = walk_objects(root, objects, lambda each: isinstance(each, Variable), reach)
    for path, thing, reach in found:
        is_given = reach is Reach.GIVEN
        if isinstance(thing, SyncOnReadVariable):
            if is_given:
                raise ValueError(
                    f"{kind}: the SyncOnRead variable {thing.name!r} differs from replica to "
                    "replica by nature. Compare mirrored variables."
                )
        elif isinstance(thing, ShardedVariable):
            if is_given:
                raise ValueError(
                    f"{kind}: the sharded variable {thing.name!r} has one copy of each row, so "
                    "there is nothing to compare. Compare mirrored variables."
                )
        elif isinstance(thing, Variable):
            yield path, thing
        elif isinstance(thing, Trackable):
            for each in thing._checkpoint_dependents():
                parts = (path, each.name, getattr(each.of, "name", ""))
                below = "/".join(part for part in parts if part)
                yield from _variables_in(kind, below, each.child, Reach.CHILD)
        elif is_given and not (
            isinstance(thing, dict | list | tuple | deque) or has_attributes(thing)
        ):
            raise TypeError(
                f"{kind} takes variables and objects that hold them, not {thing!r} of type "
                f"{type(thing).__name__}."
            )


def check_replicas_agree(call: CollectiveCall, variables: dict[str, Variable]) -> None:
    """Check that every replica holds the same bytes. **Collective**."""
    # One component per rank is enough: replicas of a rank share the memory of a mirrored variable.
    components = [each.values[0] for each in variables.values()]
    digests = np.array([digest_of(each) for each in components], np.uint64)
    # The ranks of a replica hold different parts of a split variable, so each shard has its own
    # column. The others are zeros, which do not change a maximum.
    layout = call.layout
    pairs = np.zeros((2, len(variables), layout.ranks_per_replica), np.uint64)
    for number, variable in enumerate(variables.values()):
        columns = layout.shard if variable.split_axis is not None else slice(None)
        pairs[0, number, columns], pairs[1, number, columns] = digests[number], ~digests[number]
    signature = tuple((path, str(each.dtype), each.full_shape) for path, each in variables.items())
    differs = differ_over_ranks(call, pairs, signature)
    differing = np.flatnonzero(differs.any(axis=1)).tolist()
    if differing:
        first = differing[0]
        path = list(variables)[first]
        ranks: Sequence[int] = range(layout.num_ranks)
        if variables[path].split_axis is not None:
            ranks = layout.ranks_of_shard(int(differs[first].argmax()))
        # `differs` is equal on all ranks, so all of them raise, and all take part in the gather in
        # `_drift`.
        raise _drift(call, path, variables[path], digests[first], ranks, len(differing))


def differ_over_ranks(
    call: CollectiveCall, pairs: np.ndarray, signature: object = ()
) -> np.ndarray:
    """Return which digests differ; `pairs` are digests and their complements. **Collective**."""
    # The maximum of the complements is the complement of the minimum, so one MAX finds both.
    (largest,) = call.all_reduce(ReduceOp.MAX, [pairs], signature)
    differs: np.ndarray = largest[0] != ~largest[1]
    return differs


def digest_of(array: Array) -> int:
    """Return 64 bits that are equal for equal bytes of the values."""
    return digest_of_values(host_view(array))


def _drift(
    call: CollectiveCall,
    path: str,
    variable: Variable,
    digest: Any,
    ranks: Sequence[int],
    num_differing: int,
) -> ReplicaDriftError:
    """Return the error that says which of `ranks` hold equal values. **Collective**."""
    (digests,) = AllGather(0).forward(call, [np.array([digest])])
    lines = lines_of_groups({rank: digests.tolist()[rank] for rank in ranks})
    place = f" at {path!r}" if path not in ("", variable.name) else ""
    lines.append(f"Other variables that differ: {num_differing - 1}.")
    return ReplicaDriftError(
        f"The replicas of the variable {variable.name!r}{place}, {variable.dtype} of the shape "
        f"{variable.full_shape}, have drifted apart:\n"
        + "\n".join(lines)
        + " Writes in update context must be the same on every rank. To continue, assign one value "
        "to all replicas or restore a checkpoint."
    )


def lines_of_groups(digests: Mapping[int, object]) -> list[str]:
    """Return lines that say which ranks have equal digests, from the digest of each rank."""
    groups = ranks_by_value(digests.items())
    largest_first = sorted(groups.values(), key=len, reverse=True)
    lines = [f"  {rank_list(ranks)}: a different value" for ranks in largest_first[:_MAX_GROUPS]]
    lines[0] = f"  {rank_list(largest_first[0])}: one value"
    if largest_first[_MAX_GROUPS:]:
        lines.append(f"  and {len(largest_first) - _MAX_GROUPS} more groups of ranks")
    return lines
