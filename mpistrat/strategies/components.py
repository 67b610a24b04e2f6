"""Values in cross-replica context taken apart: what is mirrored, and this rank's components."""

from __future__ import annotations

from typing import Any

from mpistrat import nests
from mpistrat.options import ReduceOp
from mpistrat.values import Mirrored, PerReplica, localize, mirror
from mpistrat.variables import MirroredVariable, Variable

__all__ = ["Components", "local_components"]


class Components:
    """A nest whose mirrored leaves need no communication.

    Parameters
    ----------
    kind : str
        Name of the public function, for messages.
    op : ReduceOp
    value : nest
        Of arrays, numbers, variables and distributed values, which may hold nests themselves.

    Attributes
    ----------
    mirrored : dict
        The mirrored leaves by position. Variables are copied, `Mirrored` values are not.
    rest : nest
        This rank's components, with an empty tuple in place of each mirrored leaf, so that the
        ranks agree on which leaves are.

    Raises
    ------
    ValueError
        For SUM or PROD of a mirrored leaf, which would count it once per replica.
    """

    def __init__(self, kind: str, op: ReduceOp, value: Any) -> None:
        leaves, self._structure = nests.flatten(nests.map_nest(_opened, value))
        self.mirrored: dict[int, Any] = {}
        kept: list[Any] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Mirrored | MirroredVariable):
                _check_mirrored(kind, op, leaf)
                (component,) = leaf.values
                is_view = isinstance(leaf, Variable)
                self.mirrored[position] = component.copy() if is_view else component
                kept.append(())
            else:
                kept.append(_local_component(leaf))
        self.rest = nests.unflatten(self._structure, kept)

    def joined(self, reduced_rest: Any) -> Any:
        """Return the nest of the reduced `rest` and the mirrored leaves. Local."""
        reduced = iter(nests.flatten(reduced_rest)[0])
        positions = range(self._structure.num_leaves)
        leaves = [self.mirrored[i] if i in self.mirrored else next(reduced) for i in positions]
        return nests.unflatten(self._structure, leaves)


def local_components(value: Any) -> Any:
    """Return `value` with this rank's component of each variable and distributed value. Local."""
    return nests.map_nest(_local_component, localize(value))


def _opened(leaf: Any) -> Any:
    """Return a distributed value that holds a nest as a nest of distributed values."""
    if isinstance(leaf, PerReplica):
        return nests.map_nest(_opened, leaf.values[0])
    if isinstance(leaf, Mirrored):
        return mirror(leaf.values[0])
    return leaf


def _local_component(leaf: Any) -> Any:
    return leaf.values[0] if isinstance(leaf, Variable) else leaf


def _check_mirrored(kind: str, op: ReduceOp, value: Any) -> None:
    if op in (ReduceOp.SUM, ReduceOp.PROD):
        raise ValueError(
            f"{kind}: {op.name} of a value that is mirrored on all replicas ({value!r}) would "
            "count it once per replica. Use MEAN to get the value, or multiply it by "
            "num_replicas_in_sync if that is what you mean."
        )
