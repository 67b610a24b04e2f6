"""Arguments of operations: tensors, roots and lists, checked before the ranks agree."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mpistrat import context
from mpistrat.collectives.aliasing import are_disjoint
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.errors import ContextError
from mpistrat.layout import SharedLayout
from mpistrat.torch.memory import Operand, described


def subject(call: CollectiveCall) -> str:
    """Return the operation and the rank, with which an error about arguments begins."""
    return _subject(call.kind, call.channel.rank, call.channel.size)


@functools.cache  # operations are repeated, and hardly any fails
def _subject(kind: str, rank: int, size: int) -> str:
    return f"{kind} on rank {rank} of {size}"


def source_of(call: CollectiveCall, tensor: torch.Tensor) -> Operand:
    """Return the memory of a tensor that is sent."""
    return Operand(tensor, subject(call))


def target_of(call: CollectiveCall, tensor: torch.Tensor) -> Operand:
    """Return the memory of a tensor that is written to."""
    operand = Operand(tensor, subject(call))
    check_writable(subject(call), tensor)
    return operand


def apart_from(
    call: CollectiveCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return `inputs` in C order, or copies where an output may be written before one is read."""
    sources = [source_of(call, each).memory for each in inputs]
    if len(inputs) == 1 or are_apart(sources, outputs):
        return sources
    return [each.clone() for each in sources]


def are_apart(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Return whether no target shares memory with a source, or with another target."""
    spans = [(*_span(each), False) for each in sources] + [(*_span(each), True) for each in targets]
    return are_disjoint(spans)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor begins and ends, with what lies between its elements."""
    begin, reach = tensor.data_ptr(), 0
    if tensor.numel():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((length - 1) * stride for length, stride in pairs)
    return begin, begin + reach * tensor.element_size()


def check_is_of_ranks(kind: str) -> None:
    """Refuse an operation of the ranks inside a replica of which a rank has several."""
    frame = context.current()
    if frame is None or frame.kind is not context.Kind.REPLICA:
        return
    if isinstance(frame.strategy.extended._layout, SharedLayout):
        raise ContextError(
            f"{kind} is of the ranks, but it was called in a replica of {frame.strategy!r}, of "
            "which a rank may have several. Use the collectives of get_replica_context(), or its "
            "merge_call, which calls a function once on each rank. In place of "
            "DistributedDataParallel reduce what torch.autograd.grad returns."
        )


def check_root(call: CollectiveCall, root: int) -> None:
    """Refuse a root that is not a rank of the group."""
    size = call.channel.size
    if not 0 <= root < size:
        raise ValueError(
            f"{subject(call)}: the root must be a rank from 0 to {size - 1}, not {root}."
        )


def check_writable(subject: str, tensor: torch.Tensor) -> None:
    """Refuse an output whose elements share memory, as those of an expanded tensor do."""
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0 and length > 1:
                raise ValueError(
                    f"{subject}: a tensor of shape {tuple(tensor.shape)} cannot be written "
                    "to, because expand() has put several of its elements into one place. Pass "
                    "tensor.clone()."
                )


def check_list(
    call: CollectiveCall, tensors: Sequence[torch.Tensor], name: str, like: torch.Tensor | None
) -> None:
    """Refuse a list that has not one tensor for each rank, all of them `like` one."""
    size = call.channel.size
    if len(tensors) != size:
        raise ValueError(
            f"{subject(call)}: {name} must have {size} tensors, one for each rank, not "
            f"{len(tensors)}."
        )
    for number, tensor in enumerate(tensors):
        if like is not None and described(tensor) != described(like):
            raise ValueError(
                f"{subject(call)}: tensor {number} of {name} has dtype and shape "
                f"{described(tensor)}, but this rank's tensor has {described(like)}. They must be "
                "equal."
            )


def check_whole(
    call: CollectiveCall,
    whole: torch.Tensor,
    part: torch.Tensor,
    whole_name: str,
    part_name: str,
) -> None:
    """Refuse a `whole` that is not as long as one `part` for each rank."""
    size = call.channel.size
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{subject(call)}: the {whole_name} must have {size} times the elements of the "
            f"{part_name}, {size * part.numel()} of {part.dtype}, not {whole.numel()} of "
            f"{whole.dtype}."
        )


def equal_parts(
    call: CollectiveCall, source: torch.Tensor, output: torch.Tensor
) -> list[torch.Tensor]:
    """Return `source` cut into as many parts as there are ranks, each as long as `output`."""
    check_whole(call, source, output, "input", "output")
    flat = source_of(call, source).memory.reshape(-1)
    return list(flat.split(output.numel())) if output.numel() else [flat] * call.channel.size


def common_dtype(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> torch.dtype:
    """Return the dtype of all tensors, or refuse them."""
    names = [sorted({described(each)[0] for each in tensors}) for tensors in (outputs, inputs)]
    if names[0] != names[1] or len(names[0]) > 1:
        raise TypeError(
            f"{subject(call)}: all tensors must have one dtype, but the output is "
            f"{' and '.join(names[0])} and the input is {' and '.join(names[1])}. Convert them "
            "with .to(dtype)."
        )
    return inputs[0].dtype


def row_counts(
    call: CollectiveCall, tensor: torch.Tensor, splits: Sequence[int], name: str
) -> list[int]:
    """Return how many elements of `tensor` each rank gets, from the rows of `splits`."""
    size, rows = call.channel.size, len(tensor) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"{subject(call)}: the {rows} rows of the {name} cannot be divided equally among "
                f"{size} ranks. Pass {name}_split_sizes."
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{subject(call)}: {name}_split_sizes must be {size} numbers that add up to the {rows} "
            f"rows of the {name}, not {list(splits)}."
        )
    per_row = tensor.numel() // rows if rows else 0
    return [each * per_row for each in splits]
