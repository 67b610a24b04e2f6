"""Logical devices of a replica: the names that TPUStrategy has for its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arguments import as_array, as_integer
from mpistrat.pytorch import is_tensor
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.values import T, localize


class LogicalDevices:
    """Mixin of `Strategy`: values on the ranks of one replica."""

    _extended: StrategyExtended

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Return this rank's block of a value that all ranks of the replica have. Local.

        Parameters
        ----------
        tensor : array, PyTorch tensor or PerReplica
        partition_dimensions : sequence of int
            Into how many blocks each axis is cut, as many numbers as there are axes. Their product
            is the number of ranks of a replica, which take the blocks in C order.

        Returns
        -------
        array or tensor
            A view. Nothing is cut or moved without being asked for: what follows is up to the
            program, as by `ReplicaContext.shards`.

        Raises
        ------
        ValueError
            For another number of axes, an axis whose length a number does not divide, or another
            product.
        TypeError
            If a number is no integer.

        Examples
        --------
        >>> strategy.experimental_split_to_logical_devices(np.ones((2, 3)), [1, 1]).shape
        (2, 3)
        """
        kind, layout = "experimental_split_to_logical_devices", self._extended._layout
        value = localize(tensor)
        array = value if is_tensor(value) else as_array(kind, value)
        shape = tuple(array.shape)
        dims = [as_integer(f"{kind}: partition_dimensions", each) for each in partition_dimensions]
        if len(dims) != len(shape):
            raise ValueError(
                f"{kind}: the length of partition_dimensions, {len(dims)}, must be the number of "
                f"axes of the value, whose shape is {shape}."
            )
        for axis, (length, number) in enumerate(zip(shape, dims, strict=True)):
            if number < 1 or length % number:
                raise ValueError(
                    f"{kind}: axis {axis} of the shape {shape} is not divisible by "
                    f"partition_dimensions[{axis}], which is {number}. For parts of different "
                    "lengths there is ReplicaContext.shards.scatter."
                )
        if math.prod(dims) != layout.ranks_per_replica:
            raise ValueError(
                f"{kind}: the product of partition_dimensions {dims} must be the number of ranks "
                f"of a replica, {layout.ranks_per_replica}."
            )
        if not dims:
            return array
        block = np.unravel_index(layout.shard, dims)
        steps = [length // number for length, number in zip(shape, dims, strict=True)]
        places = zip(block, steps, strict=True)
        return array[tuple(slice(int(i) * step, (int(i) + 1) * step) for i, step in places)]

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Return `tensor`: each rank computes what its program says. A no-op by nature. Local.

        Raises
        ------
        ValueError, TypeError
            If no rank of a replica has the number `logical_device_id`.
        """
        what = "experimental_assign_to_logical_device: logical_device_id"
        as_integer(what, logical_device_id, 0, self._extended._layout.ranks_per_replica - 1)
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Return `tensor`: each rank has its own values. A no-op by nature. Local."""
        return tensor
