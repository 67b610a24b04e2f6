"""Rows that stay in memory over passes, because they are few bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.data.field_plan import FieldPlan

__all__ = ["KeptRows"]

Load = Callable[[Sequence[tuple[int, np.ndarray]]], None]
"""Decodes chunks, given by their numbers, into the rows that come with each."""


class KeptRows:
    """One field of all files, of which each chunk is read when a row of it is first needed.

    Readers in several threads may share it: where two load a chunk, both write the same. So there
    is no lock, which a forked process could find held for ever.

    Parameters
    ----------
    plan : FieldPlan
    offsets : ndarray of int
        Number of the first row of each file, and at the end the number of rows.
    shape : tuple of int
        Of a row.
    dtype : numpy.dtype
    """

    def __init__(
        self, plan: FieldPlan, offsets: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._plan, self._offsets = plan, offsets
        self._rows = np.empty((int(offsets[-1]), *shape), dtype)
        self._is_there = np.zeros(plan.num_chunks, np.bool_)
        self._is_complete = False

    def take(
        self, numbers: np.ndarray, files: np.ndarray, rows: np.ndarray, load: Load
    ) -> np.ndarray:
        """Return copies of rows, once they are there. Local.

        Parameters
        ----------
        numbers : ndarray of int
            Of the rows over all files.
        files, rows : ndarray of int
            The file of each row, or of all, and their numbers within the file.
        load : callable
            Called for the chunks that are missing.
        """
        if not self._is_complete:
            chunks, _ = self._plan.locate(files, rows)
            missing = np.unique(chunks[~self._is_there[chunks]]).tolist()
            if missing:
                self._add(missing, load)
        # All indices are in bounds. In the default mode NumPy would copy by way of a buffer.
        return self._rows.take(numbers, 0, mode="clip")

    def _add(self, chunks: list[int], load: Load) -> None:
        places = [self._rows_of(chunk) for chunk in chunks]
        # Not in place, where rows can be seen before their bytes are in native order.
        loaded = [np.empty_like(place) for place in places]
        load(list(zip(chunks, loaded, strict=True)))
        for place, content in zip(places, loaded, strict=True):
            place[...] = content
        self._is_there[chunks] = True
        self._is_complete = bool(self._is_there.all())

    def _rows_of(self, chunk: int) -> np.ndarray:
        file, start, stop = self._plan.extent(chunk)
        first = int(self._offsets[file])
        return self._rows[first + start : first + stop]
