"""Look-ahead of a reader: which rows it learns of before they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from mpistrat.data.order import Block, Reader

__all__ = ["look_ahead"]

_FIRST_ROWS = 2**10
"""Of so many rows a reader knows before the first element, or that would wait for all others."""

_ROWS_AT_A_TIME = 2**12
_SHARE_AT_A_TIME = 8
"""Rows of several batches are announced together, or announcing keeps the threads from decoding: at
most so many rows, and a part of those that the reader wants to know."""


def look_ahead(
    blocks: Iterator[Block], reader: Reader, rows_of: Callable[[Block], list[Block]]
) -> Iterator[Block]:
    """Yield `blocks`; of the rows of this rank in them `reader` knows as many as it wants ahead."""
    ahead: deque[tuple[Block, int]] = deque()
    num_ahead = 0
    wanted = reader.lookahead_rows
    if not wanted:
        yield from blocks
        return
    most, wanted = wanted, min(wanted, _FIRST_ROWS)
    while True:
        is_short = num_ahead < wanted - min(_ROWS_AT_A_TIME, wanted // _SHARE_AT_A_TIME)
        waiting: list[Block] = []
        num_waiting = 0
        while not ahead or (is_short and num_ahead < wanted):
            # No block more than needed: a generator behind it may take its time.
            block = next(blocks, None)
            if block is None:
                break
            parts = rows_of(block)
            count = sum(map(len, parts))
            ahead.append((block, count))
            num_ahead += count
            waiting += parts
            num_waiting += count
            if num_waiting >= _ROWS_AT_A_TIME:
                reader.expect(np.concatenate(waiting))
                waiting, num_waiting = [], 0
        if waiting:
            reader.expect(np.concatenate(waiting))
        if not ahead:
            return
        block, count = ahead.popleft()
        num_ahead -= count
        yield block
        wanted = min(2 * wanted, most)
