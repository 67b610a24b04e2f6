"""A copy of a program's state in host memory, from which a file can be written later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.gathering import Life
from mpistrat.checkpoint.pieces import copy_to_host
from mpistrat.checkpoint.writer import create_checkpoint

__all__ = ["Snapshot"]


class Snapshot:
    """The state at one moment, in memory that the next snapshot uses again.

    The first touch of memory takes longer than the copy, so only the first snapshot pays it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, np.ndarray] = {}
        self._variables: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        self._states: dict[str, tuple[dict[str, Any], Sequence[str]]] = {}

    def clear(self) -> None:
        """Begin a new snapshot. Local."""
        self._memory = {path: array for path, (array, _) in self._variables.items()}
        self._variables, self._states = {}, {}

    def add_variable(
        self, path: str, array: Array | None, modes: dict[str, Any], life: Life
    ) -> None:
        """Copy the values of a variable on the rank that has them. Local."""
        if array is None:
            return
        copy = self._memory.pop(path, None)
        if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
            copy = np.empty(array.shape, array.dtype)
        copy_to_host(copy, array)
        self._variables[path] = copy, modes

    def add_state(self, path: str, state: dict[str, Any], arrays: Sequence[str]) -> None:
        """Take JSON state, a copy of its own, and the names of its arrays. Local."""
        self._states[path] = state, arrays

    def write(self, path: str, header: Header) -> None:
        """Write the file `path`. Local, in any thread.

        Raises
        ------
        CheckpointError
            If it cannot be written; `path` is then as it was.
        """
        with create_checkpoint(path, header) as writer:
            for name, (array, modes) in self._variables.items():
                writer.add_variable(name, array, **modes, lives_on=True)
            for name, (state, arrays) in self._states.items():
                writer.add_state(name, state, arrays)

