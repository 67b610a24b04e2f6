"""Descriptions of closures for errors and warnings: the function with its arguments, in short."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.collectives.objects import join_object
from mpistrat.coordinator.functions import FunctionName, split_body
from mpistrat.system.text import array_type, brief, small_values

if TYPE_CHECKING:
    from mpistrat.parameter_server.server_job import ServerJob

_MAX_CHARACTERS = 400


class _Shortened(reprlib.Repr):
    """Short forms of arguments: enough of each to know which closure it was."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 12
        self.maxstring = self.maxother = 100

    def repr1(self, x: Any, level: int) -> str:
        """Return the short form of anything; of arrays that are not small dtype and shape."""
        if isinstance(x, np.ndarray):
            return brief(x) if small_values(x) is not None else f"array {array_type(x)}"
        return super().repr1(x, level)


class _Named:
    """Stands for a variable, an optimizer or the like, which travels by its number."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_shortened = _Shortened()


def describe_call(job: ServerJob, body: Any, buffers: Sequence[np.ndarray]) -> str:
    """Return what a closure calls, as ``step(3, rate=0.1)``, from what `pack_arguments` returned.

    It never raises, and makes nothing on this rank, such as iterators.
    """
    text, rest = split_body(body)
    path = FunctionName(*text.split("\0")).path
    if not rest:
        return f"{path}()"

    def find(token: Any) -> _Named:
        kind, *details = token
        if kind == "variable":
            return _Named(f"variable {job.variables[details[0]].name!r}")
        if kind == "optimizer":
            return _Named(type(job.optimizers[details[0]]).__name__)
        if kind == "iterator":
            return _Named(f"iterator of {'.'.join(details[2][:2])}")
        return _Named(str(kind))

    try:
        args, kwargs = join_object(rest, buffers, find)
        shown = [_shortened.repr(each) for each in args]
        shown += [f"{name}={_shortened.repr(each)}" for name, each in kwargs.items()]
    except Exception:  # objects raise what they like when they are unpickled or shown
        shown = ["..."]
    joined = " ".join(", ".join(shown).split())
    if len(joined) > _MAX_CHARACTERS:
        joined = f"{joined[: _MAX_CHARACTERS - 3]}..."
    return f"{path}({joined})"
