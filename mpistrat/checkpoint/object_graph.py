"""Object graph of a checkpoint: the objects that hold state, their paths, and their strategy.

Attribute names and dict keys are joined by ``/``, list items have their index as name:
``model/layers/0/kernel``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array, Device, host_view, is_array, namespace_of
from mpistrat.checkpoint.format import check_path
from mpistrat.checkpoint.state_json import SplitState, split_state
from mpistrat.checkpoint.torch_hook import TensorState, tensor_state, world_strategy
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import ContextError
from mpistrat.trackable import Dependent, Reach, Trackable, has_attributes, walk_objects
from mpistrat.variables import Variable


def state_adapter(value: object) -> Any:
    """Return an adapter for a random generator or an object of PyTorch, ``None`` for others."""
    if isinstance(value, np.random.Generator):
        return GeneratorState(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return RandomStateState(value)
    bits = getattr(value, "bit_generator", None)
    if type(value).__module__.startswith("cupy") and is_array(getattr(bits, "_state", None)):
        return DeviceGeneratorState(bits)
    return tensor_state(value)


class GeneratorState:
    """Returns and sets the state of any kind of `numpy.random.BitGenerator`."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def __repr__(self) -> str:
        return f"Generator({type(self._bits).__name__})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bit generator, in JSON values."""
        state: dict[str, Any] = _as_json(self._bits.state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of the bit generator."""
        self._bits.state = state


class RandomStateState:
    """Returns and sets the state of a `numpy.random.RandomState`."""

    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in JSON values."""
        state: dict[str, Any] = _as_json(self._generator.get_state(legacy=False))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state."""
        self._generator.set_state(state)


class DeviceGeneratorState:
    """Returns and sets the state of a bit generator of CuPy, which is an array on the device.

    It fits only a generator that was created with the same number of threads.
    """

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the bit generator, and the bytes of its state."""
        state: Array = self._bits._state
        return {"bit_generator": type(self._bits).__name__, "state": host_view(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state in place."""
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


PlacedSlot = tuple[str, Dependent]
"""A dependent child, preceded by the path of the object that keeps it."""


def slot_paths(
    dependents: Iterable[PlacedSlot], variables: Mapping[str, Any]
) -> tuple[dict[str, PlacedSlot], dict[str, PlacedSlot]]:
    """Return `dependents` by path, and the subset whose variable is in no checkpoint. Local.

    A path of the subset contains the variable's name in place of its path.
    """
    paths = {id(variable): path for path, variable in reversed(list(variables.items()))}
    found: dict[str, PlacedSlot] = {}
    outside: dict[str, PlacedSlot] = {}
    for prefix, dependent in dependents:
        of: Any = dependent.of
        below = paths.get(id(of))
        if below is None:
            below = part_of_name(of.name)
        path = "/".join(part for part in (prefix, dependent.name, below) if part)
        if path in found:
            raise ValueError(
                f"Two objects have the path {path!r} in the checkpoint, because they belong to "
                f"variables called {of.name!r} that are not in it themselves. Add these variables "
                "to the checkpoint, or give each its own name."
            )
        found[path] = prefix, dependent
        if id(of) not in paths:
            outside[path] = prefix, dependent
    return found, outside


def part_of_name(name: str) -> str:
    """Return the name of a variable as one part of a path: percent-encoded as in URLs. Local.

    ``dense/kernel`` is ``dense%2Fkernel``, so that a file can hold both a variable ``dense`` and a
    variable ``dense/kernel``. `urllib.parse.unquote` decodes a name.
    """
    # "%" first, or the "%" of the other two would be encoded again.
    part = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    # HDF5 has no name for these two.
    return {"": "%", ".": "%2E"}.get(part, part)


@runtime_checkable
class Stateful(Protocol):
    """An object that returns and sets its own state, of arrays and JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Set a state that `state_dict` returned."""


def split_object(stateful: Stateful, path: str) -> SplitState:
    """Return the state of an object as JSON and arrays. Local."""
    return split_state(stateful.state_dict(), path, isinstance(stateful, TensorState))


@dataclass
class Tree:
    """The objects that a walk has found, by path."""

    variables: dict[str, Variable] = field(default_factory=dict)
    stateful: dict[str, Stateful] = field(default_factory=dict)
    trackables: dict[str, Trackable] = field(default_factory=dict)
    """Objects that may get children later."""
    empty: list[str] = field(default_factory=list)
    """Plain objects without any state below them."""
    outside: dict[str, PlacedSlot] = field(default_factory=dict)
    """Children of variables that are not in the tree. Their paths contain the variables' names."""

    def paths(self) -> list[str]:
        """Return the paths of all variables and stateful objects."""
        return [*self.variables, *self.stateful]


def walk(
    objects: Mapping[str, object],
    prefix: str = "",
    dependents: Sequence[PlacedSlot] = (),
    known: Mapping[str, Variable] | None = None,
) -> Tree:
    """Return the state below `objects`, whose names follow `prefix`. Local.

    The walk finds variables, trackables, generators and objects with ``state_dict()`` in dicts,
    lists, tuples and deques, and in the attributes of other objects. It skips all other attributes.
    """
    walker = _Walker()
    for name, child in objects.items():
        walker.visit(f"{prefix}/{name}" if prefix else name, child)
    walker.take_in([*dependents, *walker.dependents], known or {})
    check_disjoint(walker.tree.paths())
    return walker.tree


def tree_of(root: Trackable) -> Tree:
    """Return the state below `root`, as `walk` does."""
    return walk(root._checkpoint_children())


def check_can_hold_state(path: str, child: object) -> None:
    """Raise for an object that a checkpoint can never save or fill."""
    if (
        _has_own_state(child)
        or isinstance(child, dict | list | tuple | deque)
        or has_attributes(child)
    ):
        return
    raise TypeError(
        f"A checkpoint cannot save {path!r}, a {type(child).__name__}: it takes variables, "
        "optimizers, metrics, datasets, random generators, PyTorch's modules, and dicts and lists "
        "of them. Wrap a number or an array as ms.Variable(...), or pass an object with "
        "state_dict() and load_state_dict() that holds it."
    )


def _has_own_state(child: object) -> bool:
    if isinstance(child, type):
        return False
    if isinstance(child, Variable | Trackable | Stateful):
        return True
    is_container = isinstance(child, dict | list | tuple | deque)
    return not is_container and state_adapter(child) is not None


def _is_leaf(child: object) -> bool:
    if isinstance(child, Variable):  # most are variables, and the rest takes longer
        return True
    return not isinstance(child, Trackable) and _has_own_state(child)


class _Walker:
    def __init__(self) -> None:
        self.tree = Tree()
        self.dependents: list[PlacedSlot] = []

    def take_in(self, dependents: Sequence[PlacedSlot], known: Mapping[str, Variable]) -> None:
        """Visit children that belong to variables, once the paths of these variables are known."""
        found, self.tree.outside = slot_paths(dependents, {**known, **self.tree.variables})
        for path, (_, dependent) in found.items():
            self.visit(path, dependent.child)

    def visit(self, path: str, child: object) -> None:
        """Add `child` and everything below it."""
        plain: list[str] = []
        for place, thing, reach in walk_objects(path, child, _is_leaf):
            must_hold_state = reach is not Reach.ATTRIBUTE
            if isinstance(thing, Variable):
                self.add(self.tree.variables, place, thing)
            elif isinstance(thing, Trackable):
                self.tree.trackables[place] = thing
                self.dependents += [(place, each) for each in thing._checkpoint_dependents()]
            elif _has_own_state(thing):
                self.add(self.tree.stateful, place, state_adapter(thing) or thing)
            elif must_hold_state:
                check_can_hold_state(place, thing)
                if not isinstance(thing, dict | list | tuple | deque):
                    plain.append(place)
        if plain:
            paths = self.tree.paths()
            self.tree.empty += [
                each for each in plain if not any(path.startswith(f"{each}/") for path in paths)
            ]

    def add(self, found: dict[str, Any], path: str, child: object) -> None:
        check_path(path)
        if path in self.tree.variables or path in self.tree.stateful:
            raise ValueError(
                f"Two objects have the path {path!r} in the checkpoint. Rename one of them."
            )
        found[path] = child


def check_disjoint(paths: list[str]) -> None:
    """Raise if a path would be a dataset and a group at once."""
    known = set(paths)
    for path in paths:
        parts = path.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if above in known:
                raise ValueError(
                    f"{above!r} and {path!r} cannot both be saved: the first would be a file "
                    "entry and a folder at once. Rename one of them."
                )


def collectives_for(tree: Tree, what: str) -> Collectives:
    """Return the collectives of the strategy of the objects in `tree`. Local.

    If the objects have no strategy, return the collectives of the current strategy; else of the
    process group of an `mpistrat.torch.HDF5Dataset` among the objects; else of PyTorch's group of
    all ranks; else, for objects other than variables, of the only open strategy on several ranks;
    else of one process without MPI.
    """
    strategy = strategy_of(tree, what)
    if strategy is None:
        return Collectives.solo(Device("cpu"))
    strategy.extended._check_may_save(what)
    kind = context.mode_for(strategy, what)
    if kind is not context.Kind.CROSS_REPLICA:
        raise ContextError(
            f"{what} needs the cross-replica context, but this is the {kind.value} of "
            f"{strategy!r}. Call it outside strategy.run, or inside merge_call."
        )
    return context.collectives_of(strategy)


def strategy_of(tree: Tree, what: str) -> Any:
    """Return the strategy of the objects in `tree`, chosen as in `collectives_for`, or ``None``."""
    groups: tuple[dict[str, Any], ...] = (tree.variables, tree.stateful, tree.trackables)
    strategy = _common_strategy([each for group in groups for each in group.values()], what)
    if strategy is not None:
        return strategy
    frame = context.current()
    if frame is not None and _distributes(frame.strategy):
        return frame.strategy
    states = [each for each in tree.stateful.values() if isinstance(each, TensorState)]
    strategy = _common_strategy([each.target for each in states], what) or world_strategy()
    if strategy is None and not tree.variables and (tree.stateful or tree.trackables):
        strategy = context.only_open_strategy()
    return strategy


def _common_strategy(objects: Iterable[Any], what: str) -> Any:
    """Return the strategy of `objects`, ``None`` if they have none, or raise for several."""
    found: dict[int, Any] = {}
    for each in objects:
        strategy = getattr(each, "strategy", None)
        if _distributes(strategy):
            found[id(strategy)] = strategy
    if len(found) > 1:
        raise ContextError(
            f"{what}: the objects belong to several strategies, "
            f"{', '.join(map(repr, found.values()))}. Use one checkpoint for each."
        )
    return next(iter(found.values()), None)


def _distributes(strategy: Any) -> bool:
    return bool(getattr(getattr(strategy, "extended", None), "_distributes_variables", False))
