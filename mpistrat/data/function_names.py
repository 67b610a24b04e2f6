"""The names of functions, for comparing data sets between ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["function_name"]


def function_name(fn: Callable[..., Any]) -> str:
    """Return the qualified name of `fn`; of an object that can be called, that of its class.

    Local. The same on all ranks that run one program.
    """
    if isinstance(fn, functools.partial):
        return f"partial of {function_name(fn.func)}"
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))
