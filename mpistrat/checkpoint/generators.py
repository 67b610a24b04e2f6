"""The state of random generators of NumPy and CuPy, as JSON and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array, host_view, is_array, namespace_of

__all__ = ["DeviceGeneratorState", "GeneratorState", "RandomStateState", "generator_state"]


def generator_state(value: object) -> Any:
    """Return what gives and takes the state of a generator, ``None`` for other objects. Local."""
    if isinstance(value, np.random.Generator):
        return GeneratorState(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return RandomStateState(value)
    bits = getattr(value, "bit_generator", None)
    if type(value).__module__.startswith("cupy") and is_array(getattr(bits, "_state", None)):
        return DeviceGeneratorState(bits)
    return None


class GeneratorState:
    """Gives and takes the state of a `numpy.random.BitGenerator`, whatever its kind."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bit generator, in JSON values. Local."""
        state: dict[str, Any] = _as_json(self._bits.state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of the bit generator. Local.

        Raises
        ------
        ValueError
            If it is the state of another bit generator.
        """
        self._bits.state = state


class RandomStateState:
    """Gives and takes the state of a `numpy.random.RandomState`."""

    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in JSON values. Local."""
        state: dict[str, Any] = _as_json(self._generator.get_state(legacy=False))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state. Local.

        Raises
        ------
        ValueError
            If it is the state of another bit generator.
        """
        self._generator.set_state(state)


class DeviceGeneratorState:
    """Gives and takes the state of a bit generator of CuPy, which is an array on the device.

    It belongs to the number of threads that the generator was made with.
    """

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the bit generator, and the bytes of its state. Local."""
        state: Array = self._bits._state
        return {"bit_generator": type(self._bits).__name__, "state": host_view(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state in place. Local.

        Raises
        ------
        ValueError
            If it is the state of another bit generator, or of one of another size.
        """
        own, given = self.state_dict(), state["state"]
        if (own["bit_generator"], own["state"].shape) != (state["bit_generator"], given.shape):
            raise ValueError(
                f"state of a {state['bit_generator']} of {given.size} bytes given to a "
                f"{own['bit_generator']} of {own['state'].size}"
            )
        target: Array = self._bits._state
        target[...] = namespace_of(target).asarray(given)


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
