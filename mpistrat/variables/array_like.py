"""Array protocol of variables: operators, conversions, copies, text."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrat.arrays import Array, host_result, on_device, taken
from mpistrat.cuda_api import ForNumPy
from mpistrat.system.text import html_table, readable_size, small_values


class ArrayLike(NDArrayOperatorsMixin, ABC):
    """Operators and NumPy functions on ``value()``; their results are new arrays.

    Collective or local as ``value()`` is.
    """

    dtype: Any
    synchronization: Any
    aggregation: Any
    trainable: Any
    _storage: Array
    _target: Any

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""

    @property
    def ndim(self) -> int:
        """Number of dimensions. Local."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements. Local."""
        return math.prod(self.shape)

    @abstractmethod
    def value(self) -> Array:
        """Return the array that operators see."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = host_result(self.value())
        if copy:
            return np.array(value, dtype=dtype)
        if copy is False and dtype is not None and np.dtype(dtype) != value.dtype:
            raise ValueError(
                f"The variable {self.name!r} of dtype {value.dtype} cannot become {dtype} "
                "without a copy."
            )
        return value if dtype is None else value.astype(dtype, copy=False)

    def __cupy_get_ndarray__(self) -> Any:
        return on_device(self.value())

    __array_priority__ = 101  # above that of CuPy's arrays

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.value()

    @ForNumPy
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        outputs = inputs[:1] if method == "at" else kwargs.get("out", ())
        if any(isinstance(out, ArrayLike) for out in outputs):
            raise TypeError(
                "A variable cannot be the output of a NumPy function or an operator such as +=. "
                "Write to it with assign, assign_add or assign_sub."
            )
        read = [each.value() if isinstance(each, ArrayLike) else each for each in inputs]
        return getattr(ufunc, method)(*read, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        part = taken(self.value(), index)
        # A view would let a later write show through, and on a device be written to.
        return part.copy() if getattr(part, "base", None) is not None else part

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"The variable {self.name!r} is 0-d and has no len().")
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise TypeError(f"The variable {self.name!r} is not iterable. Iterate over its value().")

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __index__(self) -> int:
        return operator.index(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"The variable {self.name!r} cannot be copied shallowly: two variables would share "
            "their storage. Use copy.deepcopy, or the variable itself."
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"The variable {self.name!r} cannot be pickled: it belongs to its strategy and its "
            "ranks. Save it with mpistrat.Checkpoint, or pickle its numpy()."
        )

    def _shown_values(self) -> str | None:
        """Return the local component as text, if it is short. Local."""
        return small_values(self._storage)

    def __repr__(self) -> str:
        values = self._shown_values()
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name} on {self._target.device}"
            + ("" if values is None else f", local component {values}")
            + ">"
        )

    def _repr_html_(self) -> str:
        values = self._shown_values()
        rows = [
            ("shape", self.shape),
            ("dtype", self.dtype),
            ("size", readable_size(math.prod(self.shape) * self.dtype.itemsize)),
            ("device", self._target.device),
            ("synchronization", self.synchronization.name),
            ("aggregation", self.aggregation.name),
            ("trainable", self.trainable),
        ]
        rows += [] if values is None else [("local component", values)]
        return html_table(f"{type(self).__name__} {self.name!r}", rows)
