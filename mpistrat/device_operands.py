"""Variables as operands of CuPy: in its functions, and on the right of its operators."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["ForNumPy", "taking_variables"]

_PROTOCOL = "__cupy_get_ndarray__"


class ForNumPy:
    """Decorator of ``__array_ufunc__`` that NumPy sees and CuPy does not.

    ``x @ w`` with a CuPy array `x` fails if the variable `w` has ``__array_ufunc__``: CuPy then
    computes it itself, and its matrix product takes no variables. Without, it leaves the operator
    to the operand of higher ``__array_priority__``. NumPy looks in the class, CuPy in the instance.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        if instance is not None:
            raise AttributeError("__array_ufunc__ is found in the class only")
        return self._function


class _Namespace(types.ModuleType):
    """A module whose functions are wrapped when they are first used."""

    # CuPy asks variables for their array in element-wise functions only; the others refuse them.

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, types.ModuleType):
            found = _Namespace(found)
        elif callable(found) and not isinstance(found, type):
            found = _wrapped(found)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return dir(self._module)


def taking_variables(module: types.ModuleType) -> Any:
    """Return `module`, an array namespace of CuPy, with functions that take variables too."""
    return _Namespace(module)


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(
            *[_array_in(each) for each in args],
            **{name: _array_in(each) for name, each in kwargs.items()},
        )

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(call, name, getattr(function, name, None) or "")
    return call


def _array_in(value: Any) -> Any:
    """Return the array of a variable, also of variables in a list or tuple."""
    kind = type(value)
    if hasattr(kind, _PROTOCOL):
        return value.__cupy_get_ndarray__()
    if kind in (list, tuple) and any(hasattr(type(each), _PROTOCOL) for each in value):
        return kind(_array_in(each) for each in value)
    return value
