"""Partitioners, which choose the number of parts of a variable along an axis.

They are pure functions of shape and dtype, so all ranks compute the same result.
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
    """Base of the partitioners. A strategy also accepts any function with their signature."""

    def __call__(self, shape: Sequence[int], dtype: npt.DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts along each axis of `shape`: 1 except along `axis`. Local.

        Parameters
        ----------
        shape : sequence of int
            Shape of the variable, with at least one axis.
        dtype : dtype
            Dtype of the variable.
        axis : int
            Axis to cut. May be negative.

        Returns
        -------
        list of int
            One count per axis.

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
        """Return the wanted number of parts. The caller limits it to the number of rows."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name.strip('_')}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class FixedShardsPartitioner(Partitioner):
    """Cuts variables into a fixed number of parts.

    Parameters
    ----------
    num_shards : int
        Number of parts, at least 1.

    Raises
    ------
    ValueError, TypeError
        If `num_shards` is below 1, or not an integer.

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
    """Cuts variables into one part per rank, also on one rank: ``variable_partitioner="ranks"``."""


class MinSizePartitioner(Partitioner):
    """Cuts variables into as many parts as possible of about `min_shard_bytes` or more.

    The last parts may be slightly smaller.

    Parameters
    ----------
    min_shard_bytes : int
        Smallest size of a part, in bytes.
    max_shards : int
        Largest number of parts.

    Raises
    ------
    ValueError, TypeError
        If an argument is below 1, or not an integer.

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
    """Cuts variables into as few parts as possible of at most `max_shard_bytes`.

    A part has at least one row, even if a row is larger.

    Parameters
    ----------
    max_shard_bytes : int
        Largest size of a part, in bytes.
    max_shards : int, optional
        Largest number of parts. Default: no limit.

    Raises
    ------
    ValueError, TypeError
        If an argument is below 1, or not an integer.

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
