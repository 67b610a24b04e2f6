"""Partitioners: into how many parts a variable is cut along an axis.

Pure functions of shape and dtype, which all ranks compute alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpistrat.arguments import as_integer
from mpistrat.sharding import ceil_div

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner(ABC):
    """Base of the partitioners. Any function of their signature serves a strategy as well."""

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Return one count for each axis of `shape`: the parts along `axis`, elsewhere 1. Local.

        Parameters
        ----------
        shape : sequence of int
        dtype : dtype
        axis : int
            May be negative.

        Raises
        ------
        ValueError
            For a shape without axes, or an axis out of range.
        """
        lengths = [as_integer("The length of an axis", each, 0) for each in shape]
        if not lengths:
            raise ValueError(
                "A partitioner needs a shape of one axis or more: a scalar has no rows."
            )
        where = as_integer("axis", axis, -len(lengths), len(lengths) - 1)
        num_rows = lengths[where]
        bytes_of_row = math.prod(lengths) // max(num_rows, 1) * np.dtype(dtype).itemsize
        counts = [1] * len(lengths)
        counts[where] = max(1, min(num_rows, self._num_parts(num_rows, bytes_of_row)))
        return counts

    @abstractmethod
    def _num_parts(self, num_rows: int, bytes_of_row: int) -> int:
        """Return how many parts are wanted; there cannot be more than rows."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name.strip('_')}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class FixedShardsPartitioner(Partitioner):
    """A given number of parts.

    Parameters
    ----------
    num_shards : int

    Raises
    ------
    ValueError, TypeError
        If `num_shards` is below 1, or no integer.

    Examples
    --------
    >>> ms.partitioners.FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = as_integer("num_shards", num_shards, 1)

    def _num_parts(self, num_rows: int, bytes_of_row: int) -> int:
        return self._num_shards


class RanksPartitioner(FixedShardsPartitioner):
    """One part per rank, also on one rank: what ``variable_partitioner="ranks"`` means."""


class MinSizePartitioner(Partitioner):
    """As many parts as leave `min_shard_bytes` to each, or nearly: the last ones may have less.

    Parameters
    ----------
    min_shard_bytes : int
    max_shards : int

    Raises
    ------
    ValueError, TypeError
        If an argument is below 1, or no integer.

    Examples
    --------
    >>> ms.partitioners.MinSizePartitioner(256 << 10, max_shards=8)((1024, 1024), "float32")
    [8, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_shard_bytes = as_integer("min_shard_bytes", min_shard_bytes, 1)
        self._max_shards = as_integer("max_shards", max_shards, 1)

    def _num_parts(self, num_rows: int, bytes_of_row: int) -> int:
        return min(self._max_shards, ceil_div(num_rows * bytes_of_row, self._min_shard_bytes))


class MaxSizePartitioner(Partitioner):
    """As few parts as keep each within `max_shard_bytes`, or one row where a row has more.

    Parameters
    ----------
    max_shard_bytes : int
    max_shards : int, optional

    Raises
    ------
    ValueError, TypeError
        If an argument is below 1, or no integer.

    Examples
    --------
    >>> ms.partitioners.MaxSizePartitioner(1 << 20)((1024, 1024), "float32")
    [4, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = as_integer("max_shard_bytes", max_shard_bytes, 1)
        self._max_shards = None if max_shards is None else as_integer("max_shards", max_shards, 1)

    def _num_parts(self, num_rows: int, bytes_of_row: int) -> int:
        if not bytes_of_row:
            return 1
        num_parts = ceil_div(num_rows, max(1, self._max_shard_bytes // bytes_of_row))
        return num_parts if self._max_shards is None else min(num_parts, self._max_shards)
