"""The compressions that a data set may be written with, as HDF5's filters."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMPRESSIONS", "Compression", "compression"]

_GZIP, _LZF, _LZ4, _BLOSC, _ZSTD = 1, 32000, 32004, 32001, 32015
"""Numbers in the HDF Group's register of filters."""


@dataclass(frozen=True)
class _Method:
    """One kind of compression."""

    filter_id: int
    levels: range
    """Those that can be chosen; none where the filter has no levels."""
    default_level: int = 0
    shuffles: bool = False
    """Whether the filter groups the bytes of numbers by itself."""


_METHODS = {
    "gzip": _Method(_GZIP, range(1, 10), 4),
    "lzf": _Method(_LZF, range(0)),
    "lz4": _Method(_LZ4, range(0)),
    "zstd": _Method(_ZSTD, range(1, 23), 3),
    "blosc": _Method(_BLOSC, range(1, 10), 5, shuffles=True),
}

COMPRESSIONS = ("keep", "none", *_METHODS)
"""``keep`` stands for what a data set has."""


@dataclass(frozen=True)
class Compression:
    """What happens to each chunk."""

    name: str
    """One of `COMPRESSIONS`."""
    filters: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Number and client data of each filter; of ``keep`` nothing."""
    is_shuffled: bool = False
    """Whether the bytes of numbers are grouped before: all first bytes, all second ones, ..."""


def compression(name: str, level: int | None = None, shuffle: bool = True) -> Compression:
    """Return a compression by its name. Local.

    Parameters
    ----------
    name : str
        One of `COMPRESSIONS`.
    level : int, optional
        Higher is smaller and slower; by default what the field uses.
    shuffle : bool
        Whether the bytes of numbers are grouped, which makes most numbers smaller.

    Raises
    ------
    ValueError
        If there is no such compression, or it has no such level.
    """
    if name not in COMPRESSIONS:
        raise ValueError(f"There is no compression {name!r}. Use one of {', '.join(COMPRESSIONS)}.")
    method = _METHODS.get(name)
    levels = method.levels if method else range(0)
    if level is not None and level not in levels:
        known = f"levels from {levels.start} to {levels.stop - 1}" if levels else "no levels"
        raise ValueError(f"The compression {name} has {known}, so level {level} cannot be used.")
    if method is None:
        return Compression(name)
    level = method.default_level if level is None else level
    if method.filter_id == _BLOSC:  # its own four values, level, shuffle by bytes or not, lz4
        values: tuple[int, ...] = (0, 0, 0, 0, level, int(shuffle), 1)
    elif method.filter_id == _LZ4:  # its own block size
        values = (0,)
    else:
        values = (level,) if levels else ()
    return Compression(name, ((method.filter_id, values),), shuffle and not method.shuffles)
