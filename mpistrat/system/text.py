"""Text formatting: sizes, times, lists of ranks, short forms of values, HTML tables."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

_Value = TypeVar("_Value", bound=Hashable)


def readable_size(size_bytes: int) -> str:
    """Return a size with a unit, in powers of 1024, such as ``64.0 KiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def readable_time(time_s: float) -> str:
    """Return a time with three digits and a suitable unit."""
    if time_s >= 1:
        return f"{time_s:.3g} s"
    return f"{time_s * 1e3:.3g} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.3g} us"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranks_by_value(values: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    """Return, for pairs of ranks and values, which ranks have each value."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


_MAX_ITEMS = 4
_MAX_CHARACTERS = 120
_OPERATIONS = ("SUM", "MEAN", "MIN", "MAX", "PROD", "AVG")


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-5``."""
    spans = rank_spans(ranks)
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank {text}" if is_one else f"ranks {text}"


def rank_spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return the first and last rank of each consecutive run of `ranks`."""
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


def format_call(
    kind: str, name: str | None, details: Iterable[object], with_structure: bool = False
) -> str:
    """Return a collective call as messages show it: ``reduce("max", float64 scalar)``."""
    # Nobody can guess what the structure of a nest stands for. It is shown if it differs.
    given = [each for each in details if with_structure or not is_structure(each)]
    shown = [
        f'"{str(each).lower()}"' if each in _OPERATIONS else format_detail(each)
        for each in given
        if each != ()
    ]
    if name is None:
        return f"{kind}({', '.join(shown)})" if shown else kind
    return f"{kind} of {name!r}" + (f" ({', '.join(shown)})" if shown else "")


def keywords(**given: object) -> list[str]:
    """Return arguments as a call has them, for the details of a call: ``parallel=True``."""
    return [
        f'{name}="{each}"' if isinstance(each, str) else f"{name}={each}"
        for name, each in given.items()
    ]


def is_structure(detail: object) -> bool:
    """Return whether a detail of a call is the structure of a nest, as `nests.signature` has it."""
    return isinstance(detail, str) and "*" in detail


def format_detail(detail: object) -> str:
    """Return a short text for a detail of a call, such as ``float32 (4, 3)`` for an array."""
    if isinstance(detail, tuple):
        if len(detail) == 2 and isinstance(detail[1], tuple) and isinstance(detail[0], str):
            return f"{detail[0]} {detail[1] or 'scalar'}"
        shown = [format_detail(each) for each in detail[:_MAX_ITEMS]]
        rest = len(detail) - len(shown)
        return ", ".join(shown) + (f" and {rest} more" if rest else "")
    text = str(detail)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


_MAX_ELEMENTS = 8
_MAX_BYTES = 256

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _MAX_CHARACTERS


def array_type(array: object) -> str:
    """Return dtype and shape of an array, and its library if not NumPy: ``cupy float32 (4, 3)``."""
    library = type(array).__module__.partition(".")[0]
    dtype = str(getattr(array, "dtype", "?")).removeprefix(f"{library}.")
    shape = tuple(getattr(array, "shape", ()))
    return f"{dtype} {shape}" if library == "numpy" else f"{library} {dtype} {shape}"


def small_values(array: object) -> str | None:
    """Return the elements of a small NumPy array on one line, or ``None`` for other objects."""
    # Arrays of other libraries may be in device memory. Reading them would wait for the device.
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        return None
    if array.size > _MAX_ELEMENTS or array.nbytes > _MAX_BYTES:
        return None
    return " ".join(np.array2string(array, separator=", ").split())


def brief(value: object) -> str:
    """Return a value on one line. For large arrays this is only dtype and shape."""
    if isinstance(value, np.generic) or small_values(value) is not None:
        text = repr(value)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        text = array_type(value)
    else:
        text = _shortened.repr(value)
    return " ".join(text.split()) if "\n" in text else text


def html_table(title: str, rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return an HTML table for notebooks, with all strings escaped, in the colours of the page."""
    import html

    # Strings are escaped because names come from programs and files. Without heads, the first cell
    # of a row is its head.
    parts = [f'<table style="color: inherit"><caption><b>{html.escape(title)}</b></caption>']
    if heads:
        parts.append(f"<tr>{''.join(_cell('th', each) for each in heads)}</tr>")
    for first, *others in rows:
        cells = "".join(_cell("td", each) for each in others)
        parts.append(f"<tr>{_cell('td' if heads else 'th', first)}{cells}</tr>")
    return "".join([*parts, "</table>"])


def _cell(tag: str, value: object) -> str:
    import html

    return f'<{tag} style="text-align: left">{html.escape(str(value))}</{tag}>'
