"""The state of NumPy's random generators as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["GeneratorState"]


class GeneratorState:
    """Gives and takes the state of a `numpy.random.Generator`, whatever its bit generator."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bit generator, in JSON values. Local."""
        state: dict[str, Any] = _as_json(self._generator.bit_generator.state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of the bit generator. Local.

        Raises
        ------
        ValueError
            If it is the state of another bit generator.
        """
        self._generator.bit_generator.state = state


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
