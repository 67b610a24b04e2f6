"""Scatter updates: `IndexedSlices` written to rows of a variable."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arguments import as_array, span_outside
from mpistrat.arrays import Array, host_view, namespace_of
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.options import VariableAggregation
from mpistrat.values import DistributedValues, IndexedSlices
from mpistrat.variables.writes import Target, Write, cast_to, check_arithmetic


def split_into_rounds(rows: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return an order of `rows` in rounds without duplicates, and the end of each round."""
    # Round k contains the k-th occurrence of each row, so that the updates of a row keep their
    # order.
    if rows.size == 0:
        return np.zeros(0, np.int64), []
    by_row = np.argsort(rows, kind="stable")
    ordered = rows[by_row]
    position = np.arange(rows.size)
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    occurrence = position - np.maximum.accumulate(np.where(is_first, position, 0))
    by_occurrence = np.argsort(occurrence, kind="stable")
    ends: list[int] = np.cumsum(np.bincount(occurrence)).tolist()
    return by_row[by_occurrence], ends


Combine = Callable[[Array, Array], Array]
"""Function that returns new rows from old rows and given rows."""


@dataclass(frozen=True)
class SliceWrite:
    """A write of `IndexedSlices`. When checked, their indices are on the host and flattened."""

    how: str
    combine: Combine
    is_arithmetic: bool = False
    is_ordering: bool = False
    is_batched: bool = False

    def checked(self, target: Target, value: Any) -> IndexedSlices:
        """Return `value` with rows of the variable's dtype on its device."""
        what = f"{self.how} of variable {target.name!r}"
        self._check_target(what, target)
        slices = value.values[0] if isinstance(value, DistributedValues) else value
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"{what} takes IndexedSlices, not {slices!r} of type {type(slices).__name__}."
            )
        indices = host_view(as_array(what, slices.indices))
        values = as_array(what, slices.values)
        leading = indices.ndim if self.is_batched else 1
        rows_shape = target.shape[leading:]
        if tuple(values.shape) == (0,) and indices.ndim == 1:
            values = np.zeros((0, *rows_shape), target.dtype)  # an empty list has no row shape
        _check_shapes(what, target, slices, indices, values, leading)
        _check_range(what, target, indices, leading)
        values = cast_to(what, values, False, target.dtype, target.device)
        rows = _flat_rows(indices, target.shape[:leading])
        return IndexedSlices(values.reshape(rows.size, *rows_shape), rows)

    def _check_target(self, what: str, target: Target) -> None:
        merges = target.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if target.is_mirrored and not self.is_arithmetic and merges:
            raise NotImplementedError(
                f"{what}: rows cannot be merged over replicas by {target.aggregation.name} and "
                "then overwrite others. Create the variable with "
                "aggregation=VariableAggregation.ONLY_FIRST_REPLICA or NONE."
            )
        if self.is_arithmetic:
            check_arithmetic(what, target)
        if self.is_ordering and target.dtype.kind == "c":
            raise TypeError(f"{what}: complex numbers (dtype {target.dtype}) have no order.")

    def signature(self, value: IndexedSlices) -> tuple[Any, ...]:
        """Return dtype and shape of the rows."""
        return (str(value.values.dtype), tuple(value.values.shape))

    def arrays(self, value: IndexedSlices) -> list[Array]:
        """Return row numbers and rows."""
        return [value.indices, value.values]

    def contribution(self, call: CollectiveCall, target: Target, value: IndexedSlices) -> Any:
        """Return this replica's contribution to the joined slices, by `target.aggregation`."""
        values, indices = value.values, value.indices
        if target.aggregation is VariableAggregation.MEAN:
            # Divided before sending: slices are joined and not added up, so there is no sum to
            # divide.
            values = values / values.dtype.type(call.channel.size)
        if target.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and call.channel.rank:
            # The other replicas send no rows, but must take part: the exchange needs all ranks.
            values, indices = values[:0], indices[:0]
        return IndexedSlices(values, indices)

    def merged(self, call: CollectiveCall, target: Target, value: IndexedSlices) -> IndexedSlices:
        """Return the slices of all replicas in rank order, or rank 0's. **Collective**."""
        own = self.contribution(call, target, value)
        values, indices = AllGather(0).forward(
            call, [own.values, own.indices], target.aggregation.name
        )
        return IndexedSlices(values, indices)

    def apply(self, storage: Array, value: IndexedSlices) -> None:
        """Combine the rows of `storage` with the given ones, in place and in order."""
        xp = namespace_of(storage)
        order, ends = split_into_rounds(value.indices)
        # Indexing copies, which is needed because the given rows may be a view of the storage.
        values = value.values[xp.asarray(order)]
        rows = xp.asarray(value.indices[order])
        leading = storage.ndim - values.ndim + 1
        flat = storage.reshape(math.prod(storage.shape[:leading]), *storage.shape[leading:])
        for start, end in zip([0, *ends], ends, strict=False):
            # If one row gets several results, NumPy keeps only one of them. Therefore the rounds.
            at = rows[start:end]
            flat[at] = self.combine(flat[at], values[start:end])


def _check_shapes(
    what: str,
    target: Target,
    slices: IndexedSlices,
    indices: np.ndarray,
    values: Array,
    leading: int,
) -> None:
    if not target.shape:
        raise ValueError(f"{what}: the variable is 0-d and has no rows. Use assign.")
    if indices.ndim != leading:
        raise ValueError(
            f"{what}: indices of the shape {indices.shape} have {indices.ndim} axes, but row "
            "numbers have one. Use batch_scatter_update for batches of them."
        )
    expected = (*indices.shape, *target.shape[leading:])
    batch = target.shape[: leading - 1]
    fits = leading <= len(target.shape) and indices.shape[:-1] == batch
    if not fits or tuple(values.shape) != expected:
        raise ValueError(
            f"{what}: values of the shape {tuple(values.shape)} at indices of the shape "
            f"{indices.shape} do not fit the variable of the shape {target.shape}: "
            + (f"values of the shape {expected} do." if fits else f"the batch axes are {batch}.")
        )
    if slices.dense_shape not in (None, target.shape):
        raise ValueError(
            f"{what}: the slices have the dense_shape {slices.dense_shape}, but the variable has "
            f"the shape {target.shape}."
        )


def _check_range(what: str, target: Target, indices: np.ndarray, leading: int) -> None:
    num_rows = target.shape[leading - 1]
    span = span_outside(indices, num_rows)
    if span is not None:
        raise IndexError(
            f"{what}: the indices go from {span[0]} to {span[1]}, but the variable of "
            f"shape {target.shape} has {num_rows} rows, numbered from 0."
        )


def _flat_rows(indices: np.ndarray, leading_shape: tuple[int, ...]) -> np.ndarray:
    """Return the row numbers after all leading axes are flattened into one."""
    *batch, num_rows = leading_shape
    first = np.arange(math.prod(batch)).reshape(*batch, 1) * num_rows
    # Widened first, because numbers of flattened rows may not fit into the dtype of `indices`.
    return (indices.astype(np.int64) + first).reshape(-1)


def _divide(old: Array, new: Array) -> Array:
    if old.dtype.kind not in "iu":
        return old / new
    # Integers are rounded towards zero, as in TensorFlow and C.
    quotient = old // new
    is_rounded_up: Array = (old % new != 0) & ((old < 0) != (new < 0))
    cut: Array = quotient + is_rounded_up.astype(old.dtype)
    return cut


def _minimum(old: Array, new: Array) -> Array:
    smaller: Array = namespace_of(old).minimum(old, new)
    return smaller


def _maximum(old: Array, new: Array) -> Array:
    larger: Array = namespace_of(old).maximum(old, new)
    return larger


def _replace(old: Array, new: Array) -> Array:
    return new


SCATTER_ADD: Write = SliceWrite("scatter_add", operator.add, is_arithmetic=True)
SCATTER_SUB: Write = SliceWrite("scatter_sub", operator.sub, is_arithmetic=True)
SCATTER_MUL: Write = SliceWrite("scatter_mul", operator.mul, is_arithmetic=True)
SCATTER_DIV: Write = SliceWrite("scatter_div", _divide, is_arithmetic=True)
SCATTER_MIN: Write = SliceWrite("scatter_min", _minimum, is_ordering=True)
SCATTER_MAX: Write = SliceWrite("scatter_max", _maximum, is_ordering=True)
SCATTER_UPDATE: Write = SliceWrite("scatter_update", _replace)
BATCH_SCATTER_UPDATE: Write = SliceWrite("batch_scatter_update", _replace, is_batched=True)

SLICE_WRITES = (
    *(SCATTER_ADD, SCATTER_SUB, SCATTER_MUL, SCATTER_DIV),
    *(SCATTER_MIN, SCATTER_MAX, SCATTER_UPDATE, BATCH_SCATTER_UPDATE),
)
"""All kinds of slice writes, in an order that does not change while a job runs."""
