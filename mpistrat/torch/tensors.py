"""Tensors of operations: their memory for MPI and NumPy, and checks before the ranks agree."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI

from mpistrat import context
from mpistrat.arrays import are_disjoint, array_at_function
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.comm.wire import named_dtype
from mpistrat.errors import ContextError
from mpistrat.sharding import consecutive


class Operand:
    """A dense tensor on the host as contiguous memory; `kind` is the operation, for errors."""

    __slots__ = ("_target", "memory")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        # Kept short, because each operation creates one per tensor.
        _check(tensor, kind)
        self._target: torch.Tensor | None = None
        self.memory = tensor
        """The tensor itself, or a contiguous copy."""
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            self._target = tensor.detach()
            self.memory = self._target.resolve_conj().resolve_neg().contiguous()
        elif not tensor.is_contiguous():
            self._target, self.memory = tensor, tensor.contiguous()

    @property
    def array(self) -> np.ndarray:
        """The numbers as an array of the tensor's shape, which keeps their memory alive."""
        # Tensor.numpy() would make the storage of a user's tensor permanently unresizable, and
        # sharded modules resize their storages.
        memory = self.memory
        dtype, shape = _numpy_dtype(memory.dtype), tuple(memory.shape)
        address = memory.data_ptr()
        # An empty tensor may have the address 0, for which NumPy has no array.
        return _array_at(address, shape, dtype, memory) if address else np.empty(shape, dtype)

    @property
    def bytes(self) -> np.ndarray:
        """The bytes as an array, also if one element has any stride."""
        memory = self.memory
        address, shape = memory.data_ptr(), (memory.numel() * memory.element_size(),)
        return _array_at(address, shape, _BYTE, memory) if address else np.empty(shape, _BYTE)

    @property
    def buffer(self) -> MPI.buffer:
        """The bytes as a buffer for MPI."""
        return MPI.buffer.fromaddress(self.memory.data_ptr(), self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return int(self.memory.numel() * self.memory.element_size())

    def give_back(self) -> None:
        """Copy the received values to the tensor, if its memory is a different one.

        Otherwise increment autograd's version counter, which does not see writes by address: a
        backward pass that needs the overwritten values then raises an error.
        """
        target = self._target
        if target is not None and (
            target.data_ptr() != self.memory.data_ptr()
            or target.is_conj() != self.memory.is_conj()
            or target.is_neg() != self.memory.is_neg()
        ):
            target.copy_(self.memory)
        else:
            torch.autograd.graph.increment_version(self.memory)


_array_at = array_at_function()
_BYTE = np.dtype(np.uint8)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is CPU memory."""
    return bool(tensor.is_cpu)


def _check(tensor: torch.Tensor, kind: str) -> None:
    # The device first: a tensor elsewhere has no address that the host may read.
    if not is_on_host(tensor):
        raise ValueError(
            f"{kind}: expected tensors on the CPU, but got one on {tensor.device}. Move it with "
            ".cpu(), or give the tensors of other devices to another backend: "
            'mpistrat.torch.init(backend="cpu:mpistrat,cuda:nccl").'
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else layout
        raise TypeError(
            f"{kind}: expected dense tensors, but got a {what} one of dtype {tensor.dtype}. Send "
            "the tensors that it consists of."
        )


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape, which ranks compare."""
    return _name(tensor.dtype), tuple(tensor.shape)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy dtype; for dtypes that are only moved, a dtype of the same size."""
    name = _name(dtype)
    if name == "bfloat16":
        return named_dtype("bfloat16")
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(f"V{dtype.itemsize}")


def joined_bytes(operands: Sequence[Operand]) -> np.ndarray:
    """Return the bytes of tensors, one tensor behind the other."""
    parts = [each.memory.reshape(-1) for each in operands]
    return Operand(torch.cat(parts) if parts else torch.empty(0, device="cpu"), "").bytes


def hand_out(whole: np.ndarray, targets: Sequence[Operand]) -> None:
    """Copy the received bytes, one tensor behind the other, to the `targets`."""
    for target, part in zip(targets, consecutive(t.num_bytes for t in targets), strict=True):
        np.copyto(target.bytes, whole[part])
        target.give_back()


def subject(call: CollectiveCall) -> str:
    """Return the operation and the rank, the beginning of errors about arguments."""
    return _subject(call.kind, call.channel.rank, call.channel.size)


@functools.cache  # operations repeat, and few fail
def _subject(kind: str, rank: int, size: int) -> str:
    return f"{kind} on rank {rank} of {size}"


def source_of(call: CollectiveCall, tensor: torch.Tensor) -> Operand:
    """Return the memory of a tensor to send."""
    return Operand(tensor, subject(call))


def target_of(call: CollectiveCall, tensor: torch.Tensor) -> Operand:
    """Return the memory of a tensor to write to."""
    operand = Operand(tensor, subject(call))
    check_writable(subject(call), tensor)
    return operand


def apart(source: Operand, target: Operand) -> Operand:
    """Return `source`, or a copy if `target` overlaps it, which MPI forbids."""
    is_apart = are_apart([source.memory], [target.memory])
    return source if is_apart else Operand(source.memory.clone(), "")


def apart_from(
    call: CollectiveCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return `inputs` in C order, or copies if an output may be written before an input is read."""
    sources = [source_of(call, each).memory for each in inputs]
    if len(inputs) == 1 or are_apart(sources, outputs):
        return sources
    return [each.clone() for each in sources]


def are_apart(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Return whether no target shares memory with a source, or with another target."""
    spans = [(*_span(each), False) for each in sources] + [(*_span(each), True) for each in targets]
    return are_disjoint(spans)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and the end of a tensor's memory, including gaps between its elements."""
    begin, reach = tensor.data_ptr(), 0
    if tensor.numel():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((length - 1) * stride for length, stride in pairs)
    return begin, begin + reach * tensor.element_size()


def check_is_of_ranks(kind: str) -> None:
    """Raise for an operation of ranks inside a replica, if a rank has several replicas."""
    frame = context.current()
    if frame is None or frame.kind is not context.Kind.REPLICA:
        return
    if context.layout_of(frame.strategy).is_shared:
        raise ContextError(
            f"{kind} is of the ranks, but it was called in a replica of {frame.strategy!r}, of "
            "which a rank may have several. Use the collectives of get_replica_context(), or its "
            "merge_call, which calls a function once on each rank. In place of "
            "DistributedDataParallel reduce what torch.autograd.grad returns."
        )


def check_root(call: CollectiveCall, root: int) -> None:
    """Raise for a root that is not a rank of the group."""
    size = call.channel.size
    if not 0 <= root < size:
        raise ValueError(
            f"{subject(call)}: the root must be a rank from 0 to {size - 1}, not {root}."
        )


def check_writable(subject: str, tensor: torch.Tensor) -> None:
    """Raise for an output whose elements share memory, as in an expanded tensor."""
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
    """Raise unless a list has one tensor per rank, all of them like `like`."""
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
    """Raise unless `whole` is as long as one `part` per rank."""
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
    """Return `source` cut into one part per rank, each as long as `output`."""
    check_whole(call, source, output, "input", "output")
    flat = source_of(call, source).memory.reshape(-1)
    return list(flat.split(output.numel())) if output.numel() else [flat] * call.channel.size


def common_dtype(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> torch.dtype:
    """Return the dtype of all tensors, or raise if they differ."""
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
    """Return how many elements of `tensor` each rank gets; `splits` are rows."""
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
