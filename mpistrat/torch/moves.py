"""Moves of tensors between the ranks of a group: gathers and exchanges, and their checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.torch.memory import Operand, described

__all__ = [
    "all_gather_into",
    "all_gather_v",
    "check_list",
    "equal_parts",
    "exchange",
    "row_counts",
]


def check_list(
    call: CollectiveCall, tensors: Sequence[torch.Tensor], name: str, like: torch.Tensor | None
) -> None:
    """Refuse a list that has not one tensor for each rank, all of them `like` one."""
    size = call.channel.size
    if len(tensors) != size:
        raise ValueError(
            f"{call.kind}: {name} must have one tensor for each of {size} ranks, but has "
            f"{len(tensors)}."
        )
    for number, tensor in enumerate(tensors):
        if like is not None and described(tensor) != described(like):
            raise ValueError(
                f"{call.kind}: tensor {number} of {name} has dtype and shape {described(tensor)}, "
                f"but this rank's tensor has {described(like)}. All must be equal."
            )


def equal_parts(
    call: CollectiveCall,
    whole: torch.Tensor,
    part: torch.Tensor,
    whole_name: str,
    part_name: str,
) -> list[torch.Tensor]:
    """Return `whole` cut into as many parts as there are ranks, each as long as `part`."""
    size = call.channel.size
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{call.kind}: the {whole_name} must have {size} times the elements of the "
            f"{part_name}, {size * part.numel()} of {part.dtype}, not {whole.numel()} of "
            f"{whole.dtype}."
        )
    flat = Operand(whole, call.kind).memory.reshape(-1)
    return list(flat.split(part.numel())) if part.numel() else [flat] * size


def all_gather_v(comm: MPI.Intracomm, sources: list[Operand], targets: list[Operand]) -> None:
    """Gather the only one of `sources` over ranks into `targets`. **Collective**."""
    counts = [each.num_bytes for each in targets]
    joined = torch.empty(sum(counts), dtype=torch.uint8)
    whole = Operand(joined, "torch.all_gather")
    comm.Allgatherv([sources[0].buffer, MPI.BYTE], [whole.buffer, counts, MPI.BYTE])
    for target, part in zip(targets, joined.split(counts), strict=True):
        target.memory.reshape(-1).view(torch.uint8).copy_(part)


def all_gather_into(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Gather each of `inputs` over ranks into one of `outputs`. **Collective**."""
    pairs = []
    for output, source in zip(outputs, inputs, strict=True):
        pairs.append((Operand(output, call.kind), Operand(source, call.kind)))
        equal_parts(call, output, source, "output", "input")
    call.agree(tuple(map(described, inputs)))
    with call.communicator() as comm:
        for whole, own in pairs:
            begin, place = whole.memory.data_ptr(), own.memory.data_ptr()
            # Sharded modules gather a parameter from its place in it. MPI_IN_PLACE is for all ranks
            # or none (MPI 4.1, section 6.2), and these may differ.
            overlaps = begin < place + own.num_bytes and place < begin + whole.num_bytes
            sent = Operand(own.memory.clone(), call.kind) if overlaps else own
            comm.Allgather([sent.buffer, MPI.BYTE], [whole.buffer, MPI.BYTE])
    for whole, _ in pairs:
        whole.give_back()


def row_counts(
    call: CollectiveCall, tensor: torch.Tensor, splits: Sequence[int], name: str
) -> list[int]:
    """Return how many elements of `tensor` each rank gets, from the rows of `splits`."""
    size, rows = call.channel.size, len(tensor) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"{call.kind}: the {rows} rows of the {name} cannot be divided equally among "
                f"{size} ranks. Pass {name}_split_sizes."
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{call.kind}: {name}_split_sizes must be {size} numbers that add up to the {rows} "
            f"rows of the {name}, not {list(splits)}."
        )
    per_row = tensor.numel() // rows if rows else 0
    return [each * per_row for each in splits]


def exchange(
    call: CollectiveCall,
    output: torch.Tensor,
    source: torch.Tensor,
    received: list[int],
    sent: list[int],
) -> None:
    """Send parts of `source` to all ranks, and receive those of `output`. **Collective**."""
    if output.dtype != source.dtype:
        raise TypeError(
            f"{call.kind}: output and input must have one dtype, not {output.dtype} and "
            f"{source.dtype}."
        )
    target, own = Operand(output, call.kind), Operand(source, call.kind)
    call.agree(described(source)[0])
    table = call.channel.exchange([sent, received])
    for sender, (counts, _) in enumerate(table):
        for receiver, (_, expected) in enumerate(table):
            if counts[receiver] != expected[sender]:
                raise ValueError(
                    f"{call.kind}: rank {sender} sends {counts[receiver]} elements to rank "
                    f"{receiver}, which expects {expected[sender]}. Compare the splits, or the "
                    "shapes of the lists."
                )
    itemsize = output.element_size()
    with call.communicator() as comm:
        comm.Alltoallv(
            [own.buffer, [each * itemsize for each in sent], MPI.BYTE],
            [target.buffer, [each * itemsize for each in received], MPI.BYTE],
        )
    target.give_back()
