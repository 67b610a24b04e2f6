"""Moves of tensors between the ranks of a group: broadcasts, gathers and exchanges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.torch.arguments import (
    are_apart,
    check_list,
    check_root,
    check_whole,
    check_writable,
    common_dtype,
    row_counts,
    source_of,
    subject,
    target_of,
)
from mpistrat.torch.memory import Operand, described


def _apart(source: Operand, target: Operand) -> Operand:
    """Return `source`, or a copy where `target` overlaps it, which MPI forbids."""
    return source if _lies_apart(source, target) else Operand(source.memory.clone(), "")


def _lies_apart(source: Operand, target: Operand) -> bool:
    return are_apart([source.memory], [target.memory])


def _are_apart(outputs: Sequence[torch.Tensor], pairs: Sequence[tuple[Operand, Operand]]) -> bool:
    """Return whether none of several outputs overlaps a source but its own."""
    # A source in its own target is looked at by `_apart`.
    sources = [own for whole, own in pairs if _lies_apart(own, whole)]
    return are_apart([each.memory for each in sources], outputs)


def broadcast(call: CollectiveCall, tensor: torch.Tensor, root: int) -> None:
    """Overwrite `tensor` with that of `root`. **Collective**."""
    check_root(call, root)
    is_root = call.channel.rank == root
    operand = source_of(call, tensor) if is_root else target_of(call, tensor)
    call.agree(f"from rank {root}", described(tensor))
    call.note_moved(operand.num_bytes, "broadcast")
    with call.moving():
        call.channel.transport.broadcast(operand.array, root)
    if not is_root:
        operand.give_back()


def scatter(
    call: CollectiveCall, output: torch.Tensor, parts: Sequence[torch.Tensor], root: int
) -> None:
    """Overwrite `output` with its one of the `parts` that `root` has. **Collective**."""
    sources = _check_parts(call, output, parts, "scatter_list", root)
    target = target_of(call, output)
    call.agree(f"from rank {root}", described(output))
    whole = None
    if sources:
        whole = Operand(torch.cat([each.memory.reshape(-1) for each in sources]), "")
    call.note_moved(target.num_bytes, "scatter")
    with call.communicator() as comm:
        comm.Scatter(_message(whole), _message(target), root)
    target.give_back()


def gather(
    call: CollectiveCall, own: torch.Tensor, parts: Sequence[torch.Tensor], root: int
) -> None:
    """Overwrite the `parts` that `root` has with the tensors of all ranks. **Collective**."""
    targets = _check_parts(call, own, parts, "gather_list", root)
    for each in parts:
        check_writable(subject(call), each)
    source = source_of(call, own)
    call.agree(f"to rank {root}", described(own))
    whole = None
    if targets:
        whole = Operand(torch.empty((call.channel.size, own.numel()), dtype=own.dtype), "")
    call.note_moved(source.num_bytes, "gather")
    with call.communicator() as comm:
        comm.Gather(_message(source), _message(whole), root)
    if whole is not None:
        _hand_out(whole.memory.unbind(), parts)


def _check_parts(
    call: CollectiveCall,
    own: torch.Tensor,
    parts: Sequence[torch.Tensor],
    name: str,
    root: int,
) -> list[Operand]:
    """Return the `parts` that `root` must have, one like `own` for each rank; else nothing."""
    check_root(call, root)
    if call.channel.rank != root:
        return []
    operands = [source_of(call, each) for each in parts]
    check_list(call, parts, name, own)
    return operands


def _message(operand: Operand | None) -> list[object] | None:
    return None if operand is None else [operand.buffer, MPI.BYTE]


def _hand_out(parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Copy what was received to the tensors of the program."""
    for output, part in zip(outputs, parts, strict=True):
        output.detach().copy_(part.reshape(output.shape))


def all_gather_v(call: CollectiveCall, own: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Gather `own`, whose shape may differ by rank, into `outputs`. **Collective**."""
    source, targets = source_of(call, own), [target_of(call, each) for each in outputs]
    check_list(call, outputs, "tensor_list", None)
    rank = call.channel.rank
    if described(outputs[rank]) != described(own):
        raise ValueError(
            f"{subject(call)}: tensor {rank} of tensor_list is for this rank's tensor, of dtype "
            f"and shape {described(own)}, but has {described(outputs[rank])}."
        )
    call.agree(tuple(map(described, outputs)))
    counts = [each.num_bytes for each in targets]
    whole = np.empty(sum(counts), np.uint8)
    call.note_moved(source.num_bytes, "all_gather")
    with call.communicator() as comm:
        comm.Allgatherv([source.buffer, MPI.BYTE], [whole, counts, MPI.BYTE])
    begin = 0
    for target, count in zip(targets, counts, strict=True):
        np.copyto(target.bytes, whole[begin : begin + count])
        begin += count
        target.give_back()


def all_gather_into(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Gather each of `inputs` over ranks into one of `outputs`. **Collective**."""
    pairs = []
    for output, source in zip(outputs, inputs, strict=True):
        pairs.append((target_of(call, output), source_of(call, source)))
        check_whole(call, output, source, "output", "input")
    if len(pairs) > 1 and not _are_apart(outputs, pairs):  # one may overwrite what is sent next
        pairs = [(whole, Operand(own.memory.clone(), "")) for whole, own in pairs]
    call.agree(tuple(map(described, inputs)))
    call.note_moved(sum(own.num_bytes for _, own in pairs), "all_gather")
    with call.communicator() as comm:
        for whole, own in pairs:
            # Sharded modules gather a parameter from its place in it. MPI_IN_PLACE is for all ranks
            # or none (MPI 4.1, section 6.2), and these may differ.
            sent = _apart(own, whole)
            comm.Allgather([sent.buffer, MPI.BYTE], [whole.buffer, MPI.BYTE])
    for whole, _ in pairs:
        whole.give_back()


def all_gather_each(
    call: CollectiveCall,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Gather each of `inputs` over ranks: ``outputs[rank][number]``. **Collective**."""
    size = call.channel.size
    if len(outputs) != size or {len(each) for each in outputs} != {len(inputs)}:
        raise ValueError(
            f"{subject(call)}: expected {size} lists of {len(inputs)} tensors, one list for each "
            f"rank, but got lists of the lengths {[len(each) for each in outputs]}."
        )
    for number, own in enumerate(inputs):
        received = [tensors[number] for tensors in outputs]
        check_list(call, received, f"number {number} of the output lists", own)
        for target in received:
            target_of(call, target)
    joined = [each.new_empty((size, *each.shape)) for each in inputs]
    all_gather_into(call, joined, inputs)
    for rank, of_rank in enumerate(outputs):
        _hand_out([whole[rank] for whole in joined], of_rank)


def all_to_all(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Send one of `inputs` to each rank, and receive one of `outputs`. **Collective**."""
    sources = [source_of(call, each) for each in inputs]
    for each in outputs:
        target_of(call, each)
    check_list(call, inputs, "input_tensor_list", None)
    check_list(call, outputs, "output_tensor_list", None)
    dtype = common_dtype(call, outputs, inputs)
    sent, received = ([each.numel() for each in tensors] for tensors in (inputs, outputs))
    call.agree(str(dtype).removeprefix("torch."))
    whole = torch.empty(sum(received), dtype=dtype)
    joined = torch.cat([each.memory.reshape(-1) for each in sources])
    _exchange(call, Operand(whole, ""), Operand(joined, ""), received, sent)
    _hand_out(whole.split(received), outputs)


def all_to_all_single(
    call: CollectiveCall,
    output: torch.Tensor,
    source: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """Send rows of `source` to each rank, and receive rows of `output`. **Collective**."""
    target, own = target_of(call, output), source_of(call, source)
    received = row_counts(call, output, output_splits, "output")
    sent = row_counts(call, source, input_splits, "input")
    common_dtype(call, [output], [source])
    dtype, _ = described(source)
    if output_splits or input_splits:
        call.agree(dtype, "with split sizes")
        _exchange(call, target, _apart(own, target), received, sent)
    else:
        if output.numel() != source.numel():
            raise ValueError(
                f"{subject(call)}: without split sizes, output and input must have equally many "
                f"elements, not {output.numel()} and {source.numel()}."
            )
        call.agree(described(source), "without split sizes")
        call.note_moved(own.num_bytes, "all_to_all")
        sent_from = _apart(own, target)
        with call.communicator() as comm:
            comm.Alltoall(_message(sent_from), _message(target))
    target.give_back()


def _exchange(
    call: CollectiveCall,
    target: Operand,
    source: Operand,
    received: Sequence[int],
    sent: Sequence[int],
) -> None:
    """Send elements to all ranks, and receive theirs, once agreed. **Collective**."""
    channel = call.channel
    size = channel.size
    with call.moving():
        own = np.array([*sent, *received], np.int64)
        table = channel.transport.all_gather(own, [own.size] * size).reshape(size, 2, size)
    wrong = np.argwhere(table[:, 0] != table[:, 1].T)
    if len(wrong):
        sender, receiver = wrong[0].tolist()
        raise ValueError(
            f"{call.kind}: rank {sender} sends {table[sender, 0, receiver]} elements to rank "
            f"{receiver}, which expects {table[receiver, 1, sender]}. Compare the split sizes, or "
            "the shapes of the lists."
        )
    itemsize = source.memory.element_size()
    call.note_moved(source.num_bytes, "all_to_all")
    with call.communicator() as comm:
        comm.Alltoallv(
            [source.buffer, [each * itemsize for each in sent], MPI.BYTE],
            [target.buffer, [each * itemsize for each in received], MPI.BYTE],
        )
