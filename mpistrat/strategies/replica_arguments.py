"""Hint for a function given to `Strategy.run` whose parameters do not fit the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def explained_call(
    error: TypeError, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TypeError:
    """Return `error`, or one with a hint if `fn` cannot be called with these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # not a function, or one in C
        return error
    if _fits(signature, args, kwargs):
        return error  # raised inside of fn
    hint = ""
    first = args[0] if len(args) == 1 else None
    if isinstance(first, list | tuple) and _fits(signature, first, kwargs):
        hint = (
            f"args=(batch,) passes the {type(first).__name__} of {len(first)} as one argument. "
            "Write args=batch, or let the function take one parameter"
        )
    elif isinstance(first, dict) and _fits(signature, (), {**kwargs, **first}):
        hint = "args=(batch,) passes the dict as one argument. Write kwargs=batch"
    elif len(args) > 1 and _fits(signature, (args,), kwargs):
        hint = f"args=batch passes {len(args)} arguments. Write args=(batch,) to pass them as one"
    if not hint:
        return error
    explained = TypeError(f"run: {error}. {hint}.")
    return explained.with_traceback(error.__traceback__)


def _fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[Any, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
