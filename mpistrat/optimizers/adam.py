"""Adam, and AdamW through `weight_decay`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mpistrat.arrays import Array, namespace_of
from mpistrat.optimizers.base import Optimizer
from mpistrat.variables import Variable

__all__ = ["Adam"]


class Adam(Optimizer):
    """Steps scaled by running moments of the gradient (Kingma and Ba, "Adam", 2015).

    Parameters
    ----------
    learning_rate : float or callable
        A callable is given the step number and returns the rate.
    beta_1, beta_2 : float
        Decay of the first and second moment, in [0, 1).
    epsilon : float
        Added to the root of the second moment.
    weight_decay : float, optional
        Decoupled, before the step: AdamW.

    Raises
    ------
    ValueError
        For a value out of range.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name, value in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0 <= value < 1:
                raise ValueError(f"Adam: {name} must be in [0, 1), not {value}.")
        if not self.epsilon > 0:
            raise ValueError(f"Adam: epsilon must be positive, not {self.epsilon}.")

    def _slot_names(self) -> Sequence[str]:
        return ("first_moment", "second_moment")

    def _delta(self, variable: Variable, gradient: Array, rate: float, step: int) -> Array:
        xp = namespace_of(gradient)
        real = gradient.dtype.type
        first = self.slot(variable, "first_moment")
        second = self.slot(variable, "second_moment")
        first.assign(
            first.value() * real(self.beta_1) + gradient * real(1 - self.beta_1), read_value=False
        )
        second.assign(
            second.value() * real(self.beta_2) + gradient * gradient * real(1 - self.beta_2),
            read_value=False,
        )
        # Both corrections for the moments' start at zero, as one factor each.
        bias_1 = 1 - self.beta_1 ** (step + 1)
        bias_2 = math.sqrt(1 - self.beta_2 ** (step + 1))
        root = xp.sqrt(second.value()) / real(bias_2) + real(self.epsilon)
        return first.value() * real(rate / bias_1) / root
