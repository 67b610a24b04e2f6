"""Element specs: shape and dtype of the arrays in an element."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.ragged import Ragged


@nests.leaf_type
@dataclass(frozen=True, init=False)
class ArraySpec:
    """The shape and dtype of an array.

    Parameters
    ----------
    shape : sequence of int or None
        Length of each dimension, ``None`` if it is not known or varies.
    dtype : anything that `numpy.dtype` accepts
        Dtype of the array.

    Raises
    ------
    TypeError, ValueError
        If a length is neither ``None`` nor an integer of at least 0, or `dtype` is not a dtype.

    Examples
    --------
    >>> ms.data.ArraySpec((None, 3), "float32")
    ArraySpec((None, 3), float32)
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    _holds_ragged: bool = field(default=False, compare=False)
    """Whether this is the spec of a `Ragged`, whose rows have the shape ``shape[1:]``."""

    def __init__(
        self, shape: Sequence[int | None], dtype: Any, _holds_ragged: bool = False
    ) -> None:
        lengths = tuple(None if length is None else operator.index(length) for length in shape)
        if any(length is not None and length < 0 for length in lengths):
            raise ValueError(f"A shape has lengths of at least 0, not {tuple(shape)}.")
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "_holds_ragged", _holds_ragged)

    def __repr__(self) -> str:
        return f"ArraySpec({self.shape}, {self.dtype}{', ragged' * self._holds_ragged})"


def has_open_shape(spec: ArraySpec) -> bool:
    """Return whether arrays of this spec may differ in shape."""
    return None in spec.shape


def is_open_text(spec: ArraySpec) -> bool:
    """Return whether the spec is for strings of any width."""
    return spec.dtype.kind == "U" and not spec.dtype.itemsize


def holds_ragged(spec: ArraySpec) -> bool:
    """Return whether `spec` is of a `Ragged`, whose rows have the shape ``shape[1:]``."""
    return spec._holds_ragged


def known_shape(spec: ArraySpec) -> tuple[int, ...]:
    """Return the shape of `spec`, with 0 for lengths that are not known."""
    return tuple(length or 0 for length in spec.shape)


def known_bytes(spec: ArraySpec) -> int:
    """Return the size of an array in bytes, 0 if a length is not known."""
    return spec.dtype.itemsize * math.prod(known_shape(spec))


def empty_rows(spec: ArraySpec, count: int = 0) -> np.ndarray:
    """Return new memory for `count` arrays of this spec."""
    return np.empty((count, *known_shape(spec)), spec.dtype)


def fits(spec: ArraySpec, array: np.ndarray) -> bool:
    """Return whether `array` has the shape and dtype of `spec`."""
    return (
        (array.dtype == spec.dtype or (is_open_text(spec) and array.dtype.kind == "U"))
        and array.ndim == len(spec.shape)
        and all(want in (None, got) for want, got in zip(spec.shape, array.shape, strict=True))
    )


def spec_of(nest: Any) -> Any:
    """Return `nest` with the `ArraySpec` of each array or number."""
    return nests.map_nest(_spec_of_leaf, nest)


def _spec_of_leaf(leaf: Any) -> ArraySpec:
    # numpy.asarray raises an error for arrays on a device, but they have a dtype.
    if isinstance(leaf, Ragged):
        return ArraySpec((len(leaf), None, *leaf.values.shape[1:]), leaf.values.dtype, True)
    dtype: np.dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return ArraySpec(np.shape(leaf), dtype.newbyteorder("="))


def with_room_for_text(spec: Any, other: Any) -> Any:
    """Return the nest `spec` with strings as wide as the widest in the nest `other`."""
    # NumPy makes a string only as wide as its text, so the width in one example may be too small.
    leaves = nests.flatten(other)[0]
    widths = {kind: [0] for kind in "SU"}
    for leaf in leaves:
        widths.get(leaf.dtype.kind, []).append(leaf.dtype.itemsize)
    is_open = any(is_open_text(leaf) for leaf in leaves) or not any(widths["U"])

    def widened(leaf: ArraySpec) -> ArraySpec:
        kind, size = leaf.dtype.kind, leaf.dtype.itemsize
        if leaf.shape or kind not in widths:
            return leaf
        if kind == "U" and is_open:
            return ArraySpec((), "U")
        length = max(*widths[kind], size) // np.dtype(f"{kind}1").itemsize
        return ArraySpec((), f"{kind}{length}")

    return nests.map_nest(widened, spec)


def batched(spec: Any, batch_size: int | None) -> Any:
    """Return the nest `spec` of one example with a batch dimension in front."""

    def with_batch(leaf: ArraySpec) -> ArraySpec:
        if leaf._holds_ragged:
            raise ValueError(
                "A Ragged cannot be batched again. Call ragged_batch last, or unbatch before "
                "the next batch."
            )
        return ArraySpec((batch_size, *leaf.shape), leaf.dtype)

    return nests.map_nest(with_batch, spec)


def open_batch(spec: Any, num_batchings: int = 1) -> Any:
    """Return the nest `spec` of a batch with its first `num_batchings` dimensions ``None``."""

    def opened(leaf: ArraySpec) -> ArraySpec:
        num_open = min(num_batchings, len(leaf.shape))
        shape = (None,) * num_open + leaf.shape[num_open:]
        return ArraySpec(shape, leaf.dtype, leaf._holds_ragged)

    return nests.map_nest(opened, spec)


def empty_batch(spec: Any) -> Any:
    """Return arrays of length 0 for the nest `spec` of a batch."""

    def empty(leaf: ArraySpec) -> Any:
        if leaf._holds_ragged:
            values = np.empty((0, *known_shape(leaf)[2:]), leaf.dtype)
            return Ragged(values, np.zeros(1, np.int64))
        # A scalar, such as the number of a batch, is not divided among ranks.
        shape = (0, *known_shape(leaf)[1:]) if leaf.shape else ()
        return np.zeros(shape, leaf.dtype)

    return nests.map_nest(empty, spec)


_OPEN_TEXT = np.dtype("U")
"""The dtype of strings of any width."""


def fitted(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Return `array` as `dtype`, itself if it has that dtype; ``None`` if it does not fit."""
    # Floating-point numbers may be rounded, but must not become infinite. Integers fit into
    # integers that can hold their values, signed or not, and into floating-point numbers.
    # Everything else must survive unchanged.
    if array.dtype == dtype or (dtype == _OPEN_TEXT and array.dtype.kind == "U"):
        return array
    are_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not (are_integers or np.can_cast(array.dtype, dtype, "same_kind")):
        return None
    with np.errstate(over="ignore"):
        cast: np.ndarray = array.astype(dtype)
    return cast if np.can_cast(array.dtype, dtype) or _survives(array, cast) else None


def _survives(array: np.ndarray, cast: np.ndarray) -> bool:
    if cast.dtype.kind in "fc":
        return bool((np.isfinite(cast) == np.isfinite(array)).all())
    if cast.dtype.kind in "iu" and array.size:
        info = np.iinfo(cast.dtype)
        return info.min <= int(array.min()) and int(array.max()) <= info.max
    return bool((cast == array).all())


def object_column(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return a column of examples of different shapes: an array of arrays."""
    column = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        column[number] = row
    return column


def describe(spec: Any) -> str:
    """Return a nest of specs in one line, for messages and comparisons."""
    paths, leaves, _ = nests.flatten_with_paths(spec)
    return ", ".join(
        f"{path or 'element'}: {leaf.dtype} {leaf.shape}"
        for path, leaf in zip(paths, leaves, strict=True)
    )
