"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpistrat.arrays import Array
from mpistrat.optimizers.base import Optimizer
from mpistrat.variables import Variable

__all__ = ["SGD"]


class SGD(Optimizer):
    """Gradient descent: ``v = momentum * v + learning_rate * g``, then ``w -= v``.

    With `nesterov` the step is ``momentum * v + learning_rate * g`` instead of ``v``
    (Sutskever et al., "On the importance of initialization and momentum", 2013).

    Parameters
    ----------
    learning_rate : float or callable
        A callable is given the step number and returns the rate.
    momentum : float
        In [0, 1). 0 keeps no velocity.
    nesterov : bool
    weight_decay : float, optional
        Decoupled, before the step.

    Raises
    ------
    ValueError
        For a value out of range, or `nesterov` without momentum.
    """

    momentum: float
    nesterov: bool

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay, momentum=momentum, nesterov=nesterov)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"SGD: momentum must be in [0, 1), not {self.momentum}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD: nesterov=True needs a momentum above 0.")

    def _slot_names(self) -> Sequence[str]:
        return ("momentum",) if self.momentum else ()

    def _delta(self, variable: Variable, gradient: Array, rate: float, step: int) -> Array:
        scaled = gradient * gradient.dtype.type(rate)
        if not self.momentum:
            return scaled
        velocity = self.slot(variable, "momentum")
        momentum = velocity.dtype.type(self.momentum)
        new = velocity.value() * momentum
        new += scaled
        velocity.assign(new, read_value=False)
        return new * momentum + scaled if self.nesterov else new
