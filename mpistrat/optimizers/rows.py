"""Sparse gradients: rows of a variable, each named once, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.arrays import namespace_of
from mpistrat.optimizers.rule import Rule, Step, Target
from mpistrat.values import IndexedSlices

__all__ = ["coalesced", "update_rows"]


def coalesced(slices: IndexedSlices) -> IndexedSlices:
    """Return `slices` with each index once, in ascending order, its values added up. Local."""
    xp = namespace_of(slices.values)
    indices, places = xp.unique_inverse(slices.indices)
    values = xp.zeros((indices.size, *slices.values.shape[1:]), dtype=slices.values.dtype)
    xp.add.at(values, places, slices.values)
    return IndexedSlices(values, indices, slices.dense_shape)


def update_rows(
    update: Callable[..., None], rule: Rule, step: Step, target: Target, gradient: IndexedSlices
) -> None:
    """Do `update` on the rows that the coalesced `gradient` names. Local.

    Other rows keep their weight and their slots: momenta do not decay there, and no weight
    decay is taken. That is the lazy update of the field (TensorFlow's LazyAdam, PyTorch's
    SparseAdam).
    """
    indices = gradient.indices
    rows = Target(target.weight[indices], [slot[indices] for slot in target.slots])
    update(rule, step, rows, gradient.values)
    target.weight[indices] = rows.weight
    for slot, updated in zip(target.slots, rows.slots, strict=True):
        slot[indices] = updated
