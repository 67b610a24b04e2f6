"""Duplicate rows, split into rounds in which each row occurs once: integer arithmetic alone."""

from __future__ import annotations

import numpy as np

__all__ = ["split_into_rounds"]


def split_into_rounds(rows: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return an order of `rows` in rounds without duplicates, and where each round ends. Local.

    Parameters
    ----------
    rows : numpy.ndarray
        Integers of shape ``(n,)``.

    Returns
    -------
    order : numpy.ndarray
        A permutation of ``range(n)``: the k-th occurrences of all rows are in round k, so that
        what happens to one row happens in the order in which it came.
    ends : list of int
        Position in `order` behind the last element of each round.
    """
    if rows.size == 0:
        return np.zeros(0, np.int64), []
    by_row = np.argsort(rows, kind="stable")
    ordered = rows[by_row]
    position = np.arange(rows.size)
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    occurrence = position - np.maximum.accumulate(np.where(is_first, position, 0))
    by_occurrence = np.argsort(occurrence, kind="stable")
    ends: list[int] = np.cumsum(np.bincount(occurrence)).tolist()
    return by_row[by_occurrence], ends
