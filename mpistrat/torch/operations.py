"""Operations of a process group: arguments to agreement, payload to MPI.

Each public method is one of torch's, and returns a `GroupWork`. Ranks compare operation, operator,
root, dtypes and shapes before anything moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.system.callsite import users_place
from mpistrat.torch import reductions
from mpistrat.torch.memory import Operand, described
from mpistrat.torch.moves import (
    all_gather_into,
    all_gather_v,
    check_list,
    equal_parts,
    exchange,
    row_counts,
)
from mpistrat.torch.works import GroupQueue, GroupWork

__all__ = ["Operations"]

Body = Callable[[CollectiveCall], object]


class Operations:
    """The collectives of a group, for a class that has its queue and its collectives."""

    _collectives: Collectives
    _queue: GroupQueue

    def _issue(self, kind: str, body: Body, outputs: list[Any], opts: Any) -> GroupWork:
        """Do `body` inside the collective `kind` in turn, and return its work."""

        def operation() -> None:
            with self._collectives.call(kind) as call:
                limit_s = opts.timeout.total_seconds()
                if limit_s > 0:
                    call.timeout_s = limit_s
                body(call)

        work = GroupWork(kind, operation, outputs, users_place(sys._getframe(2)))
        self._queue.add(work, getattr(opts, "asyncOp", True))  # torch 2.7 says it of few
        return work

    def _issue_moves(
        self,
        kind: str,
        opts: Any,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        details: Callable[[CollectiveCall], Sequence[object]],
        move: Callable[[MPI.Intracomm, list[Operand], list[Operand]], object],
        outputs: list[Any],
    ) -> GroupWork:
        """Issue a collective that moves bytes: `details` checks them, `move` calls MPI."""

        def body(call: CollectiveCall) -> None:
            sources = [Operand(each, kind) for each in sent]
            targets = [Operand(each, kind) for each in received]
            call.agree(*details(call))
            call.note_moved(sum(each.num_bytes for each in sources), kind)
            with call.communicator() as comm:
                move(comm, sources, targets)
            for target in targets:
                target.give_back()

        return self._issue(kind, body, outputs, opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce `tensors` in place."""
        opts = opts or c10d.AllreduceOptions()

        def body(call: CollectiveCall) -> None:
            if tensors[0].layout is torch.sparse_coo:
                reductions.all_reduce_sparse(call, opts.reduceOp, tensors[0])
            else:
                reductions.all_reduce(call, opts.reduceOp, tensors)

        return self._issue("torch.all_reduce", body, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce `tensors` in place, in as few messages as possible."""
        opts = opts or c10d.AllreduceCoalescedOptions()

        def body(call: CollectiveCall) -> None:
            reductions.all_reduce(call, opts.reduceOp, tensors)

        return self._issue("torch.all_reduce_coalesced", body, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce the tensor to one rank, in place there."""
        opts = opts or c10d.ReduceOptions()
        (tensor,) = tensors

        def body(call: CollectiveCall) -> None:
            reductions.reduce(call, opts.reduceOp, tensor, opts.rootRank)

        return self._issue("torch.reduce", body, tensors, opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> GroupWork:
        """Reduce the tensors of all ranks for each rank to it."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            reductions.reduce_scatter(call, opts.reduceOp, outputs[0], inputs[0])

        return self._issue("torch.reduce_scatter", body, outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Reduce equal parts of one tensor, to each rank its own."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            parts = equal_parts(call, source, output, "input", "output")
            reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self._issue("torch.reduce_scatter_tensor", body, [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Do `reduce_scatter_single` of each pair."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                parts = equal_parts(call, source, output, "input", "output")
                reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self._issue("torch.reduce_scatter_tensor_coalesced", body, outputs, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Overwrite the tensor with that of one rank."""
        opts = opts or c10d.BroadcastOptions()
        root = opts.rootRank

        def move(comm: MPI.Intracomm, _: list[Operand], targets: list[Operand]) -> None:
            comm.Bcast([targets[0].buffer, MPI.BYTE], root)

        return self._issue_moves(
            "torch.broadcast",
            opts,
            [],
            tensors,
            lambda call: (f"from rank {root}", *map(described, tensors)),
            move,
            tensors,
        )

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> GroupWork:
        """Receive one tensor of the list that one rank has."""
        opts = opts or c10d.ScatterOptions()
        (output,), root = outputs, opts.rootRank
        sent = inputs[0] if inputs else []

        def details(call: CollectiveCall) -> Sequence[object]:
            if call.channel.rank == root:
                check_list(call, sent, "scatter_list", output)
            return f"from rank {root}", described(output)

        def move(comm: MPI.Intracomm, sources: list[Operand], targets: list[Operand]) -> None:
            whole = None
            if comm.rank == root:
                whole = Operand(torch.cat([each.memory.reshape(-1) for each in sources]), "scatter")
            parts = None if whole is None else [whole.buffer, MPI.BYTE]
            comm.Scatter(parts, [targets[0].buffer, MPI.BYTE], root)

        return self._issue_moves("torch.scatter", opts, sent, outputs, details, move, outputs)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Send the tensor to one rank, which receives those of all."""
        opts = opts or c10d.GatherOptions()
        (own,), root = inputs, opts.rootRank
        received = outputs[0] if outputs else []

        def details(call: CollectiveCall) -> Sequence[object]:
            if call.channel.rank == root:
                check_list(call, received, "gather_list", own)
            return f"to rank {root}", described(own)

        def move(comm: MPI.Intracomm, sources: list[Operand], targets: list[Operand]) -> None:
            whole = None
            if comm.rank == root:
                whole = Operand(own.new_empty((comm.size, *own.shape)), "gather")
            parts = None if whole is None else [whole.buffer, MPI.BYTE]
            comm.Gather([sources[0].buffer, MPI.BYTE], parts, root)
            if whole is not None:
                for target, part in zip(targets, whole.memory, strict=True):
                    target.memory.copy_(part)

        return self._issue_moves("torch.gather", opts, inputs, received, details, move, outputs)

    def gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Send the tensor to one rank, which receives those of all in one tensor."""
        opts, own = opts or c10d.GatherOptions(), self._collectives
        parts = output.chunk(own.size) if output.dim() == source.dim() else output.unbind()
        return self.gather([list(parts)] if own.rank == opts.rootRank else [], [source], opts)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Receive the tensors of all ranks, whose shapes may differ."""
        opts = opts or c10d.AllgatherOptions()
        (received,), (own,) = outputs, inputs

        def details(call: CollectiveCall) -> Sequence[object]:
            expected = received[call.channel.rank] if len(received) == call.channel.size else own
            check_list(call, received, "tensor_list", None)
            if described(expected) != described(own):
                raise ValueError(
                    f"{call.kind}: element {call.channel.rank} of the output is for this rank's "
                    f"tensor, of dtype and shape {described(own)}, but has {described(expected)}."
                )
            return (tuple(map(described, received)),)

        return self._issue_moves(
            "torch.all_gather", opts, inputs, received, details, all_gather_v, outputs
        )

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Receive the tensors of all ranks in one, one behind the other."""
        opts = opts or c10d.AllgatherOptions()

        def body(call: CollectiveCall) -> None:
            all_gather_into(call, [output], [source])

        return self._issue("torch.all_gather_into_tensor", body, [output], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Do `all_gather_single` of each pair."""
        opts = opts or c10d.AllgatherOptions()

        def body(call: CollectiveCall) -> None:
            all_gather_into(call, outputs, inputs)

        return self._issue("torch.all_gather_into_tensor_coalesced", body, outputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Receive the lists of tensors of all ranks: ``outputs[rank][i]``."""
        opts = opts or c10d.AllgatherOptions()

        def body(call: CollectiveCall) -> None:
            if len(outputs) != call.channel.size:
                raise ValueError(
                    f"{call.kind}: expected one list for each of {call.channel.size} ranks, but "
                    f"got {len(outputs)}."
                )
            joined = [each.new_empty((call.channel.size, *each.shape)) for each in inputs]
            all_gather_into(call, joined, inputs)
            for rank, received in enumerate(outputs):
                for target, whole in zip(received, joined, strict=True):
                    target.detach().copy_(whole[rank])

        return self._issue("torch.all_gather_coalesced", body, outputs, opts)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Send one tensor of a list to each rank, and receive one from each."""
        opts = opts or c10d.AllToAllOptions()

        def body(call: CollectiveCall) -> None:
            size = call.channel.size
            for each, name in ((outputs, "output"), (inputs, "input")):
                if len(each) != size:
                    raise ValueError(
                        f"{call.kind}: expected {size} {name} tensors, one for each rank, but got "
                        f"{len(each)}."
                    )
            sent = torch.cat([each.detach().reshape(-1) for each in inputs])
            received = outputs[0].new_empty(sum(each.numel() for each in outputs))
            counts = [[each.numel() for each in part] for part in (inputs, outputs)]
            exchange(call, received, sent, counts[1], counts[0])
            parts = received.split(counts[1])
            for target, part in zip(outputs, parts, strict=True):
                target.detach().copy_(part.reshape(target.shape))

        return self._issue("torch.all_to_all", body, outputs, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> GroupWork:
        """Send rows of one tensor to each rank, and receive rows from each."""
        opts = opts or c10d.AllToAllOptions()

        def body(call: CollectiveCall) -> None:
            received = row_counts(call, output, output_splits, "output")
            sent = row_counts(call, source, input_splits, "input")
            exchange(call, output, source, received, sent)

        return self._issue("torch.all_to_all_single", body, [output], opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        """Return once all ranks have come."""
        opts = opts or c10d.BarrierOptions()

        def body(call: CollectiveCall) -> None:
            call.agree()
            if not call.channel.checks:  # else the agreement has waited for all
                call.channel.exchange(None)

        return self._issue("torch.barrier", body, [], opts)

    # Names of other versions of torch.
    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    all_gather_single_coalesced = allgather_into_tensor_coalesced
