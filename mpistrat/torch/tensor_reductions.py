"""Reductions of tensors: torch's operators by means of mpistrat's reducers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch.distributed import ReduceOp as TorchOp

from mpistrat.arrays import are_apart
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations.all_gather import gather_flat
from mpistrat.collectives.operations.all_to_all import exchange_flat
from mpistrat.comm.mpi_transport import in_parts
from mpistrat.comm.ops import combine
from mpistrat.comm.wire import accumulator_dtype, cast, cast_into
from mpistrat.options import ReduceOp
from mpistrat.torch.tensors import (
    Operand,
    check_root,
    common_dtype,
    described,
    source_of,
    subject,
    target_of,
)

_RedOp = TorchOp.RedOpType
_OPS = {
    _RedOp.SUM: ReduceOp.SUM,
    _RedOp.AVG: ReduceOp.MEAN,
    _RedOp.PRODUCT: ReduceOp.PROD,
    _RedOp.MIN: ReduceOp.MIN,
    _RedOp.MAX: ReduceOp.MAX,
}


class _Bitwise(NamedTuple):
    """A bitwise operator in two libraries."""

    mpi: MPI.Op
    ufunc: np.ufunc


_BITWISE = {
    _RedOp.BAND: _Bitwise(MPI.BAND, np.bitwise_and),
    _RedOp.BOR: _Bitwise(MPI.BOR, np.bitwise_or),
    _RedOp.BXOR: _Bitwise(MPI.BXOR, np.bitwise_xor),
}
_OF_OWN_TENSORS = {
    _RedOp.SUM: torch.add,
    _RedOp.PRODUCT: torch.mul,
    _RedOp.MIN: torch.minimum,
    _RedOp.MAX: torch.maximum,
    _RedOp.BAND: torch.bitwise_and,
    _RedOp.BOR: torch.bitwise_or,
    _RedOp.BXOR: torch.bitwise_xor,
}
_OF_BOOL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PROD: ReduceOp.MIN}
"""The sum of bools is their logical or, the product their logical and."""


class _Reduction:
    """Torch's operator `known` for tensors of some dtypes, which it must support."""

    # `kind` is the operation, for errors.

    def __init__(self, kind: str, known: Any, *dtypes: torch.dtype) -> None:
        self.bitwise = _BITWISE.get(known)
        """The bitwise operator, if it is one."""
        if self.bitwise is None and known not in _OPS:
            raise ValueError(
                f"{kind}: {known} is not supported on CPU tensors. Use SUM, AVG, PRODUCT, MIN, "
                "MAX, BAND, BOR or BXOR; for PREMUL_SUM multiply the tensor first."
            )
        self.name = str(getattr(known, "name", known))
        """Name of the operator, which ranks compare."""
        self.op = _OPS.get(known, ReduceOp.SUM)
        for dtype in dtypes:
            self._check(kind, dtype)
        self._is_bool = torch.bool in dtypes
        if self._is_bool:
            self.op = _OF_BOOL.get(self.op, self.op)
        self.averages_integers = self.op is ReduceOp.MEAN and not _is_inexact(dtypes[0])
        """Whether the results are cut to integers, by `store`."""
        if self.averages_integers:
            # mpistrat's own mean of integers is a float64, and torch's has the tensor's dtype.
            self.op = ReduceOp.SUM

    def _check(self, kind: str, dtype: torch.dtype) -> None:
        if self.bitwise and _is_inexact(dtype):
            raise TypeError(f"{kind}: {self.name} needs integers or bools, not {dtype}.")
        if self.op is ReduceOp.MEAN and dtype is torch.bool:
            raise ValueError(
                f"{kind}: ReduceOp.AVG needs numbers, not {dtype}. Use SUM, which is the logical "
                "or of bools, or convert them to numbers first."
            )
        if dtype.is_floating_point and torch.finfo(dtype).bits < 16:
            raise TypeError(
                f"{kind}: {dtype} cannot be reduced. Reduce in a wider dtype: tensor.to("
                "torch.bfloat16)."
            )

    def structure(self, tensors: Sequence[torch.Tensor]) -> object:
        """Return what ranks compare in addition to mpistrat's operator, dtypes and shapes."""
        if self.averages_integers:
            return (self.name, *(described(each)[0] for each in tensors))
        return f"{self.name} of bool" if self._is_bool else ()

    def arrays(self, operands: Sequence[Operand]) -> list[np.ndarray]:
        """Return the operands as arrays to reduce."""
        arrays = [each.array for each in operands]
        if self.averages_integers:
            # The average fits into a narrow dtype, but the sum may not.
            return [each if each.itemsize == 8 else each.astype(np.int64) for each in arrays]
        return [each.view(np.uint8) for each in arrays] if self._is_bool else arrays

    def store(self, result: np.ndarray, target: Operand, size: int) -> None:
        """Overwrite `target` with the reduction of `arrays` over `size` ranks."""
        array = target.array
        if self.averages_integers:
            array[...] = _truncated_quotient(result, size).reshape(array.shape)
        else:
            array = array.view(np.uint8) if self._is_bool else array
            cast_into(array, result.reshape(array.shape))
        target.give_back()


def _is_inexact(dtype: torch.dtype) -> bool:
    return bool(dtype.is_floating_point or dtype.is_complex)


def _truncated_quotient(total: np.ndarray, size: int) -> np.ndarray:
    """Return `total` divided by `size`, cut toward zero as NCCL does."""
    quotient = total // size  # NumPy cuts toward minus infinity
    quotient += (quotient < 0) & (quotient * size != total)
    return quotient


_kept_reduction = functools.lru_cache(_Reduction)


def _reduction_of(kind: str, op: Any, tensors: Sequence[torch.Tensor]) -> _Reduction:
    """Return the reduction of `tensors` with torch's `op`."""
    dtypes = {each.dtype for each in tensors} if len(tensors) > 1 else (tensors[0].dtype,)
    return _kept_reduction(kind, getattr(op, "op", op), *dtypes)


def all_reduce(call: CollectiveCall, op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Reduce each tensor in place, bit-identical on all ranks. **Collective**."""
    operands = [target_of(call, each) for each in tensors]
    reduction = _reduction_of(subject(call), op, tensors)
    arrays = reduction.arrays(operands)
    if reduction.bitwise:
        call.agree(reduction.name, tuple(map(described, tensors)))
        for array in arrays:
            _combine_bits(call, reduction.bitwise, array)
    else:
        # Two tensors may share memory, for example if the same tensor is passed twice.
        is_apart = len(arrays) == 1 or are_apart(arrays, arrays)
        targets = arrays if is_apart else [array.copy() for array in arrays]
        call.all_reduce_in_place(reduction.op, targets, reduction.structure(tensors))
        if not is_apart or reduction.averages_integers:
            for operand, target in zip(operands, targets, strict=True):
                reduction.store(target, operand, call.channel.size)
            return
    for operand in operands:
        operand.give_back()


def all_reduce_together(call: CollectiveCall, op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Reduce over all tensors of all ranks, and overwrite each with the result. **Collective**.

    So torch's groups treat several tensors of a rank: as if each were the tensor of one more rank.
    """
    if len(tensors) == 1:
        _all_reduce_one(call, op, tensors[0])
        return
    combined = _OF_OWN_TENSORS.get(getattr(op, "op", op))
    if combined is None or len({described(each) for each in tensors}) != 1:
        raise ValueError(
            f"{subject(call)}: expected one tensor, or several of one dtype and shape with an "
            f"operator other than AVG, not {op} of {[*map(described, tensors)]}. Use "
            "allreduce_coalesced to reduce each tensor on its own."
        )
    joint = functools.reduce(combined, [each.detach() for each in tensors])
    _all_reduce_one(call, op, joint)
    # detach() of a sparse tensor would be a copy.
    with torch.no_grad():
        for each in tensors:
            each.copy_(joint)


def _all_reduce_one(call: CollectiveCall, op: Any, tensor: torch.Tensor) -> None:
    if tensor.layout is torch.sparse_coo:
        all_reduce_sparse(call, op, tensor)
    else:
        all_reduce(call, op, [tensor])


def _combine_bits(call: CollectiveCall, bitwise: _Bitwise, array: np.ndarray) -> None:
    with call.communicator() as comm:
        for part in in_parts(array):
            comm.Allreduce(MPI.IN_PLACE, part, bitwise.mpi)


def reduce(call: CollectiveCall, op: Any, tensor: torch.Tensor, root: int) -> None:
    """Reduce `tensor` in place on `root`; on other ranks it is unchanged. **Collective**."""
    check_root(call, root)
    is_root = call.channel.rank == root
    operand = target_of(call, tensor) if is_root else source_of(call, tensor)
    reduction = _reduction_of(subject(call), op, [tensor])
    (array,) = reduction.arrays([operand])
    if reduction.bitwise:
        call.agree(reduction.name, described(tensor), f"to rank {root}")
        total = array if is_root else array.copy()
        _combine_bits(call, reduction.bitwise, total)
    else:
        results = call.reduce(reduction.op, [array], root, reduction.structure([tensor]))
        total = array if results is None else results[0]
    if is_root:
        reduction.store(total, operand, call.channel.size)


def reduce_scatter(
    call: CollectiveCall,
    op: Any,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
) -> None:
    """Reduce into `output` the inputs that all ranks have for this rank. **Collective**."""
    target = target_of(call, output)
    operands = [source_of(call, each) for each in inputs]
    reduction = _reduction_of(subject(call), op, [output, *inputs])
    channel = call.channel
    if len(inputs) != channel.size or inputs[channel.rank].numel() != output.numel():
        raise ValueError(
            f"{subject(call)}: expected {channel.size} input tensors, of which number "
            f"{channel.rank} has the {output.numel()} elements of the output, but got "
            f"{[each.numel() for each in inputs]} elements."
        )
    common_dtype(call, [output], inputs)
    call.agree(reduction.name, tuple(map(described, inputs)))
    joined = np.concatenate([each.reshape(-1) for each in reduction.arrays(operands)])
    counts, incoming = [each.numel() for each in inputs], [output.numel()] * channel.size
    pieces = exchange_flat(call, joined, counts, incoming).reshape(channel.size, output.numel())
    if reduction.bitwise:
        result = reduction.bitwise.ufunc.reduce(pieces, axis=0)
    else:
        result = combine(reduction.op, cast(pieces, accumulator_dtype(pieces.dtype)))
    reduction.store(result, target, channel.size)


def all_reduce_sparse(call: CollectiveCall, op: Any, tensor: torch.Tensor) -> None:
    """Add up sparse tensors in COO format, in place. **Collective**."""
    own = tensor.detach().coalesce()
    reduction = _reduction_of(subject(call), op, [own.values()])
    if reduction.op not in (ReduceOp.SUM, ReduceOp.MEAN) or reduction.bitwise:
        raise ValueError(
            f"{subject(call)}: sparse tensors can be reduced only by SUM and AVG, not by "
            f"{reduction.name}. Use tensor.to_dense()."
        )
    call.agree(reduction.name, described(own), f"sparse_dim {own.sparse_dim()}")
    channel = call.channel
    with call.moving():
        counts = channel.transport.all_gather(np.array([own._nnz()]), [1] * channel.size).tolist()
    indices = _gathered(call, own.indices().t(), counts)
    values = _gathered(call, own.values(), counts)
    if reduction.averages_integers:
        values = values.long()  # as in `_Reduction.arrays`
    # coalesce adds up the values of ranks that have the same index.
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce()
    if reduction.averages_integers:
        total = total.div(channel.size, rounding_mode="trunc")
    elif reduction.op is ReduceOp.MEAN:
        total = total / channel.size
    with torch.no_grad():
        tensor.copy_(total)


def _gathered(call: CollectiveCall, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the `rows` of all ranks, in rank order."""
    joined = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype, device="cpu")
    row_bytes = joined[0].numel() * joined.element_size() if len(joined) else 0
    source, target = source_of(call, rows), Operand(joined, "")
    gather_flat(call, [source.bytes], [[n * row_bytes for n in counts]], [target.bytes])
    return joined
