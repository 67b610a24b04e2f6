"""PyTorch access: the only module that imports it, and only if the program already has."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

Move = Callable[[list[np.ndarray]], list[np.ndarray]]


class PullBack(Protocol):
    """Function from values, results and gradients of the results to gradients of the values."""

    @property
    def needs_values(self) -> bool:
        """Whether it needs the numbers in values and results, or only their shapes and dtypes."""

    def __call__(
        self,
        values: list[np.ndarray],
        results: list[np.ndarray],
        gradients: list[np.ndarray],
    ) -> list[np.ndarray]:
        """Return the gradients of the values. **Collective**."""


def import_torch() -> Any:
    """Return the package `torch`, ``None`` if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


_load_library: list[Callable[[], Any]] = []


def register_tensors(load: Callable[[], Any]) -> None:
    """Register the function that imports the tensor support of checkpoints: `tensor_library`."""
    _load_library[:] = [load]


def tensor_library() -> Any:
    """Return the `mpistrat.checkpoint.torch_hook.TensorLibrary`; PyTorch must be installed."""
    return _load_library[0]()


StateOf = Callable[[object], Any]
"""Returns an adapter for an object with state, ``None`` for others."""

_load_states: dict[str, Callable[[], StateOf]] = {}


def register_states(package: str, load: Callable[[], StateOf]) -> None:
    """Register the function that imports the adapters for classes of a package on PyTorch."""
    _load_states[package] = load


def states_of(packages: Collection[str]) -> StateOf | None:
    """Return the adapters for classes that are from `packages`, ``None`` without any."""
    return next((load() for name, load in _load_states.items() if name in packages), None)


def is_loaded() -> bool:
    """Return whether the program has imported PyTorch."""
    return "torch" in sys.modules


def is_tensor(value: object) -> bool:
    """Return whether `value` is a PyTorch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_bfloat16(tensor: Any) -> bool:
    """Return whether a tensor has the dtype bfloat16, which `host_array` widens."""
    return str(tensor.dtype) == "torch.bfloat16"


def in_modes_of_here(functions: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
    """Return `functions` so that, in any thread, they run in this thread's current PyTorch modes.

    When a function ends, its changes by ``torch.set_grad_enabled`` are reversed.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return functions
    has_gradients = torch.is_grad_enabled()
    # A single function runs in this thread, which already has all other modes.
    modes = _modes_of_here(torch) if len(functions) > 1 else []

    def with_gradients(function: Callable[[], Any]) -> Any:
        before = torch.is_grad_enabled()
        if before is not has_gradients:
            torch.set_grad_enabled(has_gradients)
        try:
            return function()
        finally:
            if torch.is_grad_enabled() is not before:
                torch.set_grad_enabled(before)

    def in_modes(function: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            return with_gradients(function)

    return [functools.partial(in_modes if modes else with_gradients, each) for each in functions]


def _modes_of_here(torch: Any) -> list[Callable[[], Any]]:
    """Return functions that create the modes of this thread, except the gradient mode."""
    modes: list[Callable[[], Any]] = [torch.inference_mode] * torch.is_inference_mode_enabled()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype, caches = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            modes.append(functools.partial(torch.autocast, kind, dtype, cache_enabled=caches))
    # Asking for the default device takes longer than creating an empty tensor, which is there.
    if torch.empty(0).device.type != "cpu":
        device = torch.get_default_device()
        if device.type != "cpu":
            modes.append(lambda: device)
    return modes


_DENSE = "torch.strided"


def needs_graph(tensor: Any) -> bool:
    """Return whether a tensor is part of a graph, or a leaf that gets a gradient."""
    return bool(tensor.requires_grad)


class _HostMemory:
    """The memory of a tensor as NumPy's array interface; keeps the tensor alive."""

    def __init__(self, tensor: Any, type_text: str) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": type_text,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(each * tensor.element_size() for each in tensor.stride()),
        }


def host_array(tensor: Any) -> np.ndarray:
    """Return a tensor's value as a NumPy array, without a copy if it is on the host."""
    # bfloat16 is converted to float32, because NumPy does not have it.
    tensor = as_own_dtype(tensor)
    tensor = _pinned_copy(tensor) if tensor.is_cuda else tensor.cpu()
    type_text = _type_text(tensor.dtype)
    # Tensor.numpy() makes the storage permanently unresizable, but sharded modules resize theirs.
    # So it is called only for tensors without plain memory, for which it raises torch's own error.
    is_plain = type_text and str(tensor.layout) == _DENSE and tensor.numel() and tensor.data_ptr()
    return np.asarray(_HostMemory(tensor, type_text)) if is_plain else tensor.numpy()


def _pinned_copy(tensor: Any) -> Any:
    """Return a copy of a CUDA tensor in page-locked memory, which PyTorch reuses."""
    torch = importlib.import_module("torch")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
        tensor
    )


def as_own_dtype(tensor: Any) -> Any:
    """Return a tensor detached from its graph, in a dtype that NumPy has: bfloat16 as float32."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.float() if is_bfloat16(plain) else plain


@functools.cache
def _type_text(dtype: Any) -> str:
    """Return NumPy's string for a dtype, empty if it has none."""
    try:
        text: str = np.dtype(str(dtype).removeprefix("torch.")).str
    except TypeError:
        return ""
    return text


def overwrite(tensor: Any, array: np.ndarray) -> Any:
    """Write the numbers of `array` to a tensor, on its device, and return it."""
    tensor.detach().copy_(_tensor_like(array, tensor))
    return tensor


def _tensor_like(array: np.ndarray, tensor: Any) -> Any:
    """Return `array` as a tensor on the device of `tensor`; floats get its dtype."""
    torch = importlib.import_module("torch")
    if hasattr(array, "__cuda_array_interface__"):
        result = torch.from_dlpack(array)
    else:
        result = torch.from_numpy(np.asarray(array, order="C"))
    dtype = tensor.dtype if is_bfloat16(tensor) else result.dtype
    return result.to(device=tensor.device, dtype=dtype)


def tensor_of_zeros(shape: Sequence[int], dtype: str, device: str, is_in_graph: bool) -> Any:
    """Return a tensor of zeros; `dtype` is torch's string for the dtype."""
    torch = importlib.import_module("torch")
    kind = getattr(torch, dtype.removeprefix("torch."))
    return torch.zeros(tuple(shape), dtype=kind, device=device, requires_grad=is_in_graph)


def apply_differentiable(
    move: Move, pull_back: PullBack, tensors: Sequence[Any], read: Callable[[Any], Any]
) -> list[Any]:
    """Apply the collective `move` to tensors; the results are part of their graph.

    `read` returns a tensor as an array, on the host or on its device.
    """
    # The backward pass calls `pull_back`. If that is collective, every rank must run the backward
    # pass through the same calls in the same order.
    return list(_function().apply(move, pull_back, read, *tensors))


@functools.lru_cache(maxsize=1)
def _function() -> Any:
    """Return a collective as a node of PyTorch's graph: a `torch.autograd.Function`."""
    autograd = importlib.import_module("torch").autograd
    methods = {
        "forward": staticmethod(_forward),
        "backward": staticmethod(autograd.function.once_differentiable(_backward)),
    }
    return type("CollectiveFunction", (autograd.Function,), methods)


def _forward(
    ctx: Any, move: Move, pull_back: PullBack, read: Callable[[Any], Any], *tensors: Any
) -> Any:
    moved = move([read(each) for each in tensors])
    results = [_tensor_like(a, t) for a, t in zip(moved, tensors, strict=True)]
    ctx.floating = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    ctx.mark_non_differentiable(*(each for i, each in enumerate(results) if i not in ctx.floating))
    ctx.pull_back, ctx.read = pull_back, read
    if pull_back.needs_values:
        ctx.save_for_backward(*tensors, *results)
    ctx.shapes = [(tuple(each.shape), each.dtype) for each in (*tensors, *results)]
    return tuple(results)


def _backward(ctx: Any, *gradients: Any) -> Any:
    torch = importlib.import_module("torch")
    num = len(gradients)
    # If only shapes and dtypes matter, one zero represents all elements.
    kept = ctx.saved_tensors or [
        torch.zeros((), dtype=dtype, device="cpu").expand(shape) for shape, dtype in ctx.shapes
    ]
    pulled = ctx.pull_back(
        [ctx.read(kept[i]) for i in ctx.floating],
        [ctx.read(kept[num + i]) for i in ctx.floating],
        [ctx.read(gradients[i]) for i in ctx.floating],
    )
    back: list[Any] = [None] * num
    for i, array in zip(ctx.floating, pulled, strict=True):
        if ctx.needs_input_grad[3 + i]:
            back[i] = _tensor_like(array, gradients[i]).to(ctx.shapes[i][1])
    return (None, None, None, *back)
