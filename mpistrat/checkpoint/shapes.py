"""Compare the arrays of a program with those of a file before anything is assigned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mpistrat.checkpoint.json_state import split_state
from mpistrat.checkpoint.objects import Tree
from mpistrat.errors import CheckpointMismatchError

__all__ = ["Shape", "check_shapes", "describe", "shapes_as_json", "shapes_from_json"]

Shape = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype."""


def check_shapes(path: str, tree: Tree, stored: dict[str, Shape]) -> None:
    """Compare the arrays of `tree` with those that the file `path` has. Local.

    Variables must have the shape and dtype of the file. Arrays of a ``state_dict()`` must have
    its dtype and number of dimensions, and its lengths but for the first: a history may have
    grown. An array that the object does not have yet, or that is empty there, may become any.

    Raises
    ------
    CheckpointMismatchError
        If shapes or dtypes differ; the message names each array, with both.
    """
    lines = [*_of_variables(tree, stored), *_of_states(tree, stored)]
    if lines:
        raise CheckpointMismatchError(
            f"The checkpoint {path} does not fit the arrays of this program:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nNothing has been restored, and nothing is cast. Use the checkpoint of a program "
            "with these arrays."
        )


def _of_variables(tree: Tree, stored: dict[str, Shape]) -> Iterator[str]:
    for name, variable in tree.variables.items():
        own = variable.shape, variable.dtype
        if name in stored and stored[name] != own:
            yield _difference(name, stored[name], own)


def _of_states(tree: Tree, stored: dict[str, Shape]) -> Iterator[str]:
    for path, stateful in tree.stateful.items():
        if not any(name.startswith(f"{path}/") for name in stored):
            continue
        for key, array in split_state(stateful.state_dict(), path)[1].items():
            name, own = f"{path}/{key}", (array.shape, array.dtype)
            if name in stored and array.size and not _may_become(own, stored[name]):
                yield _difference(name, stored[name], own)


def _may_become(own: Shape, stored: Shape) -> bool:
    (own_shape, own_dtype), (shape, dtype) = own, stored
    return own_dtype == dtype and len(own_shape) == len(shape) and own_shape[1:] == shape[1:]


def _difference(name: str, stored: Shape, own: Shape) -> str:
    return f"{name}: {describe(*stored)} in the file, {describe(*own)} in the program"


def describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Return shape and dtype as messages show them. Local."""
    return f"{dtype} of shape {shape}"


def shapes_as_json(shapes: Mapping[str, Shape]) -> Any:
    """Return shapes and dtypes as a JSON value. Local."""
    return [[name, shape, dtype.str] for name, (shape, dtype) in shapes.items()]


def shapes_from_json(value: Any) -> dict[str, Shape]:
    """Return what `shapes_as_json` took apart. Local."""
    return {name: (tuple(shape), np.dtype(dtype)) for name, shape, dtype in value}
