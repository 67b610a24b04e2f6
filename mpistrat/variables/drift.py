"""Whether replicas still hold the same: digests compared first, values only where they differ."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from mpistrat.arrays import Array, host_view
from mpistrat.collectives import CollectiveCall
from mpistrat.epochs.report import rank_list
from mpistrat.errors import ReplicaDriftError
from mpistrat.options import ReduceOp
from mpistrat.tracking import Trackable
from mpistrat.variables.base import Variable
from mpistrat.variables.broadcasting import broadcast_in_pieces
from mpistrat.variables.difference import describe_difference, value_bytes
from mpistrat.variables.sync_on_read import SyncOnReadVariable

__all__ = ["check_replicas_agree", "variables_to_compare"]

_MAX_GROUPS = 16
"""Lines of a message, however many ranks there are."""


def variables_to_compare(kind: str, objects: Any) -> dict[str, Variable]:
    """Return the variables in `objects` by path, each once. Local.

    Parameters
    ----------
    kind : str
        The public function, for messages.
    objects : Variable, Trackable, other object, or dicts, lists and tuples of them
        The SyncOnRead variables of trackables and other objects are left out.

    Raises
    ------
    ValueError
        For a SyncOnRead variable that is given itself, or where there is nothing to compare.
    TypeError
        For something given that can hold no variable.
    """
    found: dict[str, Variable] = {}
    known: set[int] = set()
    for path, variable in _variables_in(kind, "", objects, True, ()):
        if id(variable) not in known:
            known.add(id(variable))
            found[path] = variable
    if not found:
        raise ValueError(f"{kind}: there is no variable to compare in {objects!r}.")
    return found


def _variables_in(
    kind: str, path: str, thing: Any, is_given: bool, above: tuple[int, ...]
) -> Iterator[tuple[str, Variable]]:
    """Yield paths and variables; `is_given` where the caller has named `thing` itself."""
    if isinstance(thing, SyncOnReadVariable):
        if is_given:
            raise ValueError(
                f"{kind}: the SyncOnRead variable {thing.name!r} differs from replica to replica "
                "by nature. Compare mirrored variables."
            )
    elif isinstance(thing, Variable):
        yield path, thing
    elif _can_hold_variables(thing):
        is_given = is_given and isinstance(thing, dict | list | tuple)
        if id(thing) in above:  # a reference back up, as from a layer to its model
            return
        for name, child in _children(thing):
            below = f"{path}/{name}" if path else name
            yield from _variables_in(kind, below, child, is_given, (*above, id(thing)))
    elif is_given:
        raise TypeError(
            f"{kind} takes variables and objects that hold them, not {thing!r} of type "
            f"{type(thing).__name__}."
        )


def _can_hold_variables(thing: Any) -> bool:
    if isinstance(thing, Trackable | dict | list | tuple):
        return True
    if isinstance(thing, type | types.ModuleType | types.FunctionType | types.MethodType):
        return False
    is_ours = type(thing).__module__.partition(".")[0] == "mpistrat"
    return not is_ours and hasattr(thing, "__dict__")


def _children(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, Trackable):
        dependents = thing.checkpoint_dependents()
        of_variables = [(f"{each.name}/{_name(each.of)}", each.child) for each in dependents]
        return [*thing.checkpoint_children().items(), *of_variables]
    if isinstance(thing, dict):
        # Ranks may have filled a dict in different orders.
        return sorted(((str(key), child) for key, child in thing.items()), key=lambda pair: pair[0])
    if isinstance(thing, list | tuple):
        return [(str(number), child) for number, child in enumerate(thing)]
    return list(vars(thing).items())


def _name(variable: Any) -> str:
    return str(getattr(variable, "name", ""))


def check_replicas_agree(call: CollectiveCall, variables: dict[str, Variable]) -> None:
    """Make sure that every replica holds the same bytes. **Collective**.

    One message of 16 bytes a variable where they do.

    Raises
    ------
    ReplicaDriftError
        On every rank, for the first variable that differs.
    """
    components = [each.values[0] for each in variables.values()]
    digests = np.array([_digest(each) for each in components], np.uint64)
    # The largest digest is the smallest one too where all are equal.
    words = np.stack([digests, ~digests])
    signature = tuple(
        (path, str(each.dtype), tuple(each.shape))
        for path, each in zip(variables, components, strict=True)
    )
    (largest,) = call.all_reduce(ReduceOp.MAX, [words], signature)
    differing = np.flatnonzero(largest[0] != ~largest[1]).tolist()
    if differing:
        path = list(variables)[differing[0]]
        raise _drift(call, path, variables[path], digests[differing[0]], differing)


def _digest(array: Array) -> int:
    host = np.ascontiguousarray(value_bytes(host_view(array)))
    return int.from_bytes(blake2b(host.data, digest_size=8).digest(), "little")


def _drift(
    call: CollectiveCall, path: str, variable: Variable, digest: Any, differing: Sequence[int]
) -> ReplicaDriftError:
    """Return the error that says who holds what. **Collective**."""
    (digests,) = call.all_gather([np.array([digest])], 0)
    groups: dict[int, list[int]] = {}
    for rank, each in enumerate(digests.tolist()):
        groups.setdefault(each, []).append(rank)
    # The first of the largest groups, so that one rank that went astray is measured.
    reference = max(groups.values(), key=len)
    own = host_view(variable.values[0])
    expected = broadcast_in_pieces(call, own, root=reference[0])
    texts = call.exchange(describe_difference(own, expected))
    lines = [f"  {rank_list(reference)}: one value, which the others are compared with"]
    others = [ranks for ranks in groups.values() if ranks is not reference]
    lines += [f"  {rank_list(ranks)}: {texts[ranks[0]]}" for ranks in others[:_MAX_GROUPS]]
    if others[_MAX_GROUPS:]:
        lines.append(f"  and {len(others) - _MAX_GROUPS} more groups of ranks")
    place = f" at {path!r}" if path not in ("", variable.name) else ""
    lines.append(f"Other variables that differ: {len(differing) - 1}.")
    return ReplicaDriftError(
        f"The replicas of the variable {variable.name!r}{place}, {variable.dtype} of the shape "
        f"{variable.shape}, have drifted apart:\n"
        + "\n".join(lines)
        + " Writes in update context must be the same on every rank. To go on, assign one value "
        "to all or restore a checkpoint."
    )
