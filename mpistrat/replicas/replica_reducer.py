"""Reducer for several replicas per rank, which combines the arrays of all replicas in one tree.

Each rank first combines its own replicas, as far as the tree joins only these. The partial sums
that remain, called *pieces*, are nodes of the tree. Then the ranks combine their pieces.

Each replica passes its row of arrays with its vote. If the ranks agree, one thread reduces the rows
of all replicas of the rank before any of them resumes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.agreement.channel import Channel
from mpistrat.arrays import Array, are_apart
from mpistrat.collectives.reduction import Row
from mpistrat.comm.ops import combined_pair, compiled_function, finish
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import plan_blocks, slice_lengths
from mpistrat.comm.shared_reducer import LocalRows, RowOrder, SharedMemoryReducer
from mpistrat.comm.transport import Transport
from mpistrat.native import native_library
from mpistrat.options import ReduceOp
from mpistrat.sharding import Fold, replicas_of_ranks

Meet = Callable[[str, Any, Callable[[list[Any]], Sequence[Any]]], Any]
"""``meet(what, given, act)`` waits until all replicas of this rank have called it with the same
`what`. It calls ``act(values)`` once, with the `given` values in order, and returns to each replica
its item of the result."""

_SMALL_BYTES = 2**15
"""Up to this total size, combining all pieces on every rank is cheaper than a second message."""


@dataclass
class ReplicaLinks:
    """Functions by which the replicas of a rank wait for each other, and data that they share."""

    meet: Meet
    run_on_main: Callable[[Callable[[], object]], object]
    """Calls a function on the thread that may call MPI, and waits for it."""
    messages: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    """Arrays that one replica has sent to another, by sender and receiver."""


class ReplicaReducer:
    """Reduces messages of replicas. `transport` connects the ranks."""

    min_bytes = 0
    keeps_order = True

    def __init__(self, links: ReplicaLinks, transport: Transport, num_replicas: int) -> None:
        self._meet = links.meet
        self._transport = transport
        self._num_replicas = num_replicas
        shares = replicas_of_ranks(num_replicas, transport.size)
        self._share = shares[transport.rank]
        self._nodes_of_ranks = [_nodes_in(share, num_replicas) for share in shares]
        """First replica and width of each piece, for each rank."""
        self._order = _order(
            num_replicas,
            tuple(self._nodes_of_ranks)
            if transport.size > 1
            else (tuple((replica, 1) for replica in self._share),),
        )
        self._parts = [self._part(*node) for node in self._nodes_of_ranks[transport.rank]]
        """For each piece of this rank, its replicas and the order in which they are combined."""
        library = native_library()
        self._local = None if library is None else LocalRows(library)
        self._pool = Pool()

    def _part(self, begin: int, width: int) -> tuple[slice, RowOrder | None]:
        count = min(width, self._num_replicas - begin)
        start = begin - self._share.start
        nodes = (tuple((begin + each, 1) for each in range(count)),)
        order = None if count == 1 else _order(self._num_replicas, nodes)
        return slice(start, start + count), order

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return True, because it reduces with every op and dtype."""
        return True

    def attach(self, message: Message) -> None:
        """Do nothing, because a replica passes a `Row` before the ranks agree."""

    def parameters(self, op: ReduceOp, dtype: np.dtype, num_bytes: int) -> dict[str, int]:
        """Return nothing, because replicas wait for each other in Python."""
        return {}

    def ready(self, op: ReduceOp, dtype: np.dtype) -> None:
        """Return ``None``, because `parameters` returns nothing."""

    def check(self) -> None:
        """Do nothing, because there is nothing to start or to free."""

    detach = withdraw = drain = revoke = close = check

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective** over replicas."""
        self._meet("reduction", message, functools.partial(self.reduce_messages, op))

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, for all replicas. **Collective** over replicas."""
        self.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Reduce each array of `message`, before this returns. **Collective** over replicas."""
        self.all_reduce(op, message)
        return bool

    def reduce_messages(self, op: ReduceOp, messages: Sequence[Message]) -> list[None]:
        """Reduce the messages of this rank's replicas and of other ranks. **Collective**."""
        first = messages[0]
        if first.num_bytes:
            targets = list(first.targets)
            self.reduce_rows(op, [each.sources for each in messages], targets)
            # Copy, because each replica may write to its result.
            for other in messages[1:]:
                for target, source in zip(other.targets, targets, strict=True):
                    np.copyto(target, source.reshape(target.shape))
        return [None] * len(messages)

    def reduce_rows(
        self,
        op: ReduceOp,
        rows: Sequence[Sequence[np.ndarray]],
        targets: Sequence[np.ndarray],
    ) -> None:
        """Reduce the arrays of each replica of this rank to `targets`. **Collective** over ranks.

        The arrays have the form of a `Message`, and not all of them are empty.
        """
        divisor = self._num_replicas if op is ReduceOp.MEAN else 1
        local = self._compiled(op, targets[0].dtype)
        # With one rank there are no partial sums to exchange, so combine all replicas in one pass
        # over their memory.
        if local is not None and self._transport.size == 1:
            local.combine(op, self._order, _joined_rows(rows), targets, divisor)
            return
        pieces = self._pieces(op, local, rows)
        node = self._transport.node
        if local is not None and isinstance(node, SharedMemoryReducer):
            node.reduce_rows(op, self._order, _joined_rows(pieces), targets, divisor)
            return
        flat = [[each.reshape(-1) for each in piece] for piece in pieces]
        with np.errstate(all="ignore"):
            combined = self._reduce_joined(op, flat)
        for total, target in zip(combined, targets, strict=True):
            finish(op, total, self._num_replicas)
            np.copyto(target, total.reshape(target.shape))

    def _compiled(self, op: ReduceOp, dtype: np.dtype) -> LocalRows | None:
        """Return the compiled code, or ``None`` if it does not support the op and dtype."""
        return None if compiled_function(op, dtype) is None else self._local

    def _pieces(
        self, op: ReduceOp, local: LocalRows | None, of_replicas: Sequence[Sequence[np.ndarray]]
    ) -> list[Sequence[np.ndarray]]:
        """Return the pieces of this rank. Each has as many arrays as a replica."""
        pieces: list[Sequence[np.ndarray]] = []
        for part, order in self._parts:
            sums = of_replicas[part.start]
            if order is not None:  # otherwise the piece is the arrays of a single replica
                sums = [self._pool.take(each.shape, each.dtype) for each in sums]
                if local is not None:
                    local.combine(op, order, _joined_rows(of_replicas[part]), sums)
                else:
                    self._add(op, part, of_replicas[part], sums)
            pieces.append(sums)
        return pieces

    def _add(
        self,
        op: ReduceOp,
        part: slice,
        of_replicas: Sequence[Sequence[np.ndarray]],
        sums: list[np.ndarray],
    ) -> None:
        """Combine the arrays of the replicas of one piece, without compiled code."""
        begin = self._share.start + part.start
        nodes = [(begin + position, 1) for position in range(len(of_replicas))]
        with np.errstate(all="ignore"):
            for total, *rows in zip(sums, *of_replicas, strict=True):
                self._fold(op, nodes, [row.copy() for row in rows], total)

    def _reduce_joined(self, op: ReduceOp, pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Return the combined pieces of all ranks for each array. **Collective**."""
        if len(pieces[0]) == 1:
            return [self._reduce_pieces(op, [piece[0] for piece in pieces])]
        joined = [np.concatenate(piece) for piece in pieces]
        ends = np.cumsum([each.size for each in pieces[0]])[:-1]
        return np.split(self._reduce_pieces(op, joined), ends)

    def _reduce_pieces(self, op: ReduceOp, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the combined pieces of all ranks for one array. **Collective**."""
        transport, nodes_of_ranks = self._transport, self._nodes_of_ranks
        size, rank = transport.size, transport.rank
        length = pieces[0].size
        # All ranks know the lengths and the numbers of pieces, so all take the same branch.
        if pieces[0].nbytes * sum(map(len, nodes_of_ranks)) <= _SMALL_BYTES:
            counts = [length * len(nodes) for nodes in nodes_of_ranks]
            gathered = transport.all_gather(np.concatenate(pieces), counts)
            return self._fold_all(op, gathered.reshape(-1, length))
        total = self._pool.take(pieces[0].shape, pieces[0].dtype)
        for block in plan_blocks(total.size, total.itemsize, size):
            parts = [piece[block] for piece in pieces]
            lengths = slice_lengths(parts[0].size, size)
            ends = np.cumsum([0, *lengths]).tolist()
            # Send each rank its slice of every piece, so that a rank receives all rows of its slice
            # in one exchange.
            sent = np.concatenate(
                [part[ends[to] : ends[to + 1]] for to in range(size) for part in parts]
            )
            counts = [length * len(parts) for length in lengths]
            incoming = [lengths[rank] * len(nodes) for nodes in nodes_of_ranks]
            received = transport.all_to_all(sent, counts, incoming)
            rows = received.reshape(sum(map(len, nodes_of_ranks)), lengths[rank])
            own = self._fold_all(op, rows)
            # Gather block by block, to limit the memory of the exchange.
            total[block] = transport.all_gather(own, lengths)
        return total

    def _fold_all(self, op: ReduceOp, rows: np.ndarray) -> np.ndarray:
        """Return the combination of the rows, one per piece of each rank."""
        nodes = [node for nodes in self._nodes_of_ranks for node in nodes]
        return self._fold(op, nodes, list(rows))

    def _fold(
        self,
        op: ReduceOp,
        nodes: Sequence[tuple[int, int]],
        rows: Sequence[np.ndarray],
        total: np.ndarray | None = None,
    ) -> np.ndarray:
        """Combine `rows`, the values of the tree's `nodes`, in their own memory or in `total`."""
        # The tree is the same for any number of ranks. This keeps the bits equal.
        fold: Fold[np.ndarray] = Fold(
            self._num_replicas, lambda left, right: combined_pair(op, left, right, left)
        )
        for (begin, width), row in zip(nodes, rows, strict=True):
            fold.add(begin, row, width)
        ((_, _, found),) = fold.nodes
        if total is not None:
            np.copyto(total, found)
        return found


def _joined_rows(of_replicas: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the arrays of all replicas in one list."""
    return [array for arrays in of_replicas for array in arrays]


# Cached, because the replicas of a rank ask for the same orders.
_order = functools.lru_cache(maxsize=64)(RowOrder)


@functools.lru_cache(maxsize=1024)
def _nodes_in(share: range, num_replicas: int) -> tuple[tuple[int, int], ...]:
    """Return first replica and width of each of the largest nodes inside `share`."""
    fold: Fold[None] = Fold(num_replicas, lambda left, right: None)
    for replica in share:
        fold.add(replica, None)
    return tuple((begin, width) for begin, width, _ in fold.nodes)


def reduce_rows(channel: Channel, rows: Sequence[Row]) -> list[Array] | None:
    """Reduce the rows of all replicas of this rank. **Collective** over ranks.

    If each row has a `use`, return the results, in memory that the next reduction may overwrite.
    Otherwise store in each row its own results.
    """
    if rows[0].use is not None and all(row.use is not None for row in rows):
        results = _lent_results(channel, rows)
        for row in rows:
            row.results = []
        return results
    for row in rows:
        # The replicas agree on dtypes and shapes, but each may pass a different kind of array.
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
    """Do `reduce_rows` for arrays that must be joined or cast first."""
    reducer, op, pool = channel.row_reducer, rows[0].reduction.op, channel.pool
    assert reducer is not None
    # Do not pack to `out`, because another replica may still read that memory.
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
    """Do `reduce_rows` for one array per replica, if the result has the same dtype."""
    arrays: list[np.ndarray] = [row.arrays[0] for row in rows]
    first, pool = arrays[0], channel.pool
    results = [
        pool.take(first.shape, first.dtype) if row.out is None else row.out[0] for row in rows
    ]
    total = results[0]
    # The memory of replicas may overlap, for example if they all pass the same array. Then writing
    # the first result would change an array that is still to be read.
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
    """Reduce the arrays of all rows to `targets`, without joining or casting them."""
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
