"""The element_spec of ranks that have no example to find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.data.spec import ArraySpec, describe_kinds
from mpistrat.errors import DataError

if TYPE_CHECKING:
    from mpistrat.collectives import Collectives

__all__ = ["spec_of_any_rank"]

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}


def spec_of_any_rank(spec: Any, collectives: Collectives, kind: str) -> Any:
    """Return `spec`, or that of the first rank that has one. **Collective**.

    Parameters
    ----------
    spec : nest of ArraySpec, or None
        ``None`` where this rank has no example.
    collectives : Collectives
    kind : str
        Name of the public function.

    Returns
    -------
    nest of ArraySpec, or None
        ``None`` where no rank has one.

    Raises
    ------
    DataError
        On every rank, if specs differ in more than lengths, or if there is a rank without a spec,
        and the nest of the other has containers that JSON cannot hold.
    """
    own = None if spec is None else describe_kinds(spec)
    kinds: list[str | None] = collectives.gather_json(own, kind)
    _check_same_kinds(kinds, kind)
    has_spec = [each is not None for each in kinds]
    if all(has_spec) or not any(has_spec):
        return spec
    owner = has_spec.index(True)
    with collectives.together(kind):
        value = _to_json(spec) if collectives.rank == owner else None
    value = collectives.broadcast_json(value, owner, kind)
    return _from_json(value) if spec is None else spec


def _check_same_kinds(kinds: list[str | None], kind: str) -> None:
    known = {each: rank for rank, each in reversed(list(enumerate(kinds))) if each is not None}
    if len(known) > 1:
        (first, rank), (other, other_rank) = sorted(known.items(), key=lambda pair: pair[1])[:2]
        raise DataError(
            f"{kind}: the elements of all ranks must have one structure and one dtype for each "
            f"leaf, but rank {rank} has {first}, and rank {other_rank} {other}."
        )


def _to_json(node: Any) -> Any:
    """Return ``[kind, ...]``: JSON values for a nest of `ArraySpec`."""
    if isinstance(node, ArraySpec) and np.dtype(node.dtype.str) == node.dtype:
        return ["array", list(node.shape), node.dtype.str]
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return ["dict", {key: _to_json(child) for key, child in node.items()}]
    if type(node) in _SEQUENCES.values():
        return [type(node).__name__, [_to_json(child) for child in node]]
    raise DataError(
        "A rank has no example to find the element_spec by mapping it, and cannot be told of "
        f"{node!r}. Let map return dicts with string keys, tuples or lists of plain arrays, or "
        "give every rank an example."
    )


def _from_json(value: Any) -> Any:
    kind, content, *rest = value
    if kind == "array":
        return ArraySpec(content, *rest)
    if kind == "dict":
        return {key: _from_json(child) for key, child in content.items()}
    return _SEQUENCES[kind](_from_json(child) for child in content)
