"""Slots of variables: the momenta and other variables that an optimizer keeps for each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mpistrat import context
from mpistrat.optimizers.update import Target, slot_dtype
from mpistrat.strategies.one_replica import default_strategy
from mpistrat.system import units
from mpistrat.variables import (
    MirroredVariable,
    Variable,
)
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.placement import Whole
from mpistrat.variables.variable import own_storage_of, placement_of


@dataclass
class _Entry:
    variable: Variable
    """Kept alive, so that its id is not reused."""
    slots: dict[str, Variable] = field(default_factory=dict)
    targets: dict[tuple[str, ...], Target] = field(default_factory=dict)
    """Targets by the names of the requested slots. A copy has its own memory."""

    def forget(self, name: str) -> None:
        """Remove the slot `name`."""
        del self.slots[name]
        self.targets.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entry:
        return _Entry(copy.deepcopy(self.variable, memo), copy.deepcopy(self.slots, memo))


class Slots:
    """Finds slots by variable and name."""

    # A deep copy belongs to the copies of the variables. So a model that is copied together with
    # its optimizer keeps its momenta.

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        twin = memo[id(self)] = Slots()
        for entry in self._entries.values():
            copied = copy.deepcopy(entry, memo)
            twin._entries[id(copied.variable)] = copied
        return twin

    def find(self, variable: Variable, name: str) -> Variable | None:
        """Return the slot `name` of `variable`, ``None`` if it does not exist."""
        entry = self._entries.get(id(variable))
        return None if entry is None else entry.slots.get(name)

    def target(self, variable: Variable, names: tuple[str, ...]) -> Target:
        """Return the memory of `variable` and of its slots `names`, which must exist."""
        entry = self._entries.setdefault(id(variable), _Entry(variable))
        weight, slots = own_storage_of(variable), [entry.slots[name] for name in names]
        if slots and slots[0]._is_sharded and not placement_of(variable).is_divided:
            # Every rank holds the whole weight but only a part of each slot. A rule needs the same
            # elements of both.
            weight = placement_of(slots[0]).own(weight)
        target = entry.targets[names] = Target(weight, [own_storage_of(slot) for slot in slots])
        return target

    def placement(self, variable: Variable, names: Iterable[str]) -> Whole:
        """Return the placement that says which part of `variable` this rank updates.

        `names` are the slots that the update needs. Missing slots are ignored.
        """
        found = [self.find(variable, name) for name in names]
        for each in (variable, *found):
            if each is not None and placement_of(each).ranges is not None:
                return placement_of(each)
        return placement_of(variable)

    def are_divided(self, variable: Variable, names: Iterable[str], is_sharded: bool) -> bool:
        """Return whether an update of `variable` by the slots `names` is divided over ranks.

        Slots that do not exist yet count as if `zero_slot` had created them.
        """
        if placement_of(variable).is_divided:
            return True
        found = [self.find(variable, name) for name in names]
        return any(
            _is_divided_slot(variable, is_sharded)
            if slot is None
            else placement_of(slot).ranges is not None
            for slot in found
        )

    def known_target(self, variable: Variable, names: tuple[str, ...]) -> Target | None:
        """Return the earlier result of `target`, ``None`` if there is none."""
        entry = self._entries.get(id(variable))
        return None if entry is None else entry.targets.get(names)

    def add(self, variable: Variable, name: str, slot: Variable) -> None:
        """Store `slot` under `variable` and `name`."""
        entry = self._entries.setdefault(id(variable), _Entry(variable))
        entry.slots[name] = slot
        # Known targets may refer to the memory of a slot that this one replaces.
        entry.targets.clear()
        units.on_undo(functools.partial(entry.forget, name))


def check_can_shard_slots(what: str, strategy: Any) -> None:
    """Raise if slots cannot be divided over ranks, because several ranks form one replica."""
    num_ranks = context.layout_of(strategy).ranks_per_replica
    if num_ranks > 1:
        raise NotImplementedError(
            f"{what}: sharded_slots divides slots over replicas of one rank, but a replica of "
            f"{strategy!r} has {num_ranks}. Leave it out: slots of split variables are split too."
        )


def _is_divided_slot(variable: Variable, is_sharded: bool) -> bool:
    """Return whether `zero_slot` divides the slots of `variable` over ranks."""
    # The slots of a central variable are already shared.
    is_mirrored = isinstance(variable, MirroredVariable)
    return is_sharded and is_mirrored and not placement_of(variable).is_divided


def zero_slot(variable: Variable, name: str, is_sharded: bool = False) -> Variable:
    """Return a new slot of zeros, placed like `variable`; float32 for 16-bit variables."""
    # **Collective** for the variable of a strategy. `is_sharded` divides the slot of a mirrored
    # variable over the ranks.
    owner = default_strategy() if variable.strategy is None else variable.strategy
    name, dtype = f"{variable.name}/{name}", slot_dtype(variable.dtype)
    # In replica context `Variable` would wait for all replicas of this rank, but here one of them
    # works for all while the others wait for it.
    with context.entered(context.Frame(context.Kind.CROSS_REPLICA, owner)):
        if _is_divided_slot(variable, is_sharded):
            check_can_shard_slots(name, owner)
            zeros = InitialValue.zeros(variable.shape, dtype, 1)
            zeros.is_flat = True
            return Variable(zeros, trainable=False, name=name)
        return variable._zeros(name, dtype)
