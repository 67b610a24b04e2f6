"""What a batch normalization can be made of, and what it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arguments import as_array, as_integer
from mpistrat.arrays import Array
from mpistrat.comm.dtypes import is_floating
from mpistrat.tensors import is_tensor

__all__ = ["check_parameters", "checked_examples"]


def check_parameters(num_features: Any, momentum: Any, epsilon: Any, dtype: Any) -> None:
    """Refuse parameters out of range. Local.

    Raises
    ------
    TypeError, ValueError
        Naming the parameter.
    """
    as_integer("BatchNorm: num_features", num_features, 1)
    if not 0 <= momentum <= 1:
        raise ValueError(f"BatchNorm: momentum must be in [0, 1], not {momentum}.")
    if not epsilon > 0:
        raise ValueError(f"BatchNorm: epsilon must be above 0, not {epsilon}.")
    if not is_floating(np.dtype(dtype)):
        raise TypeError(f"BatchNorm: dtype must be a floating one, not {np.dtype(dtype)}.")


def checked_examples(what: str, value: Any, num_features: int, axis: int) -> Array:
    """Return `value`, examples or a gradient of their shape, as an array. Local.

    Raises
    ------
    TypeError
        If it is no array of a floating dtype.
    ValueError
        If it has not `num_features` along `axis`, and another axis.
    """
    if is_tensor(value):
        raise TypeError(
            f"{what} takes NumPy and CuPy arrays: a PyTorch tensor would lose its graph. Use "
            "torch.nn.SyncBatchNorm, or give tensor.detach().numpy()."
        )
    array = as_array(what, value)
    if not is_floating(array.dtype):
        raise TypeError(f"{what} takes floating numbers, not {array.dtype}. Cast them first.")
    shape = tuple(array.shape)
    has_axis = len(shape) >= 2 and -len(shape) <= axis < len(shape)
    if not has_axis or shape[axis] != num_features:
        raise ValueError(
            f"{what} takes arrays of two or more axes with {num_features} features along axis "
            f"{axis}, not of the shape {shape}."
        )
    return array
