"""What is equal in all steps on the same variables, found once: a training loop repeats one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat import context
from mpistrat.comm.packing import describe
from mpistrat.optimizers.gradients import names_signature
from mpistrat.optimizers.update import Rule, Target, UpdateAll, slot_dtype, update_of_all
from mpistrat.strategies.one_replica import default_strategy
from mpistrat.variables import Variable

__all__ = ["Plan", "Plans", "Slots", "zero_slot"]


@dataclass
class _Entry:
    variable: Variable
    """Kept, so that its id is not given to another one."""
    slots: dict[str, Variable] = field(default_factory=dict)
    targets: dict[tuple[str, ...], Target] = field(default_factory=dict)
    """By the names of the slots that were asked for. A copy has memory of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entry:
        return _Entry(copy.deepcopy(self.variable, memo), copy.deepcopy(self.slots, memo))


class Slots:
    """Finds slots by variable and name.

    A deep copy belongs to the copies of the variables, so a model that is copied together with
    its optimizer keeps its momenta.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        twin = memo[id(self)] = Slots()
        for entry in self._entries.values():
            copied = copy.deepcopy(entry, memo)
            twin._entries[id(copied.variable)] = copied
        return twin

    def find(self, variable: Variable, name: str) -> Variable | None:
        """Return the slot `name` of `variable`, ``None`` where there is none. Local."""
        entry = self._entries.get(id(variable))
        return None if entry is None else entry.slots.get(name)

    def target(self, variable: Variable, names: tuple[str, ...]) -> Target:
        """Return the memory of `variable` and of its slots `names`, which exist. Local."""
        entry = self._entries.setdefault(id(variable), _Entry(variable))
        slots = [entry.slots[name].storage for name in names]
        target = entry.targets[names] = Target(variable.storage, slots)
        return target

    def known_target(self, variable: Variable, names: tuple[str, ...]) -> Target | None:
        """Return what `target` has returned before, ``None`` where it has not. Local."""
        entry = self._entries.get(id(variable))
        return None if entry is None else entry.targets.get(names)

    def add(self, variable: Variable, name: str, slot: Variable) -> None:
        """Keep `slot` under `variable` and `name`. Local."""
        self._entries.setdefault(id(variable), _Entry(variable)).slots[name] = slot


def zero_slot(variable: Variable, name: str) -> Variable:
    """Return a new slot: zeros, colocated with `variable`, float32 for the halves.

    **Collective** for the variable of a strategy, **Local** for a plain one.
    """
    owner = default_strategy() if variable.strategy is None else variable.strategy
    with context.entered(context.Frame(context.Kind.CROSS_REPLICA, owner)):
        zeros = np.zeros(variable.shape, slot_dtype(variable.dtype))
        return Variable(zeros, trainable=False, name=f"{variable.name}/{name}")


_MAX_PLANS = 64


class Plan:
    """Steps on variables in host memory by gradients that fit them as they are.

    Parameters
    ----------
    strategy : Strategy
        Of the step. All checks of `variables` in it have passed.
    variables : sequence of Variable
    kinds : bytes
        Dtypes and shapes, as `describe` has them.
    """

    def __init__(self, strategy: Any, variables: Sequence[Variable], kinds: bytes) -> None:
        self._strategy, self._kinds = strategy, kinds
        # Kept, so that their ids are not given to others.
        self.variables = variables
        self._names = names_signature(tuple([variable.name for variable in variables]))
        self._updates: dict[Rule, UpdateAll | None] = {}

    def fits(self, strategy: Any, gradients: list[Any]) -> bool:
        """Return whether a step by these `gradients` needs no further check. Local."""
        return strategy is self._strategy and describe(gradients) == self._kinds

    def spelt(self, words: str) -> tuple[str, str] | str:
        """Return what the ranks compare, as `sum_over_replicas` does it with `words`. Local."""
        return (self._names, words) if words else self._names

    def update(
        self, rule: Rule, targets_of: Callable[[Sequence[Variable]], Sequence[Target]]
    ) -> UpdateAll | None:
        """Return what updates all variables at once, ``None`` where nothing can. Local.

        The first time, `targets_of` is asked for the memory of the variables and their slots.
        """
        if rule not in self._updates:
            self._updates[rule] = update_of_all(rule, targets_of(self.variables))
        return self._updates[rule]


class Plans:
    """The plans of one optimizer, by variables. A copy of the optimizer makes its own."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Plan] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Plans:
        return Plans()

    def find(self, strategy: Any, pairs: Any) -> tuple[Plan | None, list[Any]]:
        """Return the plan for the (gradient, variable) `pairs`, and the gradients. Local.

        ``(None, [])`` for all that is not known or does not fit, also for what are no pairs.
        """
        try:
            gradients, variables = zip(*pairs, strict=True)
        except (TypeError, ValueError):
            return None, []
        plan = self._known.get(tuple(map(id, variables)))
        listed = list(gradients)
        return (plan, listed) if plan and plan.fits(strategy, listed) else (None, [])

    def keep(self, strategy: Any, gradients: list[Any], variables: Sequence[Variable]) -> None:
        """Make a plan for later steps, where one is possible for these. Local.

        Parameters
        ----------
        strategy : Strategy
        gradients : list
            As `check_gradients` returns them for `variables`.
        variables : sequence of Variable
        """
        kinds = describe(gradients)
        if kinds is None or any(type(each.storage) is not np.ndarray for each in variables):
            return
        if len(self._known) >= _MAX_PLANS:
            self._known.clear()
        self._known[tuple(map(id, variables))] = Plan(strategy, variables, kinds)
