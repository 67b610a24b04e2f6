"""Loss scaling: half-precision gradients kept away from zero and infinity."""

from __future__ import annotations

import math
import warnings

import numpy as np

from mpistrat import context
from mpistrat.arguments import as_finite, as_integer
from mpistrat.options import VariableAggregation
from mpistrat.strategies import get_strategy
from mpistrat.trackable import Trackable
from mpistrat.variables import Variable
from mpistrat.variables.initial import InitialValue


class LossScale(Trackable):
    """Dynamic loss scaling for float16 gradients.

    The program multiplies its loss, and thus the gradients, by `value`. The optimizer that got this
    object divides the gradients by it again. If a summed gradient overflows on any rank, all ranks
    skip the step and the scale shrinks. After `growth_interval` steps without an overflow it grows
    (Micikevicius et al., "Mixed Precision Training", 2018).

    Use one `LossScale` per optimizer. The scale changes with the steps of its optimizer, so a
    second optimizer would divide by a scale that its gradients were not multiplied by.

    **Collective** in a strategy's scope, because it creates variables.

    Parameters
    ----------
    initial_scale : float
        Scale of the first step, at least 1.
    growth_interval : int, optional
        Number of steps without an overflow after which the scale grows. ``None``: it never grows.
    growth_factor : float
        Factor of the growth, greater than 1.
    backoff_factor : float
        Factor after an overflow, in (0, 1). The scale does not shrink below 1.

    Raises
    ------
    TypeError
        If `growth_interval` is not an integer, or a different parameter is not a number.
    ValueError
        For a value out of range.
    CollectiveMismatchError
        If the ranks disagree on a parameter.

    Examples
    --------
    >>> scale = ms.optimizers.LossScale(initial_scale=1024.0)
    >>> sgd = ms.optimizers.SGD(0.1, loss_scale=scale)
    >>> float(scale.value)
    1024.0
    """

    @context.made_in_scope
    def __init__(
        self,
        initial_scale: float = 2.0**15,
        growth_interval: int | None = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
    ) -> None:
        super().__init__()
        self.initial_scale = initial_scale
        self.growth_interval = growth_interval
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        with context.collectives_of(get_strategy()).call("LossScale") as call:
            self._check_parameters()
            call.agree(repr(self))
        self._is_read = True
        self._scale = self._make("scale", np.float64(initial_scale))
        self._num_good = self._make("num_good_steps", np.int64(0))
        self._num_skipped = self._make("num_skipped_steps", np.int64(0))

    def _check_parameters(self) -> None:
        if as_finite("LossScale: initial_scale", self.initial_scale) < 1:
            raise ValueError(f"LossScale: initial_scale is {self.initial_scale}, not at least 1.")
        interval = self.growth_interval
        if interval is not None and as_integer("LossScale: growth_interval", interval) < 1:
            raise ValueError(f"LossScale: growth_interval is {interval}, not at least 1 or None.")
        if as_finite("LossScale: growth_factor", self.growth_factor) <= 1:
            raise ValueError(f"LossScale: growth_factor is {self.growth_factor}, not above 1.")
        if not 0 < as_finite("LossScale: backoff_factor", self.backoff_factor) < 1:
            raise ValueError(f"LossScale: backoff_factor is {self.backoff_factor}, not in (0, 1).")

    def _make(self, name: str, value: np.generic) -> Variable:
        variable = Variable(
            InitialValue.replicated(value),
            trainable=False,
            name=f"loss_scale/{name}",
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self._attach_child(name, variable)
        return variable

    @property
    def value(self) -> float:
        """Factor for the loss of the next step; equal on all ranks. Local.

        Read it in each step: the optimizer warns if it has changed since it was last read.
        """
        self._is_read = True
        return self._current

    @property
    def _current(self) -> float:
        return float(self._scale.values[0])

    def _divisor(self) -> float:
        """Return the number to divide gradients by. Local.

        Warns if the gradients cannot have been multiplied by it, because nobody has read it.
        """
        if not self._is_read:
            warnings.warn(
                f"The loss scale has become {self._current} and has not been read since, so these "
                "gradients were multiplied by a different one. Read LossScale.value for each step, "
                "and give every optimizer its own LossScale.",
                RuntimeWarning,
                stacklevel=4,
            )
        return self._current

    @property
    def num_skipped_steps(self) -> int:
        """Number of steps skipped so far. Local."""
        return int(self._num_skipped.values[0])

    def _adjust(self, is_finite: bool) -> None:
        """Record a step, which was skipped unless `is_finite`. Local, in update context."""
        if not is_finite:
            self._num_skipped.assign_add(1, read_value=False)
            # Each rank changes its own copy, without a message. The copies stay equal, because all
            # ranks have seen the same summed gradients.
            self._change_to(max(1.0, self._current * self.backoff_factor))
        num_good = int(self._num_good.values[0]) + 1 if is_finite else 0
        # A checkpoint from a job with a longer interval may hold more good steps than needed here.
        if self.growth_interval is not None and num_good >= self.growth_interval:
            self._change_to(self._grown())
            num_good = 0
        self._num_good.assign(num_good, read_value=False)

    def _grown(self) -> float:
        grown = self._current * self.growth_factor
        # Half of infinity is infinity: an infinite scale would never shrink, and all later steps
        # would be skipped.
        return grown if math.isfinite(grown) else self._current

    def _change_to(self, scale: float) -> None:
        if scale != self._current:
            self._scale.assign(scale, read_value=False)
            self._is_read = False

    @property
    def _variables(self) -> tuple[Variable, ...]:
        """All variables of this object. Local."""
        return (self._scale, self._num_good, self._num_skipped)

    def _of_strategy(self) -> list[Variable]:
        """Return its variables if it was created in a scope. Local."""
        # Created outside a scope it works as well: all ranks change it equally, by equal sums.
        return [each for each in self._variables if each.strategy is not None]

    def __repr__(self) -> str:
        """Return the parameters as text, which the ranks compare. Local."""
        return (
            f"LossScale(initial_scale={float(self.initial_scale)}, "
            f"growth_interval={self.growth_interval}, growth_factor={float(self.growth_factor)}, "
            f"backoff_factor={float(self.backoff_factor)})"
        )
