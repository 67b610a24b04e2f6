"""Formatting of quantities, and of who has what, in the words of people."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

__all__ = ["ranks_by_value", "readable_size", "readable_time"]

_Value = TypeVar("_Value", bound=Hashable)


def readable_size(size_bytes: int) -> str:
    """Return a size as people write it, in powers of 1024. Local."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def readable_time(time_s: float) -> str:
    """Return a time with three digits, in the unit that suits it. Local."""
    if time_s >= 1:
        return f"{time_s:.3g} s"
    return f"{time_s * 1e3:.3g} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.3g} us"


def ranks_by_value(values: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    """Return which ranks have each value, for pairs of ranks and values. Local."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks
