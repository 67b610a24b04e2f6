"""The second forms of torch's methods of a group: single tensors, and options as arguments.

`ProcessGroup.allreduce` of torch takes a list of tensors and an options object, or one tensor, an
operator and a timeout. The methods of `Operations` have the first form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""The attribute of an options object that an argument sets."""

_LONG_NAMES = {
    "tensor": "tensors",
    "output_tensor": "output_tensors",
    "input_tensor": "input_tensors",
    "output": "output_tensors",
    "input": "input_tensors",
}
"""Other names of lists of tensors, in the second form."""


@dataclass(frozen=True)
class Form:
    """The arguments of a method.

    Attributes
    ----------
    options : type
        The class of the options object, which is the last argument of the first form.
    tensors : mapping of str to int
        Names of the leading arguments, and how deep each is nested in lists.
    settings : sequence of str
        Names of the arguments that stand for the options object in the second form.
    """

    options: type
    tensors: Mapping[str, int]
    settings: Sequence[str]

    def first_form(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of the first form."""
        given = {
            _LONG_NAMES.get(name, name) if name not in self.tensors else name: each
            for name, each in kwargs.items()
        }
        opts = given.pop("opts", None)
        if args and isinstance(args[-1], self.options):
            *args, opts = args
        names = [*self.tensors, *self.settings]
        positional = dict(zip(names, args, strict=False))
        unknown = given.keys() - names | given.keys() & positional.keys()
        missing = self.tensors.keys() - given.keys() - positional.keys()
        is_twice = opts is not None and any(name in given for name in self.settings)
        is_twice = is_twice or (opts is not None and len(args) > len(self.tensors))
        if len(args) > len(names) or unknown or missing or is_twice:
            raise TypeError(
                f"{method} takes {', '.join(self.tensors)} and either opts or "
                f"{', '.join(self.settings)}, but it was given {len(args)} arguments without a "
                f"name, and {', '.join(kwargs) or 'none'} by name."
            )
        given |= positional
        own = self.options() if opts is None else opts
        for name in self.settings:
            if given.get(name) is not None:
                setattr(own, _FIELDS[name], given[name])
        return [*(nested(given[name], depth) for name, depth in self.tensors.items()), own]


def nested(value: Any, depth: int) -> Any:
    """Return tensors in lists of this depth: a tensor becomes a list of one tensor."""
    found, inner = 0, value
    while isinstance(inner, Sequence) and len(inner):
        found, inner = found + 1, inner[0]
    if isinstance(inner, torch.Tensor):
        for _ in range(depth - found):
            value = [value]
    return value


_OUT_IN = {"output": 0, "input": 0, "output_split_sizes": 0, "input_split_sizes": 0}

FORMS = {
    "allreduce": Form(c10d.AllreduceOptions, {"tensors": 1}, ("op", "timeout")),
    "reduce": Form(c10d.ReduceOptions, {"tensors": 1}, ("root", "op", "timeout")),
    "broadcast": Form(c10d.BroadcastOptions, {"tensors": 1}, ("root", "timeout")),
    "allgather": Form(
        c10d.AllgatherOptions, {"output_tensors": 2, "input_tensors": 1}, ("timeout",)
    ),
    "gather": Form(
        c10d.GatherOptions, {"output_tensors": 2, "input_tensors": 1}, ("root", "timeout")
    ),
    "scatter": Form(
        c10d.ScatterOptions, {"output_tensors": 1, "input_tensors": 2}, ("root", "timeout")
    ),
    "reduce_scatter": Form(
        c10d.ReduceScatterOptions, {"output_tensors": 1, "input_tensors": 2}, ("op", "timeout")
    ),
    "alltoall_base": Form(c10d.AllToAllOptions, _OUT_IN, ("timeout",)),
    "barrier": Form(c10d.BarrierOptions, {}, ("timeout",)),
}
"""The methods that have two forms in torch."""


def overloaded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` for both forms of its arguments."""
    form = FORMS[method.__name__]
    options, name, count = form.options, method.__name__, len(form.tensors) + 1

    @functools.wraps(method)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        # So torch calls it itself; the first form costs no more than this line.
        if len(args) == count and not kwargs and type(args[-1]) is options:
            return method(self, *args)
        return method(self, *form.first_form(name, args, kwargs))

    return either
