"""Operations of a process group, by the names that torch calls them.

Each public method returns a `GroupWork`. Ranks compare operation, operator, root, dtypes and shapes
before anything moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.system.callsite import users_place
from mpistrat.torch import moves, reductions
from mpistrat.torch.arguments import (
    apart_from,
    check_is_of_ranks,
    check_writable,
    equal_parts,
    subject,
)
from mpistrat.torch.works import GroupQueue, GroupWork

Body = Callable[[CollectiveCall], object]


class Operations:
    """The collectives of a group, for a class that has its queue and its collectives."""

    _collectives: Collectives
    _queue: GroupQueue

    def _issue(self, kind: str, body: Body, outputs: list[Any], opts: Any) -> GroupWork:
        """Do `body` inside the collective `kind` in turn, and return its work."""
        check_is_of_ranks(kind)

        def operation() -> None:
            with self._collectives.call(kind) as call:
                limit_s = opts.timeout.total_seconds()
                if limit_s > 0:
                    call.timeout_s = limit_s
                body(call)

        work = GroupWork(kind, operation, outputs, users_place(sys._getframe(2)))
        is_async = getattr(opts, "asyncOp", True)  # torch 2.7 says it of few
        self._queue.add(work, is_async, _num_bytes(outputs) if is_async else 0)
        return work

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce `tensors` in place."""
        opts = opts or c10d.AllreduceOptions()

        def body(call: CollectiveCall) -> None:
            if tensors[0].layout is torch.sparse_coo:
                reductions.all_reduce_sparse(call, opts.reduceOp, tensors[0])
            else:
                check_writable(subject(call), tensors[0])
                reductions.all_reduce(call, opts.reduceOp, tensors)

        return self._issue("torch.all_reduce", body, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce `tensors` in place, in as few messages as possible."""
        opts = opts or c10d.AllreduceCoalescedOptions()

        def body(call: CollectiveCall) -> None:
            for each in tensors:
                check_writable(subject(call), each)
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
            parts = equal_parts(call, source, output)
            reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self._issue("torch.reduce_scatter_tensor", body, [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Do `reduce_scatter_single` of each pair."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            sources = apart_from(call, inputs, outputs)
            for output, source in zip(outputs, sources, strict=True):
                parts = equal_parts(call, source, output)
                reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self._issue("torch.reduce_scatter_tensor_coalesced", body, outputs, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Overwrite the tensor with that of one rank."""
        opts = opts or c10d.BroadcastOptions()
        (tensor,) = tensors

        def body(call: CollectiveCall) -> None:
            moves.broadcast(call, tensor, opts.rootRank)

        return self._issue("torch.broadcast", body, tensors, opts)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> GroupWork:
        """Receive one tensor of the list that one rank has."""
        opts = opts or c10d.ScatterOptions()
        (output,), parts = outputs, inputs[0] if inputs else []

        def body(call: CollectiveCall) -> None:
            moves.scatter(call, output, parts, opts.rootRank)

        return self._issue("torch.scatter", body, outputs, opts)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Send the tensor to one rank, which receives those of all."""
        opts = opts or c10d.GatherOptions()
        (own,), parts = inputs, outputs[0] if outputs else []

        def body(call: CollectiveCall) -> None:
            moves.gather(call, own, parts, opts.rootRank)

        return self._issue("torch.gather", body, outputs, opts)

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

        def body(call: CollectiveCall) -> None:
            moves.all_gather_v(call, own, received)

        return self._issue("torch.all_gather", body, outputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Receive the tensors of all ranks in one, one behind the other."""
        opts = opts or c10d.AllgatherOptions()

        def body(call: CollectiveCall) -> None:
            moves.all_gather_into(call, [output], [source])

        return self._issue("torch.all_gather_into_tensor", body, [output], opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Do `all_gather_single` of each pair."""
        opts = opts or c10d.AllgatherOptions()

        def body(call: CollectiveCall) -> None:
            moves.all_gather_into(call, outputs, inputs)

        return self._issue("torch.all_gather_into_tensor_coalesced", body, outputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Receive the lists of tensors of all ranks: ``outputs[rank][i]``."""
        opts = opts or c10d.AllgatherOptions()

        def body(call: CollectiveCall) -> None:
            moves.all_gather_each(call, outputs, inputs)

        return self._issue("torch.all_gather_coalesced", body, outputs, opts)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Send one tensor of a list to each rank, and receive one from each."""
        opts = opts or c10d.AllToAllOptions()

        def body(call: CollectiveCall) -> None:
            moves.all_to_all(call, outputs, inputs)

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
            moves.all_to_all_single(call, output, source, output_splits, input_splits)

        return self._issue("torch.all_to_all_single", body, [output], opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        """Return once all ranks have come."""
        opts = opts or c10d.BarrierOptions()

        def body(call: CollectiveCall) -> None:
            call.agree()
            if not call.channel.checks:  # else the agreement has waited for all
                call.channel.barrier()

        return self._issue("torch.barrier", body, [], opts)

    # Names of other versions of torch.
    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    all_gather_single_coalesced = allgather_into_tensor_coalesced


def _num_bytes(outputs: Sequence[Any]) -> int:
    """Return the length of tensors, or of lists of them."""
    return sum(
        _num_bytes(each) if isinstance(each, list) else each.numel() * each.element_size()
        for each in outputs
    )
