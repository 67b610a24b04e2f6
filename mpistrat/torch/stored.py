"""Tensors as arrays of a file: dtypes, memory, shards, and tensors that cannot be stored."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mpistrat.checkpoint.digests import digest_of_text
from mpistrat.checkpoint.format import BITS_OF_FLOATS
from mpistrat.sharding import Box

_PLAIN = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
_STORED: dict[torch.dtype, np.dtype] = _PLAIN | {
    getattr(torch, name): bits for name, bits in BITS_OF_FLOATS.items() if hasattr(torch, name)
}
"""The dtype in the file for each dtype of tensors that can be saved."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the package."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {name_of(dtype): dtype for dtype in _STORED}


def is_sharded(tensor: object) -> bool:
    """Return whether `tensor` is a DTensor."""
    # A program that has not imported this module has no DTensor, so importing it is unnecessary.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


FSDP1_ADVICE = (
    "use fully_shard of torch.distributed.fsdp, or save what get_state_dict of "
    "torch.distributed.checkpoint.state_dict returns"
)


class StoredTensor:
    """A dense tensor that is being saved: see `mpistrat.checkpoint.torch_hook.TensorArray`."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()
        self.shape = tuple(tensor.shape)
        self.dtype = _STORED[tensor.dtype]
        self.tensor_dtype = name_of(tensor.dtype)
        self.num_ranks, self.is_here = 0, True
        if is_sharded(tensor):
            mesh = tensor.device_mesh
            self.num_ranks, self.is_here = mesh.size(), mesh.get_coordinate() is not None
        self.is_view = (
            not is_sharded(tensor)
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def mesh(self) -> str:
        """The ranks that share its elements, as a string; empty if no rank can write a part."""
        if not is_sharded(self._tensor):
            return ""
        # A partial tensor is a sum over ranks: no rank has any of its elements.
        if any(each.is_partial() for each in self._tensor.placements):
            return ""
        mesh = self._tensor.device_mesh.mesh
        return digest_of_text(repr(mesh.tolist()).encode())

    def shards(self) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield the parts that this rank has, and that no earlier rank of its mesh has."""
        tensor = self._tensor
        place = tensor.device_mesh.get_coordinate()
        if place is None or any(
            each.is_replicate() and at for each, at in zip(tensor.placements, place, strict=True)
        ):
            return
        for box in _boxes_of(tensor):
            yield box, on_host(_shard_at(tensor, box))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the values, as in NumPy's protocol. **Collective** for a DTensor."""
        tensor: Any = self._tensor
        array = on_host(tensor.full_tensor() if is_sharded(tensor) else tensor)
        return np.array(array, dtype) if copy or dtype not in (None, self.dtype) else array


def _boxes_of(tensor: Any) -> list[Box]:
    """Return the parts of a DTensor that this rank has."""
    shape, chunks = tuple(tensor.shape), tensor.__create_chunk_list__()
    return [Box(shape, tuple(each.offsets), tuple(each.sizes)) for each in chunks]


def box_of(own: Any, stored: Any) -> Box | None:
    """Return the part of a `stored` tensor that this rank's `own` holds, ``None`` for all."""
    if not is_sharded(own) or not isinstance(stored, torch.Tensor) or stored.shape != own.shape:
        return None
    if any(each.is_partial() for each in own.placements):
        return None
    if own.device_mesh.get_coordinate() is None:
        nothing = (0,) * len(own.shape)
        return Box(tuple(own.shape), nothing, nothing)
    boxes = _boxes_of(own)
    return boxes[0] if len(boxes) == 1 and boxes[0].sizes == own.to_local().shape else None


class LocalPart:
    """The part of a tensor in a file that this rank needs, in place of the whole."""

    def __init__(self, local: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._local = local
        self._shape = shape

    def as_sharded(self, own: Any) -> Any:
        """Return this part as a DTensor that is distributed like `own`."""
        # run_check would communicate, but this method is local. Without shape and stride,
        # from_local assumes that all shards have the same size.
        return sys.modules["torch.distributed.tensor"].DTensor.from_local(
            self._local.to(own.device_mesh.device_type),
            own.device_mesh,
            own.placements,
            run_check=False,
            shape=torch.Size(self._shape),
            stride=torch.empty(self._shape, device="meta").stride(),
        )


def _shard_at(tensor: Any, box: Box) -> torch.Tensor:
    index = importlib.import_module("torch.distributed.checkpoint.metadata").MetadataIndex
    shard: torch.Tensor = tensor.__get_tensor_shard__(index("", box.offsets))
    return shard


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor in C order, without a copy if the host stores them so."""
    dtype = _STORED[tensor.dtype]
    shape = tuple(tensor.shape)
    return np.asarray(_Memory(tensor, dtype)) if tensor.numel() else np.empty(shape, dtype)


class _Memory:
    """The memory of a tensor with elements, or of a copy on the host in C order.

    A NumPy array of this memory keeps the object alive, and so the memory.
    """

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype) -> None:
        # Tensor.numpy() would make the storage of a user's tensor permanently unresizable.
        self._host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        self.__array_interface__ = {
            "data": (self._host.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": dtype.str,
            "version": 3,
        }


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor of `dtype` from the array that a file stored for it, in the same memory."""
    own = tensor_dtype(array.dtype, dtype)
    if own in _PLAIN:
        return torch.from_numpy(array)
    # NumPy lacks this dtype, so the file stores the bits as integers of the same size.
    return torch.from_numpy(array.view(np.int16 if own.itemsize == 2 else np.uint8)).view(own)


def tensor_dtype(stored: np.dtype, name: str) -> torch.dtype:
    """Return the dtype called `name`, for which the file stored an array of dtype `stored`."""
    dtype = _DTYPES.get(name)
    if dtype is None or _STORED[dtype] != stored:
        raise ValueError(f"an array of {stored} was stored for a tensor of {name}")
    return dtype


def stored_dtype(dtype: torch.dtype) -> np.dtype | None:
    """Return the dtype of tensors of `dtype` in a file, ``None`` if it has no such form."""
    return _STORED.get(dtype)


_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def why_not_stored(tensor: torch.Tensor) -> str:
    """Return why `tensor` cannot be saved, with the remedy, or an empty string."""
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter without a shape (run the module once before it is saved)"
    if type(tensor).__name__ == "FlatParameter":
        return f"a flat parameter of FullyShardedDataParallel ({FSDP1_ADVICE})"
    if tensor.is_nested:
        return "a nested tensor (save .unbind() of it)"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor of layout {tensor.layout} (save .to_dense(), or its parts)"
    if tensor.is_quantized:
        return "a quantized tensor (save .dequantize(), or .int_repr() and the scales)"
    if type(tensor) not in _PLAIN_CLASSES and not is_sharded(tensor):
        return f"a {type(tensor).__name__}, a subclass of Tensor (save the tensors that it has)"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values (restore or initialize it first)"
    if tensor.dtype not in _STORED:
        return f"a tensor of dtype {name_of(tensor.dtype)} (convert it to another dtype)"
    return ""
