"""Sparse gradients: rows of a variable, each named once, and nothing else touched."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from mpistrat.arrays import Array, host_view, is_on_host, namespace_of
from mpistrat.optimizers.rule import Rule, Step, Target
from mpistrat.values import IndexedSlices
from mpistrat.variables.rounds import split_into_rounds

__all__ = ["coalesced", "update_rows"]


def coalesced(slices: IndexedSlices) -> IndexedSlices:
    """Return `slices` with each index once, in ascending order, its values added up. Local."""
    xp = namespace_of(slices.values)
    indices, places = xp.unique_inverse(slices.indices)
    values = xp.zeros((indices.size, *slices.values.shape[1:]), dtype=slices.values.dtype)
    _add_rows(values, places, slices.values)
    return IndexedSlices(values, indices, slices.dense_shape)


def _add_rows(values: Array, places: Array, added: Array) -> None:
    """Add each row of `added` to ``values[place]``, in one order on all ranks."""
    if is_on_host(values):
        np.add.at(values, places, added)
        return
    # A device's atomic additions have no order, so ranks would differ in the last bits.
    rows = host_view(places)
    order, ends = split_into_rounds(rows)
    for start, end in itertools.pairwise([0, *ends]):
        chosen = order[start:end]
        values[rows[chosen]] += added[chosen]


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
