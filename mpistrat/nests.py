"""Nests: arrays and other leaves inside dicts, lists, tuples, namedtuples and dataclasses.

optree does the work. In addition, dataclasses are containers without an explicit registration,
and ``None`` is a leaf, so that it keeps its position. Dicts match by key.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import optree

_T = TypeVar("_T")

_NAMESPACE = "mpistrat"
_OWN_COPIES = {f"__{name}__" for name in ("new", "copy", "reduce", "reduce_ex", "slots")} | {
    f"__{name}__" for name in ("getstate", "setstate", "getattribute")
}
"""Names with which a class can define how its instances are copied."""
_DICTS_OF_OPTREE = (dict, OrderedDict, defaultdict)
_known_types: set[type] = set()
_registering = threading.Lock()

Structure = optree.PyTreeSpec

_COMMON_LEAVES = {np.ndarray, float, int, bool, type(None), np.float32, np.float64, np.int64}
"""Types of nests that are known to be a single leaf."""
_LEAF = optree.treespec_leaf(none_is_leaf=True, namespace=_NAMESPACE)
_MOST_FLAT = 2048
"""The longest list whose structure is kept: it takes 72 bytes for each leaf."""


def leaf_type(cls: type[_T]) -> type[_T]:
    """Class decorator: instances of the dataclass `cls` are leaves, not containers."""
    _known_types.add(cls)
    return cls


class _Original:
    """An emptied instance from which a container is rebuilt. Those of the same class are equal."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Original) and type(other.instance) is type(self.instance)

    def __hash__(self) -> int:
        return hash(type(self.instance))

    def __repr__(self) -> str:
        return type(self.instance).__qualname__


def _filled(instance: Any, names: tuple[str, ...], values: Iterable[Any]) -> Any:
    # The copy is filled without __init__, which may check or compute fields.
    twin = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        # The normal setattr fails for frozen dataclasses.
        object.__setattr__(twin, name, value)
    return twin


def _register_dataclass(cls: type) -> None:
    names = tuple(field.name for field in dataclasses.fields(cls))
    # A shared original for instances with only their fields, if the class is copied as usual.
    plain = _Original(object.__new__(cls)) if _is_copied_as_usual(cls) else None
    fields = set(names)

    def take_apart(instance: Any) -> tuple[tuple[Any, ...], _Original, tuple[str, ...]]:
        if plain is not None and (held := vars(instance)).keys() == fields:
            return tuple([held[name] for name in names]), plain, names
        # Structures are used as cache keys, so they must not keep arrays alive.
        emptied = _Original(_filled(instance, names, [None] * len(names)))
        return tuple(getattr(instance, name) for name in names), emptied, names

    def rebuild(original: Any, children: Iterable[Any]) -> Any:
        if original is plain:
            twin: Any = object.__new__(cls)
            vars(twin).update(zip(names, children, strict=True))
            return twin
        return _filled(original.instance, names, children)

    optree.register_pytree_node(cls, take_apart, rebuild, namespace=_NAMESPACE)


def _is_copied_as_usual(cls: type) -> bool:
    """Return whether a copy of an instance is a new instance with the same ``__dict__``."""
    own = {name for each in cls.__mro__[:-1] for name in vars(each)}
    return "__dict__" in own and own.isdisjoint(_OWN_COPIES)


def _register_dict(cls: type) -> None:
    def take_apart(instance: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        # Ranks may have filled the dict in different orders. Without sorting they would reduce the
        # leaves of different keys with each other.
        keys = tuple(sorted(instance, key=_format_key))
        emptied = copy.copy(instance)
        dict.update(emptied, dict.fromkeys(keys))
        return tuple(instance[key] for key in keys), (_Original(emptied), keys), keys

    def rebuild(original_and_keys: Any, children: Iterable[Any]) -> Any:
        original, keys = original_and_keys
        twin = copy.copy(original.instance)
        # The subclass may define update with a different meaning, like Counter.
        dict.update(twin, zip(keys, children, strict=True))
        return twin

    optree.register_pytree_node(cls, take_apart, rebuild, namespace=_NAMESPACE)


def _register_on_sight(node: Any) -> bool:
    """Register a dataclass or dict subclass with optree when its first instance is seen."""
    cls = type(node)
    if cls not in _known_types:
        _register(cls)
    return False


def _register(cls: type) -> bool:
    """Register `cls`; return whether its instances are containers from now on."""
    # optree raises if a class is registered twice, and two threads may see a new class at once.
    with _registering:
        is_dict = issubclass(cls, dict) and cls not in _DICTS_OF_OPTREE
        is_container = dataclasses.is_dataclass(cls) or is_dict
        if cls not in _known_types and is_container:
            (_register_dataclass if dataclasses.is_dataclass(cls) else _register_dict)(cls)
        _known_types.add(cls)
    return is_container


def flatten(nest: Any, atoms: tuple[type, ...] = ()) -> tuple[list[Any], Structure]:
    """Return the leaves of `nest` and its structure; containers of types `atoms` are leaves."""
    if type(nest) in _COMMON_LEAVES:
        return [nest], _LEAF
    # Optree takes several times as long for this, the most frequent nest.
    if may_be_flat(nest) and not atoms and _COMMON_LEAVES.issuperset(map(type, nest)):
        return list(nest), _flat_structure(type(nest) is list, len(nest))

    is_leaf = None if not atoms else lambda node: isinstance(node, atoms)
    # Registering one class may reveal further ones inside it.
    while True:
        leaves, structure = optree.tree_flatten(
            nest, is_leaf=is_leaf, none_is_leaf=True, namespace=_NAMESPACE
        )
        # Containers that optree does not know yet are among the leaves. One check per type is
        # cheaper than letting optree call a function for each node.
        unknown = set(map(type, leaves)) - _known_types
        if not any(_register(cls) for cls in unknown):
            return leaves, structure


def may_be_flat(nest: Any) -> bool:
    """Return whether `nest` is a list or a tuple, not too long for `signature_of_flat`."""
    kind = type(nest)
    return (kind is list or kind is tuple) and len(nest) <= _MOST_FLAT


@functools.lru_cache(maxsize=128)
def _flat_structure(is_list: bool, length: int) -> Structure:
    """Return the structure of a list or tuple that holds only leaves."""
    nest: Any = (list if is_list else tuple)(range(length))
    return optree.tree_structure(nest, none_is_leaf=True, namespace=_NAMESPACE)


def flatten_with_paths(nest: Any) -> tuple[list[str], list[Any], Structure]:
    """Return the paths (``"layers/0/kernel"``), the leaves and the structure of `nest`."""
    paths, leaves, structure = optree.tree_flatten_with_path(
        nest, is_leaf=_register_on_sight, none_is_leaf=True, namespace=_NAMESPACE
    )
    return list(map(_format_path, paths)), leaves, structure


def paths_of(structure: Structure) -> list[str]:
    """Return the paths of the leaves of `structure`, like `flatten_with_paths`."""
    return list(map(_format_path, optree.treespec_paths(structure)))


def _format_path(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return the nest of the given structure that holds `leaves`."""
    if structure is _LEAF:
        (leaf,) = leaves
        return leaf
    return optree.tree_unflatten(structure, leaves)


def map_nest(fn: Callable[[Any], Any], nest: Any, atoms: tuple[type, ...] = ()) -> Any:
    """Return `nest` with `fn` applied to each leaf; `atoms` as for `flatten`."""
    if type(nest) in _COMMON_LEAVES:
        return fn(nest)
    leaves, structure = flatten(nest, atoms)
    return unflatten(structure, [fn(leaf) for leaf in leaves])


@functools.lru_cache(maxsize=4096)
def signature(structure: Structure) -> str:
    """Return a string for `structure`, the same on all ranks, with ``*`` for a leaf."""
    # Dicts are formatted in the order of their keys, however they were filled. Keys that cannot be
    # sorted keep their order, because it is the order of the leaves.
    if structure.is_leaf():
        return "*"
    children = [signature(child) for child in structure.children()]
    kind: Any = structure.type
    if kind is list:
        return f"[{', '.join(children)}]"
    if kind is tuple:
        return f"({', '.join(children)})"
    keys = [_format_key(key) for key in structure.entries()]
    inside = ", ".join(f"{key}: {child}" for key, child in zip(keys, children, strict=True))
    return f"{'' if kind is dict else kind.__qualname__}{{{inside}}}"


@functools.lru_cache(maxsize=128)
def signature_of_flat(is_list: bool, length: int) -> str:
    """Return the `signature` of a list or tuple that holds only leaves."""
    return signature(_flat_structure(is_list, length))


def _format_key(key: Any) -> str:
    """Return a string for a dict's key, equal in all processes, and equal for equal keys."""
    # `signature` caches strings by structure, and structures with equal keys are equal. Otherwise,
    # for 1, 1.0 and True, the string would depend on which of them a rank saw first.
    if isinstance(key, str):
        return repr(str.__str__(key))
    if isinstance(key, bool | int | float | np.bool | np.integer | np.floating):
        return repr(int(key)) if key == key // 1 else repr(float(key))
    if type(key) is tuple:
        return f"({', '.join(map(_format_key, key))})"
    if isinstance(key, enum.Enum):
        return str(key)
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted(map(_format_key, key)))}}}"
    text = repr(key)
    return type(key).__qualname__ if " at 0x" in text else text
