"""Tensors as memory that MPI and NumPy use: dtypes, contiguity, the way back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpistrat.comm.wire import named_dtype

__all__ = ["Operand", "described", "is_on_host"]


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
        If the tensor is not a dense one.
    ValueError
        If it does not lie on the host.
    """

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        _check(tensor, kind)
        self._tensor = tensor.detach()
        plain = self._tensor.resolve_conj().resolve_neg().contiguous()
        self.memory = plain
        """The tensor itself, or a contiguous copy."""

    @property
    def array(self) -> np.ndarray:
        """The numbers as an array of the tensor's shape, which lives as long as this operand."""
        # Tensor.numpy() would make the storage of a user's tensor unresizable for good, and
        # sharded modules resize theirs.
        dtype = _numpy_dtype(self.memory.dtype)
        if not self.memory.numel():
            return np.empty(tuple(self.memory.shape), dtype)
        memory: Any = self.buffer
        array: np.ndarray = np.frombuffer(memory, dtype).reshape(tuple(self.memory.shape))
        return array

    @property
    def buffer(self) -> MPI.buffer:
        """The bytes."""
        return MPI.buffer.fromaddress(self.memory.data_ptr(), self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """How many bytes there are."""
        return int(self.memory.numel() * self.memory.element_size())

    def give_back(self) -> None:
        """Copy what was received to the tensor, where that has another memory."""
        if self.memory.data_ptr() != self._tensor.data_ptr() or self.memory.is_conj() != (
            self._tensor.is_conj()
        ):
            self._tensor.copy_(self.memory)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory is that of the CPU."""
    return bool(tensor.device.type == "cpu")


def _check(tensor: torch.Tensor, kind: str) -> None:
    # First the device: a tensor elsewhere has no address that the host may read.
    if not is_on_host(tensor):
        raise ValueError(
            f"{kind}: expected tensors on the CPU, but got one on {tensor.device}. Move it with "
            ".cpu(), or give the tensors of other devices to another backend: "
            'mpistrat.torch.init(backend="cpu:mpistrat,cuda:nccl").'
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise TypeError(
            f"{kind}: expected dense tensors, but got a {what} one of dtype {tensor.dtype}. Send "
            "the tensors that it is made of."
        )


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape, as ranks compare them."""
    return _name(tensor.dtype), tuple(tensor.shape)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the dtype of NumPy, for dtypes that only move that of their bytes."""
    name = _name(dtype)
    if name == "bfloat16":
        return named_dtype("bfloat16")
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(f"V{torch.empty(0, dtype=dtype).element_size()}")
