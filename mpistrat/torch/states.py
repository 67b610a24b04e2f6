"""States of PyTorch's objects in checkpoints: how they are saved, loaded and checked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpistrat.checkpoint.torch_hook import LoadedShard, TensorState
from mpistrat.mpi.world import running_world
from mpistrat.sharding import Box
from mpistrat.torch.group_strategy import GroupStrategy, strategy_of_group
from mpistrat.torch.stored import (
    FSDP1_ADVICE,
    LocalPart,
    StoredTensor,
    as_tensor,
    box_of,
    is_sharded,
    name_of,
    tensor_dtype,
    why_not_stored,
)


def _distributed_as(tensor: Any, own: Any) -> Any:
    """Return this rank's part of a whole tensor, if the program's `own` is a DTensor."""
    if not is_sharded(own) or is_sharded(tensor) or tensor.shape != own.shape:
        return tensor
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    whole = tensor.to(own.device_mesh.device_type)
    # src_data_rank=None: every rank has the whole tensor and cuts its part, without communication.
    return distribute(whole, own.device_mesh, own.placements, src_data_rank=None)


class TorchTensors:
    """PyTorch for checkpoints: see `mpistrat.checkpoint.torch_hook.TensorLibrary`."""

    def state_of(self, value: object) -> TensorState | None:
        """Return an adapter for an object of PyTorch with state, ``None`` for others."""
        if isinstance(value, torch.nn.Module):
            return _ModuleState(value)
        if isinstance(value, torch.optim.Optimizer):
            return _OptimizerState(value)
        if isinstance(value, torch.Generator):
            return _GeneratorState(value)
        has_both = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        return _OtherState(value) if has_both else None

    def world_strategy(self) -> Any:
        """Return the strategy of the process group of all ranks, ``None`` without one."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        strategy = strategy_of_group()
        # A program whose ranks MPI connects may have groups of other backends too.
        is_of_mpi = not isinstance(strategy, GroupStrategy)
        return strategy if is_of_mpi or running_world() is None else None

    def stored(self, tensor: torch.Tensor) -> StoredTensor:
        """Return `tensor` as a file stores it, or raise TypeError that names its kind."""
        reason = why_not_stored(tensor)
        if reason:
            raise TypeError(reason)
        return StoredTensor(tensor)

    def identity(self, tensor: torch.Tensor) -> Hashable:
        """Return a key that is equal for tied tensors, ``None`` if the tensor cannot be tied."""
        if not tensor.numel():
            return None
        parts: tuple[Any, ...] = ()
        if is_sharded(tensor):
            sharded: Any = tensor
            tensor, parts = sharded.to_local(), (sharded.placements, sharded.device_mesh)
        layout = (tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        # Not its address: on some ranks the part of a DTensor may be empty.
        storage = tensor.untyped_storage()._cdata
        return storage, tensor.device, tensor.dtype, tuple(tensor.shape), *layout, *parts

    def tensor(self, array: np.ndarray | LoadedShard, dtype: str) -> torch.Tensor | LocalPart:
        """Return a tensor of `dtype` from the array that a file stored, in the same memory."""
        if isinstance(array, LoadedShard):
            return LocalPart(as_tensor(array.values, dtype), array.box.shape)
        return as_tensor(array, dtype)

    def blank(self, array: np.ndarray, dtype: str) -> torch.Tensor:
        """Return the same tensor as `tensor`, without memory."""
        return torch.empty(array.shape, dtype=tensor_dtype(array.dtype, dtype), device="meta")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name_of(value.dtype)} of shape {tuple(value.shape)}"
    return f"{value.dtype} of shape {value.shape}" if _is_array(value) else type(value).__name__


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _difference(path: str, stored: Any, own: Any) -> Iterator[str]:
    """Yield a line if an array in the file cannot replace the program's own."""
    if not _is_array(own) or torch.nn.parameter.is_lazy(own):
        return
    if not _is_array(stored) or _described(stored) != _described(own):
        yield f"{path}: {_described(stored)} in the file, {_described(own)} in the program"


def differences_of_keys(
    path: str, state: Mapping[Any, Any], own: Mapping[Any, Any]
) -> Iterator[str]:
    """Yield the keys, shapes and dtypes in which a stored `state` differs from the program's."""
    for key, value in own.items():
        if key not in state:
            yield f"{path}/{key}: missing in the file, {_described(value)} in the program"
        else:
            yield from _difference(f"{path}/{key}", state[key], value)
    for key, value in state.items():
        if key not in own:
            yield f"{path}/{key}: {_described(value)} in the file, missing in the program"


def _unwrapped(module: Any) -> Any:
    """Return the module inside wrappers for data parallelism and compilation."""
    while True:
        if isinstance(
            module, torch.nn.parallel.DistributedDataParallel | torch.nn.parallel.DataParallel
        ):
            module = module.module
        elif type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def _is_of_torch(function: Any) -> bool:
    """Return whether a method or a hook is torch's own."""
    module = getattr(getattr(function, "hook", function), "__module__", None)
    return str(module).partition(".")[0] == "torch"


class _ModuleState(TensorState):
    """The parameters and buffers of a module, under their names in the module without wrappers."""

    is_mirrored = True

    def mirrored_keys(self, keys: Iterable[str]) -> set[str]:
        """Return the keys of parameters: buffers, such as batch statistics, normally differ."""
        # Tied parameters have several names, and each of them is a key of the state.
        named = self.target.named_parameters(remove_duplicate=False)
        return set(keys) & {name for name, _ in named}

    @property
    def may_refuse(self) -> bool:
        """Whether a class or a hook outside of torch takes part in loading a state."""
        own = type(self.target).load_state_dict
        return own is not torch.nn.Module.load_state_dict or not all(
            _is_of_torch(type(each)._load_from_state_dict)
            and type(each).set_extra_state is torch.nn.Module.set_extra_state
            and all(map(_is_of_torch, each._load_state_dict_pre_hooks.values()))
            and all(map(_is_of_torch, each._load_state_dict_post_hooks.values()))
            for each in self.target.modules()
        )

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(_unwrapped(module))

    def state_dict(self) -> dict[Any, Any]:
        """Return the module's state."""
        self._refuse_flat_parameters()
        return dict(self.target.state_dict())

    def _refuse_flat_parameters(self) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return
        for name, each in self.target.named_modules():
            if isinstance(each, fsdp.FullyShardedDataParallel):
                raise TypeError(
                    f"A checkpoint cannot save the FullyShardedDataParallel at {name or '/'!r} of "
                    f"this {type(self.target).__name__}, whose parameters are flat: "
                    f"{FSDP1_ADVICE}."
                )

    def differences(self, path: str, state: dict[Any, Any]) -> Iterator[str]:
        """Yield the keys, shapes and dtypes that differ."""
        yield from differences_of_keys(path, state, self.state_dict())

    def shards(self, state: dict[Any, Any]) -> Iterator[tuple[Any, Box | None]]:
        """Yield each tensor, and the part of it that this rank has."""
        own = self.state_dict()
        for key, value in state.items():
            yield value, box_of(own.get(key), value)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Copy a state into the module; a module on the meta device adopts the tensors."""
        # keep_vars returns the parameters themselves: `_as_parameters` must see which of them are
        # the same object, and which need a gradient.
        own = self.target.state_dict(keep_vars=True)
        state = {key: as_part(value, own.get(key)) for key, value in state.items()}
        is_meta = any(_is_meta(each) for each in (*own.values(), *state.values()))
        if is_meta:
            state = _as_parameters(state, own)
        self.target.load_state_dict(state, assign=is_meta)


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def as_part(value: Any, own: Any) -> Any:
    """Return a value of a file as a tensor, or its part that replaces `own`."""
    if isinstance(value, LocalPart):
        return value.as_sharded(own)
    if isinstance(value, np.ndarray):  # files of other programs may have only arrays
        value = torch.from_numpy(value)
    return _distributed_as(value, own) if isinstance(value, torch.Tensor) else value


def _as_parameters(state: Mapping[Any, Any], own: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a `state` to assign, in which a parameter with several names is one parameter."""
    made: dict[int, Any] = {}
    result = {}
    for key, value in state.items():
        of = own.get(key)
        if not isinstance(of, torch.Tensor) or not isinstance(value, torch.Tensor):
            result[key] = value
            continue
        if id(of) not in made:
            new = value if of.is_meta else value.to(of.device)
            if isinstance(of, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=of.requires_grad)
            made[id(of)] = new
        result[key] = made[id(of)]
    return result


class _OptimizerState(TensorState):
    """The state of an optimizer, by the number of the parameter, and its groups."""

    is_mirrored = True

    @property
    def replaces_tensors(self) -> bool:
        """Whether the program has not changed how optimizers load a state."""
        target = self.target
        return (
            type(target).load_state_dict is torch.optim.Optimizer.load_state_dict
            and not target._optimizer_load_state_dict_pre_hooks
            and not target._optimizer_load_state_dict_post_hooks
        )

    def differences(self, path: str, state: dict[Any, Any]) -> Iterator[str]:
        """Yield the groups whose lengths differ, and the tensors whose shapes or dtypes differ."""
        own = self.state_dict()
        state = _numbered(state)
        stored = [_num_parameters(group) for group in state.get("param_groups", ())]
        groups = [_num_parameters(group) for group in own.get("param_groups", ())]
        if stored != groups:
            yield (
                f"{path}/param_groups: groups of {stored} parameters in the file, of {groups} in "
                "the program"
            )
            return
        of_parameters = state.get("state", {})
        for number, slots in own.get("state", {}).items():
            found = of_parameters.get(number)
            if isinstance(slots, dict) and isinstance(found, dict):
                for name in slots.keys() & found.keys():
                    yield from _difference(
                        f"{path}/state/{number}/{name}", found[name], slots[name]
                    )

    def _parameters(self) -> list[Any]:
        return [each for group in self.target.param_groups for each in group["params"]]

    def shards(self, state: dict[Any, Any]) -> Iterator[tuple[Any, Box | None]]:
        """Yield each slot of a parameter, and the part of it that this rank has."""
        parameters = dict(enumerate(self._parameters()))
        for number, slots in _numbered(state).get("state", {}).items():
            if isinstance(slots, dict):
                for each in slots.values():
                    yield each, box_of(parameters.get(number), each)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Load a state; for DTensors, this rank's part of it."""
        state = _numbered(state)
        slots = dict(state.get("state", {}))
        for number, own in enumerate(self._parameters()):
            if isinstance(slots.get(number), dict):
                slots[number] = {key: as_part(each, own) for key, each in slots[number].items()}
        self.target.load_state_dict({**state, "state": slots})


def _numbered(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return the state of an optimizer by the numbers of parameters, in the order of the groups.

    Files of torch.distributed.checkpoint have names in place of numbers, or numbers as strings.
    """
    groups, slots = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(slots, dict):
        return state
    known: list[Any] = []
    for group in groups:
        known += group.get("params", ()) if isinstance(group, dict) else ()
    numbers = {name: number for number, name in enumerate(known)}
    numbers |= {str(name): number for name, number in numbers.items()}
    return {
        **state,
        "state": {numbers.get(key, key): each for key, each in slots.items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            if isinstance(group, dict) and "params" in group
            else group
            for group in groups
        ],
    }


def _num_parameters(group: Any) -> int:
    return len(group["params"]) if isinstance(group, dict) and "params" in group else 0


class _GeneratorState(TensorState):
    """The state of a `torch.Generator`."""

    def state_dict(self) -> dict[Any, Any]:
        """Return the state, as bytes."""
        return {"state": self.target.get_state()}

    def differences(self, path: str, state: dict[Any, Any]) -> Iterator[str]:
        """Yield a line if the state belongs to a different kind of generator."""
        yield from _difference(f"{path}/state", state.get("state"), self.target.get_state())

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Set the state."""
        self.target.set_state(state["state"])


class _OtherState(TensorState):
    """The state of a scheduler, a scaler or another object of PyTorch."""

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Load a state, with its counters restored as counters."""
        self.target.load_state_dict(_with_counters(state, self.target.state_dict()))


def _with_counters(value: Any, own: Any) -> Any:
    """Return a state in which a dict is a counter if it is one in the program's `own` state."""
    if isinstance(value, dict) and isinstance(own, dict):
        items = {key: _with_counters(item, own.get(key)) for key, item in value.items()}
        return Counter(items) if isinstance(own, Counter) else items
    if isinstance(value, list) and isinstance(own, list) and len(value) == len(own):
        return list(map(_with_counters, value, own))
    return value
