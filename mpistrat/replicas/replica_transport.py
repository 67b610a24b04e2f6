"""Transport of a replica that shares its rank: moves bytes by the transport of the rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.comm.transport import SoloTransport, Transport, copied
from mpistrat.options import ReduceOp
from mpistrat.replicas.replica_reducer import ReplicaLinks, ReplicaReducer
from mpistrat.sharding import replicas_of_ranks


class ReplicaTransport(SoloTransport):
    """Transport between replicas. Its `rank` is the number of the replica.

    In each method the replicas of a rank wait for each other, and then the rank moves the data of
    all of them. The replicas agree by `ReplicaChannel`, which needs no round of this transport. The
    rank itself waits for other ranks, learns which are dead, and frees MPI's resources. So those
    methods are inherited from the transport of a single rank.
    """

    def __init__(
        self, transport: Transport, links: ReplicaLinks, replica_id: int, num_replicas: int
    ) -> None:
        self.rank = replica_id
        self.size = num_replicas
        self.library = transport.library
        self.world_ranks: Sequence[int] = ()
        self.world_size = 0
        self.pool = transport.pool
        self.occupancy = transport.occupancy
        self._transport = transport
        self._meet, self._run_on_main = links.meet, links.run_on_main
        self._messages = links.messages
        self.shares = replicas_of_ranks(num_replicas, transport.size)
        """Replicas of each rank."""
        self._share = self.shares[transport.rank]
        self._rank_of = [rank for rank, share in enumerate(self.shares) for _ in share]
        is_first = replica_id == self._share.start
        self.comm = getattr(transport, "comm", None) if is_first else None
        """Communicator of the rank, for the first of its replicas; else ``None``."""
        self.has_fast_paths = transport.has_fast_paths
        self.node: ReplicaReducer | None = None
        if self.has_fast_paths:
            self.node = ReplicaReducer(links, transport, num_replicas)

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Raise an error, because replicas reduce by the tree of their reducer."""
        raise AssertionError("replicas reduce by their tree")

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Raise an error, like `all_reduce`."""
        self.all_reduce(op, buffer, buffer)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Replace the `buffer` of every replica by the buffer of `root`."""
        self.broadcast_each([buffer], [root])

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Replace each buffer of every replica by the buffer of its root."""
        self._meet("broadcast", buffers, functools.partial(self._broadcast_all, roots))

    def _broadcast_all(
        self, roots: Sequence[int], of_replicas: list[Sequence[np.ndarray]]
    ) -> list[None]:
        for number, root in enumerate(roots):
            buffers = [each[number] for each in of_replicas]
            # If the root is on a different rank, the first replica receives for all.
            owner = root - self._share.start if root in self._share else 0
            # The root sends from its own memory, because its buffer may be read-only.
            self._transport.broadcast(buffers[owner], self._rank_of[root])
            for position, buffer in enumerate(buffers):
                if position != owner:
                    np.copyto(buffer, buffers[owner])
        return [None] * len(of_replicas)

    def all_gather(
        self, part: np.ndarray, counts: Sequence[int], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the 1-d parts of all replicas, concatenated."""
        # Do not pass `out` on: it belongs to one replica, and the gather is for all of them.
        gathered: np.ndarray = self._meet(
            "all_gather", part, functools.partial(self._gather_all, counts, None)
        )
        return gathered if out is None else copied(gathered, out)

    def start_all_gather(
        self, part: np.ndarray, counts: Sequence[int]
    ) -> Callable[[], np.ndarray | None]:
        """Gather short parts, and return a function that returns them."""
        gathered = self.all_gather(part, counts)
        return lambda: gathered

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Return the gathered parts on replica `root`, and ``None`` on the others."""
        gathered: np.ndarray | None = self._meet(
            "gather", part, functools.partial(self._gather_all, counts, root)
        )
        return gathered

    def _gather_all(
        self, counts: Sequence[int], root: int | None, parts: list[np.ndarray]
    ) -> list[np.ndarray | None]:
        own = np.concatenate([part.reshape(-1) for part in parts])
        of_ranks = [sum(counts[share.start : share.stop]) for share in self.shares]
        if root is None:
            gathered = self._transport.all_gather(own, of_ranks)
            # Return copies, because the program may write to each.
            return [gathered, *(gathered.copy() for _ in parts[1:])]
        there = self._transport.gather(own, of_ranks, self._rank_of[root])
        return [there if replica == root else None for replica in self._share]

    def all_to_all(
        self,
        buffer: np.ndarray,
        counts: Sequence[int],
        incoming: Sequence[int],
        out: np.ndarray | None = None,
        is_even: bool = False,
    ) -> np.ndarray:
        """Send each replica its part of `buffer`, and return the parts sent to this one."""
        received: np.ndarray = self._meet(
            "all_to_all", (buffer, counts, incoming), self._exchange_all
        )
        return received if out is None else copied(received, out)

    def _exchange_all(self, given: list[tuple[np.ndarray, Any, Any]]) -> list[np.ndarray]:
        """Send the parts of this rank's replicas to each rank, in the order of the senders."""
        dtype, shares = given[0][0].dtype, self.shares
        # For each replica of this rank, how much it sends to each replica of the job.
        outgoing = np.array([counts for _, counts, _ in given])
        ends = np.cumsum(outgoing, axis=1) - outgoing
        ends = np.concatenate([ends, outgoing.sum(axis=1, keepdims=True)], axis=1).tolist()
        # The parts that one replica sends to the replicas of one rank are contiguous.
        pieces = [
            buffer.reshape(-1)[bounds[share.start] : bounds[share.stop]]
            for share in shares
            for (buffer, _, _), bounds in zip(given, ends, strict=True)
        ]
        incoming = np.array([lengths for _, _, lengths in given])
        received = self._transport.all_to_all(
            np.concatenate([np.empty(0, dtype), *pieces]),
            [int(outgoing[:, share.start : share.stop].sum()) for share in shares],
            [int(incoming[:, share.start : share.stop].sum()) for share in shares],
        )
        # For each sender, how much it sends to each replica here. In a shift, most send nothing.
        lengths = incoming.T.reshape(-1)
        begins = (np.cumsum(lengths) - lengths).reshape(incoming.T.shape)
        joined = []
        for position, row in enumerate(incoming):
            senders = np.flatnonzero(row)
            bounds = zip(begins[senders, position].tolist(), row[senders].tolist(), strict=True)
            parts = [received[begin : begin + length] for begin, length in bounds]
            joined.append(np.concatenate([np.empty(0, dtype), *parts]))
        return joined

    def send(self, buffer: np.ndarray, rank: int) -> None:
        """Send `buffer` to replica `rank`, which calls `receive`. On this rank it runs later."""
        if rank in self._share:
            # Copy it, because the sender may write to its buffer when this returns, as after a
            # blocking send of MPI.
            self._messages.setdefault((self.rank, rank), []).append(buffer.copy())
        else:
            self._run_on_main(lambda: self._transport.send(buffer, self._rank_of[rank]))

    def receive(self, buffer: np.ndarray, rank: int) -> None:
        """Overwrite `buffer` with the array that replica `rank` sends."""
        if rank in self._share:
            # Replicas run in the order of their numbers, so the sender has run before and the
            # message is here. Waiting for it would be a deadlock.
            np.copyto(buffer, self._messages[rank, self.rank].pop(0))
        else:
            self._run_on_main(lambda: self._transport.receive(buffer, self._rank_of[rank]))

    def abort(self, exit_code: int) -> None:
        """End every process of the job."""
        self._transport.abort(exit_code)
