"""Memory of tensors for MPI and NumPy: dtypes, contiguity, copying back."""

from __future__ import annotations

import functools

import numpy as np
import torch
from mpi4py import MPI

from mpistrat.arrays import array_at_function
from mpistrat.comm.wire import named_dtype


class Operand:
    """A tensor of a call as contiguous memory of the host.

    Parameters
    ----------
    tensor : torch.Tensor
    kind : str
        The operation, for errors.

    Raises
    ------
    TypeError
        If the tensor is not dense.
    ValueError
        If it is not on the host.
    """

    __slots__ = ("_target", "memory")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        # Short, as each operation makes one of each tensor.
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
        # Tensor.numpy() would make the storage of a user's tensor unresizable for good, and
        # sharded modules resize theirs.
        memory = self.memory
        dtype, shape = _numpy_dtype(memory.dtype), tuple(memory.shape)
        address = memory.data_ptr()
        return _array_at(address, shape, dtype, memory) if address else np.empty(shape, dtype)

    @property
    def bytes(self) -> np.ndarray:
        """The bytes as an array, also of one element with any stride."""
        address = self.memory.data_ptr()
        shape, dtype = (self.num_bytes,), np.dtype(np.uint8)
        return _array_at(address, shape, dtype, self.memory) if address else np.empty(shape, dtype)

    @property
    def buffer(self) -> MPI.buffer:
        """The bytes."""
        return MPI.buffer.fromaddress(self.memory.data_ptr(), self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """How many bytes there are."""
        return int(self.memory.numel() * self.memory.element_size())

    def give_back(self) -> None:
        """Copy what was received to the tensor, if its memory is elsewhere.

        Otherwise raise autograd's version counter, which does not see writes by address: a
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


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is that of the CPU."""
    return bool(tensor.is_cpu)


def _check(tensor: torch.Tensor, kind: str) -> None:
    # First the device: a tensor elsewhere has no address that the host may read.
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
    """Return dtype and shape, for ranks to compare."""
    return _name(tensor.dtype), tuple(tensor.shape)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy dtype; for dtypes that are only moved, one of as many bytes."""
    name = _name(dtype)
    if name == "bfloat16":
        return named_dtype("bfloat16")
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(f"V{torch.empty(0, dtype=dtype).element_size()}")
