"""Operators, attributes and NumPy functions of arrays, refused by a value that is not one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

_ATTRIBUTES_OF_ARRAYS = frozenset(name for name in dir(np.ndarray) if name[0] != "_") | {
    *("cpu", "cuda", "detach", "get", "numpy")  # of CuPy's arrays and PyTorch's tensors
}


class RefusedOperators:
    """Base of values that look like arrays to a beginner, and on which nothing may be computed.

    Each use as an array raises `TypeError`, and each attribute of arrays `AttributeError`, with
    the text of `_why_no_array`.
    """

    __slots__ = ()

    @abstractmethod
    def _why_no_array(self, what: str) -> str:
        """Return the message of an error: `what` takes arrays only."""

    if not TYPE_CHECKING:  # type checkers report an operator that is not defined

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            raise TypeError(self._why_no_array(f"numpy.{ufunc.__name__}"))

        def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            raise TypeError(self._why_no_array(f"numpy.{function.__name__}"))

        def __getattr__(self, name: str) -> Any:
            if name in _ATTRIBUTES_OF_ARRAYS:
                raise AttributeError(self._why_no_array(f".{name}"), name=name, obj=self)
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)

        def __format__(self, spec: str) -> str:
            if spec:
                raise TypeError(self._why_no_array(f"The format {spec!r}"))
            return repr(self)

        def __eq__(self, other: object) -> bool:
            # Without this, a comparison with a number would be False without a word.
            if isinstance(other, Number | RefusedOperators) or hasattr(other, "dtype"):
                raise TypeError(self._why_no_array("=="))
            return NotImplemented

        __hash__ = object.__hash__


_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_OPERATORS = (
    *(f"{letter}{name}" for name in _BINARY for letter in ("", "r", "i") if name != "divmod"),
    *("divmod", "rdivmod", "neg", "pos", "abs", "invert", "lt", "le", "gt", "ge"),
    *("bool", "int", "float", "complex", "index", "round", "floor", "ceil", "trunc"),
    *("len", "iter", "contains", "getitem", "setitem", "delitem"),
)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: RefusedOperators, *_: object) -> Any:
        raise TypeError(self._why_no_array(name))

    refuse.__name__ = name
    return refuse


for _name in _OPERATORS:
    setattr(RefusedOperators, f"__{_name}__", _refusal(f"__{_name}__"))
