"""A copy of a program's state in host memory, from which a file can be written later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.format import VARIABLES, Header
from mpistrat.checkpoint.pieces import copy_to_host
from mpistrat.checkpoint.writer import Item, Life, create_checkpoint

__all__ = ["Snapshot"]


class Snapshot:
    """The state at one moment, in memory that the next snapshot uses again.

    The first touch of memory takes longer than the copy, so only the first snapshot pays it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._items: list[Item] = []

    def clear(self) -> None:
        """Begin a new snapshot. Local."""
        self._memory = {
            each.path: each.array
            for each in self._items
            if each.group == VARIABLES and each.array is not None
        }
        self._items = []

    def add(self, item: Item) -> None:
        """Copy the values of `item` on the rank that has them. Local."""
        array = item.array
        if array is None:
            return
        if item.group == VARIABLES:  # texts have been made for this save
            copy = self._memory.pop(item.path, None)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = np.empty(array.shape, array.dtype)
            copy_to_host(copy, array)
            item = replace(item, array=copy, life=Life.LONG)
        self._items.append(item)

    def write(self, path: str, header: Header) -> None:
        """Write the file `path`. Local, in any thread.

        Raises
        ------
        CheckpointError
            If it cannot be written; `path` is then as it was.
        """
        with create_checkpoint(path, header) as writer:
            for item in self._items:
                writer.add(item)
