"""Rows: the arrays of each replica of a rank, in a reduction that they make together.

Each replica brings its row with its vote. If the ranks agree, one thread reduces the rows of all
replicas of the rank, before any of them resumes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.agreement.channel import Channel
from mpistrat.arrays import Array, are_apart
from mpistrat.collectives.reduction import Row


def reduce_rows(channel: Channel, rows: Sequence[Row]) -> list[Array] | None:
    """Reduce the rows of all replicas of this rank. **Collective** over ranks.

    If each row has a `use`, return the results, in memory that the next reduction may overwrite;
    else give each row its own.
    """
    if rows[0].use is not None and all(row.use is not None for row in rows):
        results = _lent_results(channel, rows)
        for row in rows:
            row.results = []
        return results
    for row in rows:
        # The replicas agree on dtypes and shapes, but each may give arrays of any other kind.
        if not row.reduction.is_one:
            _reduce_packed(channel, rows)
            return None
    _reduce_singles(channel, rows)
    return None


def _lent_results(channel: Channel, rows: Sequence[Row]) -> list[Array]:
    reduction = rows[0].reduction
    if not reduction.keeps_dtypes:
        _reduce_packed(channel, rows)
        assert rows[0].results is not None
        return rows[0].results
    _reduce_arrays(channel, rows, reduction.lent)
    return list[Array](reduction.lent)


def _reduce_packed(channel: Channel, rows: Sequence[Row]) -> None:
    """Do `reduce_rows` with all that must be joined or cast first."""
    reducer, op, pool = channel.row_reducer, rows[0].reduction.op, channel.pool
    assert reducer is not None
    # Not to `out`, which may be memory that another replica reads.
    packings = [row.reduction.pack(pool, row.arrays, None, row.lends) for row in rows]
    for messages in zip(*[each.messages for each in packings], strict=True):
        reducer.reduce_messages(op, messages)
    for row, packing in zip(rows, packings, strict=True):
        row.results = packing.unpack()
        if row.out is not None:
            for target, result in zip(row.out, row.results, strict=True):
                np.copyto(target, result)
            row.results = list(row.out)


def _reduce_singles(channel: Channel, rows: Sequence[Row]) -> None:
    """Do `reduce_rows` with one array of each replica, whose result has its dtype."""
    arrays: list[np.ndarray] = [row.arrays[0] for row in rows]
    first, pool = arrays[0], channel.pool
    results = [
        pool.take(first.shape, first.dtype) if row.out is None else row.out[0] for row in rows
    ]
    total = results[0]
    # The memory of replicas may overlap, such as one array for all.
    # Otherwise writing the first result would change an array that is still to be read.
    if any(row.out is not None for row in rows) and not are_apart(arrays, results):
        total = pool.take(first.shape, first.dtype)
    if first.size:
        _reduce_arrays(channel, rows, [total])
        for result in results:
            if result is not total:
                np.copyto(result, total)
    for row, result in zip(rows, results, strict=True):
        row.results = [result]


def _reduce_arrays(channel: Channel, rows: Sequence[Row], targets: Sequence[np.ndarray]) -> None:
    """Write the reduction of the arrays of all rows, as they are in memory, to `targets`."""
    reducer, reduction = channel.row_reducer, rows[0].reduction
    assert reducer is not None
    packs, op = reduction.plan.packs, reduction.op
    if len(packs) == 1:
        if packs[0].num_bytes:
            reducer.reduce_rows(op, [row.arrays for row in rows], targets)
        return
    for each in packs:
        at = [*each.small, *each.large]
        if each.num_bytes:
            chosen = [[row.arrays[position] for position in at] for row in rows]
            reducer.reduce_rows(op, chosen, [targets[position] for position in at])
