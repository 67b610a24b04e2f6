"""Operations of a process group, under torch's names.

Each public method returns a `GroupWork`. Ranks compare operation, operator, root, dtypes and shapes
before any data is sent.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.objects import wait_for_all
from mpistrat.collectives.operations.all_gather import gather_flat
from mpistrat.collectives.operations.all_to_all import exchange_flat
from mpistrat.collectives.operations.broadcast import Broadcast
from mpistrat.collectives.operations.scatter import Scatter
from mpistrat.system.callsite import users_place
from mpistrat.torch import tensor_reductions
from mpistrat.torch.overloads import overloaded
from mpistrat.torch.tensors import (
    Operand,
    apart,
    apart_from,
    are_apart,
    check_is_of_ranks,
    check_list,
    check_root,
    check_whole,
    check_writable,
    common_dtype,
    described,
    equal_parts,
    hand_out,
    joined_bytes,
    row_counts,
    source_of,
    subject,
    target_of,
)
from mpistrat.torch.works import GroupQueue, GroupWork

Body = Callable[[CollectiveCall], object]


class Operations:
    """The collectives of a group, a base for a class that has its queue and its collectives."""

    _collectives: Collectives
    _queue: GroupQueue
    num_issued = 0
    """How many collectives this rank has issued."""

    def issue(self, kind: str, body: Body, outputs: list[Any], opts: Any) -> GroupWork:
        """Run `body` inside the collective `kind`, in the queue's order, and return its work."""
        check_is_of_ranks(kind)

        def operation() -> None:
            with self._collectives.call(kind) as call:
                limit_s = 0.0 if opts is None else opts.timeout.total_seconds()
                if limit_s > 0:
                    call.timeout_s = limit_s
                body(call)

        self.num_issued += 1
        work = GroupWork(kind, operation, outputs, users_place(sys._getframe(2)))
        is_async = getattr(opts, "asyncOp", True)  # torch 2.7 sets it for only a few
        if torch.autograd._profiler_enabled():
            work.show_in_profile()
        self._queue.add(work, is_async, _num_bytes(outputs) if is_async else 0)
        return work

    @overloaded
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce `tensors` in place; several on a rank count as those of several ranks."""
        opts = opts or c10d.AllreduceOptions()

        def body(call: CollectiveCall) -> None:
            for each in tensors:
                check_writable(subject(call), each)
            tensor_reductions.all_reduce_together(call, opts.reduceOp, tensors)

        return self.issue("torch.all_reduce", body, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce `tensors` in place, in as few messages as possible."""
        opts = opts or c10d.AllreduceCoalescedOptions()

        def body(call: CollectiveCall) -> None:
            dtypes = {each.dtype for each in tensors}
            if len(dtypes) != 1:
                raise ValueError(
                    f"{subject(call)}: expected tensors of one dtype, but was given "
                    f"{', '.join(sorted(map(str, dtypes))) or 'no tensors'}. Call it once for each "
                    "dtype."
                )
            for each in tensors:
                check_writable(subject(call), each)
            tensor_reductions.all_reduce(call, opts.reduceOp, tensors)

        return self.issue("torch.all_reduce_coalesced", body, tensors, opts)

    @overloaded
    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Reduce the tensor to one rank, in place on that rank."""
        opts = opts or c10d.ReduceOptions()

        def body(call: CollectiveCall) -> None:
            tensor = _only(call, tensors, opts.rootTensor)
            tensor_reductions.reduce(call, opts.reduceOp, tensor, opts.rootRank)

        return self.issue("torch.reduce", body, tensors, opts)

    @overloaded
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> GroupWork:
        """Reduce, for each rank, the tensors that all ranks have for it."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            output, parts = _only(call, outputs), _only(call, inputs)
            tensor_reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self.issue("torch.reduce_scatter", body, outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Reduce one tensor, and keep on each rank its own one of the equal parts."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            parts = equal_parts(call, source, output)
            tensor_reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self.issue("torch.reduce_scatter_tensor", body, [output], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Call `reduce_scatter_single` for each pair."""
        opts = opts or c10d.ReduceScatterOptions()

        def body(call: CollectiveCall) -> None:
            sources = apart_from(call, inputs, outputs)
            for output, source in zip(outputs, sources, strict=True):
                parts = equal_parts(call, source, output)
                tensor_reductions.reduce_scatter(call, opts.reduceOp, output, parts)

        return self.issue("torch.reduce_scatter_tensor_coalesced", body, outputs, opts)

    @overloaded
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> GroupWork:
        """Overwrite the tensors with one tensor of one rank."""
        opts = opts or c10d.BroadcastOptions()

        def body(call: CollectiveCall) -> None:
            root = opts.rootRank
            if not 0 <= opts.rootTensor < len(tensors) or len(set(map(described, tensors))) > 1:
                raise ValueError(
                    f"{subject(call)}: expected tensors of one dtype and shape, and rootTensor as "
                    f"the number of one of them, but was given {[*map(described, tensors)]} and "
                    f"{opts.rootTensor}."
                )
            tensor = tensors[opts.rootTensor]
            check_root(call, root)
            is_root = call.channel.rank == root
            operand = source_of(call, tensor) if is_root else target_of(call, tensor)
            call.agree(f"from rank {root}", described(tensor))
            array = operand.array
            Broadcast(root).forward(call, [array], out=[array])
            if not is_root:
                operand.give_back()
            for each in tensors:
                if each is not tensor:
                    each.detach().copy_(tensor)

        return self.issue("torch.broadcast", body, tensors, opts)

    @overloaded
    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> GroupWork:
        """Receive one tensor of the list that one rank has."""
        opts = opts or c10d.ScatterOptions()

        def body(call: CollectiveCall) -> None:
            root, output = opts.rootRank, _only(call, outputs)
            parts = _only(call, inputs) if inputs else []
            sources = _parts_of_root(call, output, parts, "scatter_list", root)
            target = target_of(call, output)
            call.agree(f"from rank {root}", described(output))
            counts = Scatter(root).counts(call, [target.num_bytes] * call.channel.size)
            exchange_flat(call, joined_bytes(sources), *counts, target.bytes)
            target.give_back()

        return self.issue("torch.scatter", body, outputs, opts)

    @overloaded
    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Send the tensor to one rank, which receives the tensors of all ranks."""
        opts = opts or c10d.GatherOptions()
        parts = outputs[0] if outputs else []

        def body(call: CollectiveCall) -> None:
            root, own = opts.rootRank, _only(call, inputs)
            if outputs:
                _only(call, outputs)
            targets = _parts_of_root(call, own, parts, "gather_list", root)
            for each in parts:
                check_writable(subject(call), each)
            source = source_of(call, own)
            call.agree(f"to rank {root}", described(own))
            call.note_moved(source.num_bytes, "gather")
            with call.moving():
                counts = [source.num_bytes] * call.channel.size
                whole = call.channel.transport.gather(source.bytes, counts, root)
            if whole is not None:
                hand_out(whole, targets)

        return self.issue("torch.gather", body, parts, opts)

    def gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Send the tensor to one rank, which receives the tensors of all ranks in one tensor."""
        opts, own = opts or c10d.GatherOptions(), self._collectives
        parts = output.chunk(own.size) if output.dim() == source.dim() else output.unbind()
        lists = [list(parts)] if own.rank == opts.rootRank else []
        work: GroupWork = self.gather(lists, [source], opts)
        return work

    @overloaded
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Receive the tensors of all ranks, whose shapes may differ if each rank has one."""
        if len(inputs) != 1 or len(outputs) != 1:
            several = functools.partial(_gather_several, outputs=outputs, inputs=inputs)
            return self.issue("torch.all_gather", several, outputs, opts or c10d.AllgatherOptions())
        (received,), (own,) = outputs, inputs

        def body(call: CollectiveCall) -> None:
            source, targets = source_of(call, own), [target_of(call, each) for each in received]
            check_list(call, received, "tensor_list", None)
            rank = call.channel.rank
            if described(received[rank]) != described(own):
                raise ValueError(
                    f"{subject(call)}: tensor {rank} of tensor_list is for this rank's tensor, of "
                    f"dtype and shape {described(own)}, but has {described(received[rank])}."
                )
            call.agree(tuple(map(described, received)))
            counts = [each.num_bytes for each in targets]
            (whole,) = gather_flat(call, [source.bytes], [counts])
            hand_out(whole, targets)

        # Callers of torch expect a flat list of the work and of its future.
        return self.issue("torch.all_gather", body, received, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Receive the tensors of all ranks in one tensor, one behind the other."""
        body = functools.partial(_gather_into, outputs=[output], inputs=[source])
        return self.issue(
            "torch.all_gather_into_tensor", body, [output], opts or c10d.AllgatherOptions()
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Call `all_gather_single` for each pair."""
        body = functools.partial(_gather_into, outputs=outputs, inputs=inputs)
        return self.issue(
            "torch.all_gather_into_tensor_coalesced", body, outputs, opts or c10d.AllgatherOptions()
        )

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Receive the lists of tensors of all ranks: ``outputs[rank][i]``."""

        def body(call: CollectiveCall) -> None:
            size = call.channel.size
            if len(outputs) != size or {len(each) for each in outputs} != {len(inputs)}:
                raise ValueError(
                    f"{subject(call)}: expected {size} lists of {len(inputs)} tensors, one list "
                    "for each rank, but got lists of the lengths "
                    f"{[len(each) for each in outputs]}."
                )
            targets = []
            for number, own in enumerate(inputs):
                received = [tensors[number] for tensors in outputs]
                check_list(call, received, f"number {number} of the output lists", own)
                targets.append([target_of(call, each) for each in received])
            sources = [source_of(call, each) for each in inputs]
            call.agree(tuple(map(described, inputs)))
            counts = [[each.num_bytes] * size for each in sources]
            wholes = gather_flat(call, [each.bytes for each in sources], counts)
            for whole, of_ranks in zip(wholes, targets, strict=True):
                hand_out(whole, of_ranks)

        return self.issue(
            "torch.all_gather_coalesced", body, outputs, opts or c10d.AllgatherOptions()
        )

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        """Send one tensor of a list to each rank, and receive one from each."""

        def body(call: CollectiveCall) -> None:
            sources = [source_of(call, each) for each in inputs]
            targets = [target_of(call, each) for each in outputs]
            check_list(call, inputs, "input_tensor_list", None)
            check_list(call, outputs, "output_tensor_list", None)
            dtype = common_dtype(call, outputs, inputs)
            sent, received = (
                [each.numel() for each in each_list] for each_list in (inputs, outputs)
            )
            # Only the dtype: shapes may differ between ranks, and `_exchange` compares the counts.
            call.agree(str(dtype).removeprefix("torch."))
            joined = torch.empty(sum(received), dtype=dtype, device="cpu")
            whole = Operand(joined, "").bytes
            _exchange(call, joined_bytes(sources), dtype.itemsize, sent, received, whole)
            hand_out(whole, targets)

        return self.issue("torch.all_to_all", body, outputs, opts)

    @overloaded
    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> GroupWork:
        """Send rows of one tensor to each rank, and receive rows from each."""

        def body(call: CollectiveCall) -> None:
            target, own = target_of(call, output), source_of(call, source)
            received = row_counts(call, output, output_splits, "output")
            sent = row_counts(call, source, input_splits, "input")
            dtype = common_dtype(call, [output], [source])
            if output_splits or input_splits:
                call.agree(described(source)[0], "with split sizes")
                buffer = apart(own, target).bytes
                _exchange(call, buffer, dtype.itemsize, sent, received, target.bytes)
            else:
                if output.numel() != source.numel():
                    raise ValueError(
                        f"{subject(call)}: without split sizes, output and input must have equally "
                        f"many elements, not {output.numel()} and {source.numel()}."
                    )
                call.agree(described(source), "without split sizes")
                counts = [own.num_bytes // call.channel.size] * call.channel.size
                buffer = apart(own, target).bytes
                exchange_flat(call, buffer, counts, counts, target.bytes, is_even=True)
            target.give_back()

        return self.issue("torch.all_to_all_single", body, [output], opts or c10d.AllToAllOptions())

    @overloaded
    def barrier(self, opts: Any = None) -> GroupWork:
        """Return once all ranks have called it."""
        return self.issue("torch.barrier", wait_for_all, [], opts)

    # Names in other versions of torch.
    gather_into_tensor = gather_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    all_to_all_single = alltoall_base
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    all_gather_single_coalesced = allgather_into_tensor_coalesced


def _parts_of_root(
    call: CollectiveCall,
    own: torch.Tensor,
    parts: Sequence[torch.Tensor],
    name: str,
    root: int,
) -> list[Operand]:
    """Return the `parts` that `root` must have, one like `own` per rank; elsewhere nothing."""
    check_root(call, root)
    if call.channel.rank != root:
        return []
    operands = [source_of(call, each) for each in parts]
    check_list(call, parts, name, own)
    return operands


def _only(call: CollectiveCall, given: Sequence[Any], number: int = 0) -> Any:
    """Return the only one of `given`."""
    if len(given) != 1 or number:
        root = f" and rootTensor={number}" if number else ""
        raise ValueError(
            f"{subject(call)}: expected one tensor per rank, but was given {len(given)}{root}. "
            "Call it once for each."
        )
    return given[0]


def _gather_several(
    call: CollectiveCall, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]
) -> None:
    """Receive several tensors of one shape from each rank, in the order of the ranks."""
    number = call.channel.size * len(inputs)
    kinds = {described(each) for each in (*inputs, *(each for one in outputs for each in one))}
    if len(outputs) != len(inputs) or {len(each) for each in outputs} != {number} or len(kinds) > 1:
        raise ValueError(
            f"{subject(call)}: for {len(inputs)} tensors per rank it takes as many lists of "
            f"{number} tensors, all of one dtype and shape, but was given lists of "
            f"{[len(each) for each in outputs]} tensors, of {sorted(map(str, kinds))}."
        )
    own = source_of(call, torch.stack(inputs))
    lists = [[target_of(call, each) for each in one] for one in outputs]
    call.agree((len(inputs), described(inputs[0])))
    (whole,) = gather_flat(call, [own.bytes], [[own.num_bytes] * call.channel.size])
    for targets in lists:
        hand_out(whole, targets)


def _gather_into(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Gather each of `inputs` over ranks into one of `outputs`. **Collective**."""
    targets, sources = [], []
    for output, source in zip(outputs, inputs, strict=True):
        targets.append(target_of(call, output))
        sources.append(source_of(call, source))
        check_whole(call, output, source, "output", "input")
    # Sharded modules gather a parameter from its place inside the output. MPI_IN_PLACE must be used
    # by all ranks or by none (MPI 4.1, section 6.2), and these ranks may differ.
    sent = [apart(*pair) for pair in zip(sources, targets, strict=True)]
    # The output of one pair may be the input of a later one.
    if len(sent) > 1 and not are_apart([each.memory for each in sent], outputs):
        sent = [Operand(each.memory.clone(), "") for each in sources]
    call.agree(tuple(map(described, inputs)))
    counts = [[each.num_bytes] * call.channel.size for each in sent]
    gather_flat(call, [each.bytes for each in sent], counts, [each.bytes for each in targets])
    for target in targets:
        target.give_back()


def _exchange(
    call: CollectiveCall,
    buffer: np.ndarray,
    itemsize: int,
    sent: Sequence[int],
    received: Sequence[int],
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Send elements to all ranks, and receive theirs, once the ranks agree. **Collective**."""
    transport, size = call.channel.transport, call.channel.size
    with call.moving():
        # After this each rank knows how much every rank sends to each, and how much each expects.
        # All ranks make the same comparison, so either all raise or all exchange.
        own = np.array([*sent, *received], np.int64)
        table = transport.all_gather(own, [own.size] * size).reshape(size, 2, size)
    wrong = np.argwhere(table[:, 0] != table[:, 1].T)
    if len(wrong):
        sender, receiver = wrong[0].tolist()
        raise ValueError(
            f"{call.kind}: rank {sender} sends {table[sender, 0, receiver]} elements to rank "
            f"{receiver}, which expects {table[receiver, 1, sender]}. Compare the split sizes, or "
            "the shapes of the lists."
        )
    counts, incoming = ([each * itemsize for each in numbers] for numbers in (sent, received))
    return exchange_flat(call, buffer, counts, incoming, out)


def _num_bytes(outputs: Sequence[Any]) -> int:
    """Return the number of bytes of tensors, or of lists of them."""
    return sum(
        _num_bytes(each) if isinstance(each, list) else each.numel() * each.element_size()
        for each in outputs
    )
