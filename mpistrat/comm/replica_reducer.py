"""Reducer of replicas: several on each rank, combined in one tree over all of them.

Each rank combines its own replicas first, as far as the tree goes inside its share: the sums that
are left, its *pieces*, are nodes of the tree. Then the ranks combine their pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.comm.ops import MOVES_AS, combined_pair, finish
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import plan_blocks, slice_lengths
from mpistrat.comm.selection import choose_reducer
from mpistrat.comm.transport import Transport
from mpistrat.options import CommunicationOptions, ReduceOp
from mpistrat.sharding import Fold, replicas_of_ranks

__all__ = ["Meetings", "ReplicaReducer"]

Meet = Callable[[str, Any, Callable[[list[Any]], Sequence[Any]]], Any]
"""``meet(what, given, act)``: waits until all replicas of this rank have called it with an equal
`what`, calls ``act(values)`` once with what they have `given`, in order, and returns to each its
item of what that returns."""

_SMALL_BYTES = 2**15
"""Up to here, over all ranks, a second message costs more than to combine all on every rank."""
_IN_ORDER = CommunicationOptions(deterministic=True)


@dataclass(frozen=True)
class Meetings:
    """How the replicas of a rank meet, and what they leave for each other, by their numbers."""

    meet: Meet
    errand: Callable[[Callable[[], object]], object]
    """Has the thread that calls MPI call a function, and waits for it."""
    mail: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    """What one replica has sent to another."""
    attached: dict[int, Message] = field(default_factory=dict)
    """What is reduced next, if the replicas agree."""
    reduced: dict[int, Message] = field(default_factory=dict)
    """What was reduced by the first replica for all."""


class ReplicaReducer:
    """Reduces messages of replicas, whose rank has the `transport`."""

    min_bytes = 0
    keeps_order = True

    def __init__(
        self, meetings: Meetings, transport: Transport, replica_id: int, num_replicas: int
    ) -> None:
        self._meet = meetings.meet
        self._attached, self._reduced = meetings.attached, meetings.reduced
        self._replica_id = replica_id
        self._transport = transport
        self._num_replicas = num_replicas
        shares = replicas_of_ranks(num_replicas, transport.size)
        self._share = shares[transport.rank]
        self._nodes_of_ranks = [_nodes_in(share, num_replicas) for share in shares]
        """First replica and width of the pieces of each rank."""
        self._is_tree_of_ranks = _is_tree_of_ranks(self._nodes_of_ranks, num_replicas)
        self._pool = Pool()

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return True: all that can be reduced is."""
        return True

    def attach(self, message: Message) -> None:
        """Keep `message`, which the next agreement shows to the other replicas of this rank."""
        self._attached[self._replica_id] = message

    def detach(self) -> None:
        """Withdraw what was attached last."""
        self._attached.pop(self._replica_id, None)

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective** over replicas."""
        attached = self._attached
        if attached.get(self._replica_id) is message:
            # All have met to agree, and the first goes on first: it need not meet them again.
            if self._replica_id == self._share.start and len(attached) == len(self._share):
                messages = [attached[each] for each in self._share]
                self._reduce(op, messages)
                attached.clear()
                self._reduced.update(zip(self._share[1:], messages[1:], strict=True))
                return
            del attached[self._replica_id]
        elif self._reduced.pop(self._replica_id, None) is message:
            return
        self._meet("reduction", message, functools.partial(self._reduce, op))

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, for all replicas. **Collective** over replicas."""
        self.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Reduce each array of `message`, before this returns. **Collective** over replicas."""
        self.all_reduce(op, message)
        return bool

    def drain(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def _reduce(self, op: ReduceOp, messages: list[Message]) -> list[None]:
        """Reduce the messages of this rank's replicas with those of other ranks. **Collective**."""
        first = messages[0]
        if first.num_bytes:
            pieces = self._pieces(op, messages)
            combined = [np.empty(0)] * len(pieces)
            with np.errstate(all="ignore"):
                if self._is_tree_of_ranks:
                    combined = self._reduce_one_each(op, [each[0] for each in pieces], first)
                else:
                    combined = self._reduce_joined(op, pieces)
            for total, target in zip(combined, first.targets, strict=True):
                finish(op, total, self._num_replicas)
                if not np.may_share_memory(total, target):
                    np.copyto(target, total.reshape(target.shape))
            for other in messages[1:]:
                for target, source in zip(other.targets, first.targets, strict=True):
                    np.copyto(target, source.reshape(target.shape))
        return [None] * len(messages)

    def _pieces(self, op: ReduceOp, messages: list[Message]) -> list[list[np.ndarray]]:
        """Return the pieces of this rank, for each array."""
        pieces = []
        for rows in zip(*[message.sources for message in messages], strict=True):
            flat = [row.reshape(-1) for row in rows]
            fold = Fold(self._num_replicas, self._adder(op, flat))
            with np.errstate(all="ignore"):
                for replica, row in zip(self._share, flat, strict=True):
                    fold.add(replica, row)
            pieces.append([value for _, _, value in fold.nodes])
        return pieces

    def _adder(
        self, op: ReduceOp, given: Sequence[np.ndarray]
    ) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """Return a function that combines two rows, and writes to none that is `given`."""
        kept = {id(each) for each in given}

        def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            room = left
            if id(left) in kept:
                room = self._pool.take(left.shape, left.dtype)
            return combined_pair(op, left, right, room)

        return add

    def _reduce_one_each(
        self, op: ReduceOp, pieces: list[np.ndarray], message: Message
    ) -> list[np.ndarray]:
        """Return the combinations of the one piece that each rank has. **Collective**."""
        moves_as = MOVES_AS[op]
        if self._transport.size == 1:
            return [
                piece.copy() if np.shares_memory(piece, source) else piece
                for piece, source in zip(pieces, message.sources, strict=True)
            ]
        targets = [target.reshape(-1) for target in message.targets]
        own = Message(pieces, targets, self._pool)
        reducer, _ = choose_reducer(self._transport, _IN_ORDER, moves_as, own.dtype, own.num_bytes)
        reducer.all_reduce(moves_as, own)
        return targets

    def _reduce_joined(self, op: ReduceOp, pieces: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Return the combinations of the pieces of each array. **Collective**."""
        if len(pieces) == 1:
            return [self._reduce_pieces(op, pieces[0])]
        joined = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
        ends = np.cumsum([each[0].size for each in pieces])[:-1]
        return np.split(self._reduce_pieces(op, joined), ends)

    def _reduce_pieces(self, op: ReduceOp, pieces: list[np.ndarray]) -> np.ndarray:
        """Return the combination of the pieces of all ranks, slice by slice. **Collective**."""
        transport, nodes_of_ranks = self._transport, self._nodes_of_ranks
        size, rank = transport.size, transport.rank
        length = pieces[0].size
        if pieces[0].nbytes * sum(map(len, nodes_of_ranks)) <= _SMALL_BYTES:
            counts = [length * len(nodes) for nodes in nodes_of_ranks]
            gathered = transport.all_gather(np.concatenate(pieces), counts)
            return self._fold_all(op, gathered.reshape(-1, length))
        total = self._pool.take(pieces[0].shape, pieces[0].dtype)
        for block in plan_blocks(total.size, total.itemsize, size):
            parts = [piece[block] for piece in pieces]
            lengths = slice_lengths(parts[0].size, size)
            ends = np.cumsum([0, *lengths]).tolist()
            sent = np.concatenate(
                [part[ends[to] : ends[to + 1]] for to in range(size) for part in parts]
            )
            counts = [length * len(parts) for length in lengths]
            incoming = [lengths[rank] * len(nodes) for nodes in nodes_of_ranks]
            came = transport.all_to_all(sent, counts, incoming)
            rows = came.reshape(sum(map(len, nodes_of_ranks)), lengths[rank])
            own = self._fold_all(op, rows)
            total[block] = transport.all_gather(own, lengths)
        return total

    def _fold_all(self, op: ReduceOp, rows: np.ndarray) -> np.ndarray:
        """Return the combination of one row for each piece of each rank."""
        fold: Fold[np.ndarray] = Fold(
            self._num_replicas, lambda left, right: combined_pair(op, left, right, left)
        )
        nodes = [node for nodes in self._nodes_of_ranks for node in nodes]
        for (begin, width), row in zip(nodes, rows, strict=True):
            fold.add(begin, row, width)
        ((_, _, total),) = fold.nodes
        return total


def _is_tree_of_ranks(nodes_of_ranks: list[list[tuple[int, int]]], num_replicas: int) -> bool:
    """Return whether the pieces, one a rank, are combined as any rows of the ranks are."""
    if any(len(nodes) != 1 for nodes in nodes_of_ranks):
        return False
    of_pieces: Fold[Any] = Fold(num_replicas, lambda left, right: (left, right))
    of_ranks: Fold[Any] = Fold(len(nodes_of_ranks), lambda left, right: (left, right))
    for rank, ((begin, width),) in enumerate(nodes_of_ranks):
        of_pieces.add(begin, rank, width)
        of_ranks.add(rank, rank)
    return bool(of_pieces.nodes[0][2] == of_ranks.nodes[0][2])


def _nodes_in(share: range, num_replicas: int) -> list[tuple[int, int]]:
    """Return first replica and width of the largest nodes inside `share`."""
    fold: Fold[None] = Fold(num_replicas, lambda left, right: None)
    for replica in share:
        fold.add(replica, None)
    return [(begin, width) for begin, width, _ in fold.nodes]
