"""Where the result of a reduction goes."""

from __future__ import annotations

from typing import Any

from mpistrat.arrays import Device, is_array
from mpistrat.collectives import CollectiveCall
from mpistrat.strategies.device_strings import Place, parse_place
from mpistrat.values import DistributedValues
from mpistrat.variables import Variable

__all__ = ["parse_destination"]


def parse_destination(call: CollectiveCall, destination: Any, strategy: Any) -> Place | None:
    """Return the place that a device string names, ``None`` for where the replicas are. Local.

    Raises
    ------
    TypeError, ValueError
        If `destination` is not a place that `strategy` has.
    """
    if isinstance(destination, str):
        return _named_place(call, destination, strategy.extended.device)
    if destination is None:
        raise ValueError(
            f"{call.kind}: destinations is None. Give a variable, a distributed value, an array "
            'or a device string such as "cpu:0".'
        )
    if isinstance(destination, Variable) and destination.strategy not in (None, strategy):
        raise ValueError(
            f"{call.kind}: the destination {destination.name!r} is a variable of "
            f"{destination.strategy!r}, not of {strategy!r}. Different strategies cannot be mixed."
        )
    if isinstance(destination, DistributedValues | Variable) or is_array(destination):
        return None
    raise TypeError(
        f"{call.kind}: destinations must be a variable, a distributed value, an array or a device "
        f"string, not {destination!r} of type {type(destination).__name__}."
    )


def _named_place(call: CollectiveCall, text: str, device: Device) -> Place:
    where = parse_place(text, call.channel.size)
    if (where.kind, where.index) not in (("cpu", 0), (device.kind, device.index)):
        raise ValueError(
            f"{call.kind}: the destination {text!r} is not a device of this strategy, "
            f'whose replicas are on {device}. Use "cpu:0" or "{device}".'
        )
    return where
