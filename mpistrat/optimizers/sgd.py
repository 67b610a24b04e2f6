"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.arguments import as_finite
from mpistrat.optimizers import kernels
from mpistrat.optimizers.loss_scale import LossScale
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.optimizers.update import Rule

Block = np.ndarray
Blocks = Sequence[np.ndarray]


def _plain(w: Block, g: Block, slots: Blocks, constants: Blocks, t: Block) -> None:
    (rate,) = constants
    np.multiply(g, rate, out=t)
    np.subtract(w, t, out=w)


def _momentum(w: Block, g: Block, slots: Blocks, constants: Blocks, t: Block) -> None:
    (velocity,), (rate, decay) = slots, constants
    np.multiply(velocity, decay, out=velocity)
    np.multiply(g, rate, out=t)
    np.add(velocity, t, out=velocity)
    np.subtract(w, velocity, out=w)


def _nesterov(w: Block, g: Block, slots: Blocks, constants: Blocks, t: Block) -> None:
    (velocity,), (rate, decay) = slots, constants
    np.multiply(velocity, decay, out=velocity)
    np.multiply(g, rate, out=t)
    np.add(velocity, t, out=velocity)
    np.subtract(w, t, out=w)
    np.multiply(velocity, decay, out=t)
    np.subtract(w, t, out=w)


_PLAIN = Rule(kernels.SGD, _plain)
_MOMENTUM = Rule(kernels.SGD_MOMENTUM, _momentum)
_NESTEROV = Rule(kernels.SGD_NESTEROV, _nesterov)


class SGD(Optimizer):
    """Gradient descent: ``v = momentum * v + learning_rate * g``, then ``w -= v``.

    With `nesterov` the step is ``momentum * v + learning_rate * g`` instead of ``v``
    (Sutskever et al., "On the importance of initialization and momentum", 2013).

    Parameters
    ----------
    learning_rate : float or callable
        Learning rate. A callable is called with the step number and returns the rate.
    momentum : float
        Momentum, in [0, 1). With 0 there is no velocity slot.
    nesterov : bool
        Whether to use Nesterov momentum.
    weight_decay, global_clipnorm, loss_scale
        See `Optimizer`.
    sharded_slots : bool
        Whether each rank updates a part of every mirrored variable, and keeps only the slots of
        that part (ZeRO, stage 1). Checkpoints hold whole slots either way.

    Raises
    ------
    TypeError
        If a parameter has the wrong type.
    ValueError
        For a value out of range, or `nesterov` or `sharded_slots` without momentum.
    NotImplementedError
        For `sharded_slots` with `ranks_per_replica` or under a parameter server.

    Examples
    --------
    >>> ms.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    <SGD learning_rate=0.1 momentum=0.9 nesterov=True iterations=0>
    """

    momentum: float
    nesterov: bool

    def __init__(
        self,
        learning_rate: float | Callable[[int], float] = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
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
            momentum=momentum,
            nesterov=nesterov,
            sharded_slots=sharded_slots,
        )

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not 0 <= as_finite("SGD: momentum", self.momentum) < 1:
            raise ValueError(f"SGD: momentum must be in [0, 1), not {self.momentum}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD: nesterov=True needs a momentum above 0.")
        if self.sharded_slots and self.momentum == 0:
            raise ValueError(
                "SGD: sharded_slots=True divides the slots among the ranks, but without momentum "
                "there are none. Pass a momentum above 0, or leave sharded_slots out."
            )

    @property
    def _rule(self) -> Rule:
        if not self.momentum:
            return _PLAIN
        return _NESTEROV if self.nesterov else _MOMENTUM

    def _constants(self, rate: float, step: int) -> tuple[float, ...]:
        return (rate, self.momentum) if self.momentum else (rate,)
