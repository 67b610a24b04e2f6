"""Register of storages: which variable an array is a view of."""

from __future__ import annotations

import weakref
from typing import Any

from mpistrat.arrays import Array
from mpistrat.values import container_of_component

__all__ = ["container_of", "register_storage"]

_by_storage: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _memory_of(storage: Array) -> Any:
    """Return what views of `storage` have as their base."""
    return storage if storage.base is None else storage.base


def register_storage(storage: Array, variable: Any) -> None:
    """Have `container_of` return `variable` for views of its `storage`."""
    _by_storage[id(_memory_of(storage))] = variable


def container_of(value: Any) -> Any:
    """Return the variable or distributed value that `value` is a component of, or `value`."""
    storage = getattr(value, "base", None)
    variable = _by_storage.get(id(storage)) if storage is not None else None
    return container_of_component(value) if variable is None else variable
