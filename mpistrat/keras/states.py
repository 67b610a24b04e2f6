"""States of Keras's objects in checkpoints, under the keys of Keras's own ``save_weights``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import torch
from keras.src.saving import saving_lib

from mpistrat.checkpoint.torch_hook import TensorState
from mpistrat.sharding import Box
from mpistrat.torch.states import as_part, differences_of_keys
from mpistrat.torch.stored import box_of


def state_of(value: object) -> TensorState | None:
    """Return an adapter for an object of Keras with state, ``None`` for others. Local."""
    if not isinstance(value, keras.Layer | keras.optimizers.Optimizer | keras.Metric):
        return _VariableState(value) if isinstance(value, keras.Variable) else None
    if isinstance(value, keras.Layer):
        optimizer = getattr(value, "optimizer", None)
        # Its own variables exist only then, and it does not know the model.
        if value.built and optimizer is not None and not optimizer.built:
            optimizer.build(value.trainable_variables)
        return _LayerState(value)
    return _MetricState(value) if isinstance(value, keras.Metric) else _OptimizerState(value)


class _KerasState(TensorState):
    """The variables of an object, by key."""

    is_mirrored = True

    def _values(self) -> dict[str, Any]:
        """Return the variables, or arrays, by key."""
        raise NotImplementedError

    def _load(self, state: dict[str, Any]) -> None:
        """Set the variables from tensors."""
        for key, variable in self._values().items():
            variable.assign(state[key])

    @property
    def may_refuse(self) -> bool:
        """Whether code outside of Keras takes part in loading a state."""
        return not type(self.target).__module__.startswith("keras.")

    def state_dict(self) -> dict[Any, Any]:
        """Return the values by key."""
        return {key: _as_tensor(value) for key, value in self._values().items()}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Set the values; of a sharded variable, this rank's part."""
        own = self.state_dict()
        with torch.no_grad():
            self._load({key: as_part(value, own.get(key)) for key, value in state.items()})

    def differences(self, path: str, state: dict[Any, Any]) -> Iterator[str]:
        """Yield the keys, shapes and dtypes that differ."""
        yield from differences_of_keys(path, state, self.state_dict())

    def shards(self, state: dict[Any, Any]) -> Iterator[tuple[Any, Box | None]]:
        """Yield each tensor, and the part of it that this rank has."""
        own = self.state_dict()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield value, box_of(own.get(key), value)


def _as_tensor(value: Any) -> Any:
    return value.value.detach() if isinstance(value, keras.Variable) else value


class _VariableState(_KerasState):
    """A single variable."""

    def _values(self) -> dict[str, Any]:
        return {"value": self.target}


class _OptimizerState(_KerasState):
    """The variables of an optimizer, by their numbers."""

    def _values(self) -> dict[str, Any]:
        if not self.target.built:
            raise ValueError(
                f"This {type(self.target).__name__} has no variables yet. Pass the checkpoint the "
                "compiled model too, or call optimizer.build(model.trainable_variables) first."
            )
        return {f"vars/{number}": each for number, each in enumerate(self.target.variables)}


class _MetricState(_KerasState):
    """The variables of a metric. Each rank has its own, so they must be equal to be saved."""

    is_mirrored = False

    def _values(self) -> dict[str, Any]:
        return {f"vars/{number}": each for number, each in enumerate(self.target.variables)}


class _LayerState(_KerasState):
    """The weights of a layer or a model, without its optimizer, metrics and losses."""

    def mirrored_keys(self, keys: Iterable[str]) -> set[str]:
        """Return the keys of trainable variables: moving statistics normally differ."""
        values = self._values()
        return {key for key in keys if getattr(values.get(key), "trainable", False)}

    @property
    def may_refuse(self) -> bool:
        """Whether code outside of Keras takes part in loading a state."""
        layers = self.target._flatten_layers()
        return not all(type(each).__module__.startswith("keras.") for each in layers)

    def _values(self) -> dict[str, Any]:
        if not self.target.built:
            raise ValueError(
                f"This {type(self.target).__name__} has no variables yet, because the shape of "
                "its input is unknown. Begin it with keras.Input(shape), or call build(shape)."
            )
        groups = _Groups({})
        saving_lib._save_state(self.target, groups, None, "", self._left_out())
        return {
            "/".join([*filter(None, [path]), "vars", name]): value
            for path, group in groups.by_path.items()
            for name, value in group.items()
        }

    def _load(self, state: dict[str, Any]) -> None:
        by_path: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            path, _, name = f"/{key}".rpartition("/vars/")
            by_path.setdefault(path.removeprefix("/"), {})[name] = value
        saving_lib._load_state(
            self.target, _Groups(by_path), None, "", visited_saveables=self._left_out()
        )

    def _left_out(self) -> set[int]:
        """Return the identities of objects that Keras's walk would find below a compiled model."""
        model: Any = self.target
        found = [*model.metrics, *(getattr(model, n, None) for n in ("optimizer", "_compile_loss"))]
        return set(map(id, found))


class _Groups(saving_lib.H5IOStore):
    """The variables of each object, by its path, for Keras's walk in place of a file."""

    def __init__(self, by_path: dict[str, dict[str, Any]]) -> None:
        self.by_path = by_path

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
        """Return a group to which an object adds its variables."""
        return self.by_path.setdefault(path, {})

    def get(self, path: str) -> dict[str, Any]:
        """Return the group of an object, empty if it has no variables."""
        return self.by_path.get(path, {})

    def has_path(self, path: str) -> bool:
        """Return whether there are variables at a path or below."""
        return any(f"{each}/".startswith(f"{path}/") for each in self.by_path)
