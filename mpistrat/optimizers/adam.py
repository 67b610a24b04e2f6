"""Adam, and AdamW through `weight_decay`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.arguments import as_finite
from mpistrat.optimizers import kernels
from mpistrat.optimizers.loss_scale import LossScale
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.optimizers.update import Rule

Block = np.ndarray
Blocks = Sequence[np.ndarray]


def _adam(w: Block, g: Block, slots: Blocks, constants: Blocks, t: Block) -> None:
    (first, second), (rate, gain_1, gain_2, epsilon) = slots, constants
    np.subtract(g, first, out=t)
    np.multiply(t, gain_1, out=t)
    np.add(first, t, out=first)
    np.multiply(g, g, out=t)
    np.subtract(t, second, out=t)
    np.multiply(t, gain_2, out=t)
    np.add(second, t, out=second)
    np.sqrt(second, out=t)
    np.add(t, epsilon, out=t)
    np.divide(first, t, out=t)
    np.multiply(t, rate, out=t)
    np.subtract(w, t, out=w)


_ADAM = Rule(kernels.ADAM, _adam)


class Adam(Optimizer):
    """Steps scaled by running moments of the gradient (Kingma and Ba, "Adam", 2015).

    Parameters
    ----------
    learning_rate : float or callable
        Learning rate. A callable is called with the step number and returns the rate.
    beta_1, beta_2 : float
        Decay of the first and second moment, in [0, 1).
    epsilon : float
        Added to the root of the second moment, after its bias correction; above 0.
    weight_decay : float, optional
        Decoupled weight decay, applied before the step (AdamW).
    global_clipnorm, loss_scale
        See `Optimizer`.
    sharded_slots : bool
        Whether each rank updates a part of every mirrored variable, and keeps only the slots of
        that part (ZeRO, stage 1). Checkpoints hold whole slots either way.

    Raises
    ------
    TypeError
        If a parameter has the wrong type.
    ValueError
        For a value out of range.
    NotImplementedError
        For `sharded_slots` with `ranks_per_replica` or under a parameter server.

    Examples
    --------
    >>> ms.optimizers.AdamW(1e-3, weight_decay=0.01)
    <Adam learning_rate=0.001 beta_1=0.9 beta_2=0.999 epsilon=1e-08 weight_decay=0.01 iterations=0>
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
        global_clipnorm: float | None = None,
        loss_scale: LossScale | None = None,
        sharded_slots: bool = False,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay,
            global_clipnorm,
            loss_scale,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            sharded_slots=sharded_slots,
        )

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name, value in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0 <= as_finite(f"Adam: {name}", value) < 1:
                raise ValueError(f"Adam: {name} must be in [0, 1), not {value}.")
        if as_finite("Adam: epsilon", self.epsilon) <= 0:
            raise ValueError(f"Adam: epsilon must be positive, not {self.epsilon}.")

    @property
    def _rule(self) -> Rule:
        return _ADAM

    def _constants(self, rate: float, step: int) -> tuple[float, ...]:
        # The moments start at zero. The rate and epsilon contain both corrections for that.
        root = math.sqrt(1 - self.beta_2 ** (step + 1))
        corrected = rate * root / (1 - self.beta_1 ** (step + 1))
        return corrected, 1 - self.beta_1, 1 - self.beta_2, self.epsilon * root
