"""Telling a reader which rows come next, so that it can fetch and decode them in good time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from mpistrat.data.order import Block, Reader

__all__ = ["look_ahead"]

_ROWS_AT_A_TIME = 2**12
_SHARE_AT_A_TIME = 8
"""Rows of several batches are told at a time, or telling keeps the threads from decoding: at most
so many, and a part of those that the reader wants to know."""


def look_ahead(
    blocks: Iterator[Block], reader: Reader, rows_of: Callable[[Block], list[Block]]
) -> Iterator[Block]:
    """Yield `blocks`, of which `reader` knows as many rows in advance as it wants to. Local.

    Parameters
    ----------
    blocks : iterator of Block
        Not asked for a block more than needed: a generator behind it may take its time.
    reader : Reader
    rows_of : callable
        Returns the rows of a block that this rank is going to read, in that order.
    """
    ahead: deque[tuple[Block, int]] = deque()
    num_rows = 0
    wanted = reader.lookahead_rows
    if not wanted:
        yield from blocks
        return
    few = wanted - min(_ROWS_AT_A_TIME, wanted // _SHARE_AT_A_TIME)
    while True:
        is_short = num_rows < few
        news: list[Block] = []
        num_new = 0
        while not ahead or (is_short and num_rows < wanted):
            block = next(blocks, None)
            if block is None:
                break
            parts = rows_of(block)
            count = sum(map(len, parts))
            ahead.append((block, count))
            num_rows += count
            news += parts
            num_new += count
            if num_new >= _ROWS_AT_A_TIME:
                reader.expect(np.concatenate(news))
                news, num_new = [], 0
        if news:
            reader.expect(np.concatenate(news))
        if not ahead:
            return
        block, count = ahead.popleft()
        num_rows -= count
        yield block
