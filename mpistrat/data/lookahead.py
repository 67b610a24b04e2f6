"""Telling a reader which rows come next, so that it can fetch and decode them in good time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from mpistrat.data.order import Block, Reader

__all__ = ["look_ahead"]


def look_ahead(
    blocks: Iterator[Block], reader: Reader, rows_of: Callable[[Block], Iterable[Block]]
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
    while True:
        while not ahead or num_rows < reader.lookahead_rows:
            block = next(blocks, None)
            if block is None:
                break
            count = 0
            if reader.lookahead_rows:
                for rows in rows_of(block):
                    reader.expect(rows)
                    count += len(rows)
            ahead.append((block, count))
            num_rows += count
        if not ahead:
            return
        block, count = ahead.popleft()
        num_rows -= count
        yield block
