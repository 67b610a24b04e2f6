"""Loading of states into their objects, all or none: a failure restores the old ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from mpistrat.checkpoint.tensors import TensorState
from mpistrat.errors import CheckpointMismatchError


class StateLoading:
    """States of the file `path` on their way into `objects`.

    Objects that may refuse their state come first, in `load`, and copies of what they had are kept
    until all ranks have reached this point. The others need no copy; they come in `load_rest`.
    """

    def __init__(
        self,
        path: str,
        objects: Mapping[str, Any],
        state_of: Callable[[str, Any], dict[Any, Any]],
    ) -> None:
        self._path = path
        self._state_of = state_of
        self._loaded: dict[str, tuple[Any, Any]] = {}
        """The objects that have been changed, and their states before."""
        self._rest = {name: each for name, each in objects.items() if not _may_refuse(each)}
        self._objects = {name: each for name, each in objects.items() if name not in self._rest}

    def load(self) -> None:
        """Load what may be refused; where it is, nothing has changed."""
        for name, each in self._objects.items():
            try:
                self._loaded[name] = each, _state_before(each)
                each.load_state_dict(self._state_of(name, each))
            except Exception as reason:
                self.undo(name, reason)
                raise CheckpointMismatchError(
                    f"{self._refusal(name, reason)} Nothing has been restored."
                ) from reason

    def undo(self, refused: str = "", reason: Exception | None = None) -> None:
        """Give back to the objects what they had, because one, `refused`, has raised `reason`."""
        lines = []
        first: Exception | None = None
        while self._loaded:
            name, (each, before) = self._loaded.popitem()
            try:
                each.load_state_dict(before)
            except Exception as error:
                first = first or error
                lines.append(f"  {name!r}: {type(error).__name__}: {error}")
        if lines:
            begin = f"{self._refusal(refused, reason)} " if reason is not None else ""
            raise CheckpointMismatchError(
                f"{begin}Its restore cannot be undone, because objects do not take back the state "
                "that they had:\n" + "\n".join(lines) + "\nThese may hold a part of the old state "
                "and a part of the new one: make them again. All others are as before."
            ) from (reason or first)

    def _refusal(self, name: str, reason: Exception) -> str:
        return (
            f"{name!r} does not accept its state from the checkpoint {self._path}: "
            f"{type(reason).__name__}: {reason}."
        )

    def load_rest(self) -> None:
        """Load what fits and so cannot be refused, and forget what there was before."""
        self._loaded.clear()
        for name, each in self._rest.items():
            try:
                each.load_state_dict(self._state_of(name, each))
            except Exception as reason:
                raise CheckpointMismatchError(
                    f"{self._refusal(name, reason)} It may hold a part of its old state and a part "
                    "of the new one: make it again. Objects with state_dict() have been restored, "
                    "variables have not."
                ) from reason


def _may_refuse(stateful: Any) -> bool:
    return not isinstance(stateful, TensorState) or stateful.may_refuse


def _state_before(stateful: Any) -> Any:
    if isinstance(stateful, TensorState) and stateful.replaces_tensors:
        return stateful.state_dict()
    return copy.deepcopy(stateful.state_dict())
