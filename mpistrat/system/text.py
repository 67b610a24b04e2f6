"""Text formatting: sizes, times, lists of ranks, short forms of shapes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

__all__ = [
    "format_detail",
    "rank_list",
    "rank_spans",
    "ranks_by_value",
    "readable_size",
    "readable_time",
    "text_of",
]

_Value = TypeVar("_Value", bound=Hashable)


def readable_size(size_bytes: int) -> str:
    """Return a size as people write it, in powers of 1024."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def readable_time(time_s: float) -> str:
    """Return a time with three digits, in a suitable unit."""
    if time_s >= 1:
        return f"{time_s:.3g} s"
    return f"{time_s * 1e3:.3g} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.3g} us"


def ranks_by_value(values: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    """Return which ranks have each value, for pairs of ranks and values."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


_MAX_ITEMS = 4
_MAX_CHARACTERS = 120


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-5``."""
    spans = rank_spans(ranks)
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank {text}" if is_one else f"ranks {text}"


def rank_spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return the first and last rank of each run of `ranks`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def text_of(error: BaseException) -> str:
    """Return the message of `error`, even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return "(an error that has no text, because its __str__ fails)"


def format_detail(detail: object) -> str:
    """Return a detail of a call in short: arrays as ``float32 (4, 3)``, nests as ``[*]``."""
    if isinstance(detail, tuple):
        if len(detail) == 2 and isinstance(detail[1], tuple) and isinstance(detail[0], str):
            return f"{detail[0]} {detail[1]}"
        shown = [format_detail(each) for each in detail[:_MAX_ITEMS]]
        rest = len(detail) - len(shown)
        return ", ".join(shown) + (f" and {rest} more" if rest else "")
    text = str(detail)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
