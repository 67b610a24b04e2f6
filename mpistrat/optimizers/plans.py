"""What is equal in all steps on the same variables, found once: a training loop repeats one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.comm.packing import describe
from mpistrat.optimizers.gradients import names_spelt
from mpistrat.optimizers.host_pass import UpdateAll, update_of_all
from mpistrat.optimizers.rule import Rule, Target
from mpistrat.variables import Variable

__all__ = ["Plan", "Plans"]

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
        self._names = names_spelt(tuple([variable.name for variable in variables]))
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
