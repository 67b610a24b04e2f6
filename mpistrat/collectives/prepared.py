"""What is equal in all reductions of the same arguments but for the numbers, found once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.agreement.ledger import Signature
from mpistrat.arrays import Array
from mpistrat.comm.pack_plan import Plan, plan_reduction
from mpistrat.comm.selection import check_plan, format_options, is_shareable
from mpistrat.options import CommunicationOptions, ReduceOp

__all__ = ["PreparedReduction", "dtype_name", "prepare"]


@dataclass(frozen=True)
class PreparedReduction:
    """A reduction whose arguments have been checked."""

    plan: Plan
    signature: Signature
    may_share: bool
    """Whether shared memory may be used for the first message."""
    is_plain: bool
    """Whether all arrays can travel as they lie in host memory."""
    lone_bytes: float
    """The size, where it is one array that travels and comes back as it is; else infinite."""
    options: CommunicationOptions
    """Those of the calls: kept, because the calls are known by their identity."""


def prepare(
    signature: Callable[..., tuple[object, ...]],
    op: ReduceOp,
    arrays: Sequence[Array],
    details: tuple[object, ...],
    wires: Sequence[np.dtype] | None,
    options: CommunicationOptions,
    places: tuple[bool, ...],
    is_plain: bool,
) -> PreparedReduction:
    """Check the reduction of `arrays`, and return what can be known before. Local.

    Parameters
    ----------
    signature : callable
        Returns all that the ranks compare, from what the call itself does not know.
    op : ReduceOp
    arrays : sequence of arrays
    details : tuple
        What must agree besides arrays and options.
    wires : sequence of numpy.dtype, optional
        What each array travels as, where its own dtype does not tell.
    options : CommunicationOptions
    places : tuple of bool
        Which arrays are in device memory; empty if none is.
    is_plain : bool
        Whether all can travel as they lie in host memory.

    Raises
    ------
    TypeError, ValueError
        If `op` or the options cannot be done for a dtype.
    """
    plan = plan_reduction(
        op, [(array.dtype, array.shape) for array in arrays], wires, options, places
    )
    check_plan(options, plan)
    names = () if wires is None else tuple(dtype_name(dtype) for dtype in wires)
    words = (op.name, _format_shapes(arrays), *details, names)
    agreed = Signature(signature(*words, _format_places(places), format_options(options)))
    may_share = bool(plan.packs) and is_shareable(options, op, plan.packs[0])
    is_lone = is_plain and plan.only_wire is not None and plan.only_wire == arrays[0].dtype
    lone_bytes = arrays[0].nbytes if is_lone else math.inf
    return PreparedReduction(plan, agreed, may_share, is_plain, lone_bytes, options)


@functools.lru_cache
def dtype_name(dtype: np.dtype) -> str:
    """Return the name of `dtype` in which the ranks compare it: without the byte order. Local."""
    return str(dtype.newbyteorder("="))


def _format_shapes(arrays: Sequence[Array]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and shape of each array, as the ranks compare them. Local."""
    return tuple((dtype_name(array.dtype), array.shape) for array in arrays)


def _format_places(places: tuple[bool, ...]) -> str | tuple[()]:
    """Return which arrays are in device memory, as the ranks agree on it."""
    if not places:
        return ()
    numbers = [number for number, on_device in enumerate(places) if on_device]
    which = "" if all(places) else f" (arrays {', '.join(map(str, numbers))})"
    return f"in device memory{which}"
