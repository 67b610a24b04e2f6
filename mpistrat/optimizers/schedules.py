"""Learning-rate schedules: pure functions of the step number.

A schedule has no state. An optimizer calls it with its `iterations`, which are in every checkpoint
of the optimizer, so that a resumed job continues at the rate where it stopped.
"""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.arguments import as_finite, as_integer
from mpistrat.arrays import as_index

__all__ = [
    "Constant",
    "CosineDecay",
    "ExponentialDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
]


class LearningRateSchedule(abc.ABC):
    """Base of schedules, which can be passed to an optimizer as its `learning_rate`.

    A schedule is called with the number of a step, an integer from 0 on, and returns the rate of
    that step. **Local**. It raises `ValueError` for a negative step and `TypeError` for a step that
    is not an integer. Schedules with equal parameters are equal, have the same `repr`, and return
    bit-identical rates.

    Examples
    --------
    >>> schedules = ms.optimizers.schedules
    >>> isinstance(schedules.Constant(0.1), schedules.LearningRateSchedule)
    True
    """

    def __call__(self, step: int) -> float:
        """Return the learning rate of `step`. Local."""
        try:
            step = as_index(step)
        except TypeError:
            raise TypeError(
                f"{type(self).__name__} takes the number of a step, an integer, not {step!r} of "
                f"type {type(step).__name__}."
            ) from None
        if step < 0:
            raise ValueError(f"{type(self).__name__} takes a step from 0 on, not {step}.")
        return self._rate(step)

    @abc.abstractmethod
    def _rate(self, step: int) -> float:
        """Return the learning rate of `step`, which is at least 0."""

    def _settle(self, name: str, value: object) -> None:
        """Set a field to its value in the canonical type. The fields are frozen for users."""
        object.__setattr__(self, name, value)

    def _settle_rate(self, name: str) -> None:
        self._settle(name, as_finite(f"{type(self).__name__}: {name}", getattr(self, name), 0))

    def _settle_steps(self, name: str, at_least: int) -> None:
        what = f"{type(self).__name__}: {name}"
        self._settle(name, as_integer(what, getattr(self, name), at_least))


@dataclass(frozen=True)
class Constant(LearningRateSchedule):
    """The same learning rate at every step, like a plain number.

    Raises
    ------
    TypeError
        If the rate is not a number.
    ValueError
        If it is negative or not finite.

    Examples
    --------
    >>> ms.optimizers.schedules.Constant(0.1)(1000)
    0.1
    """

    learning_rate: float
    """The rate, at least 0."""

    def __post_init__(self) -> None:
        self._settle_rate("learning_rate")

    def _rate(self, step: int) -> float:
        return self.learning_rate


@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """A constant rate for each interval of steps: the *step* schedule.

    ``values[i]`` applies up to and including the step ``boundaries[i]``, and the last value to all
    later steps, as in Keras.

    Raises
    ------
    TypeError
        If a boundary is not an integer, or a value is not a number.
    ValueError
        If there is not exactly one more value than boundaries, a boundary is negative, the
        boundaries do not increase, or a value is negative or not finite.

    Examples
    --------
    >>> rate = ms.optimizers.schedules.PiecewiseConstantDecay([100], [0.1, 0.01])
    >>> rate(100), rate(101)
    (0.1, 0.01)
    """

    boundaries: Sequence[int]
    """Last step of each interval except the last one; stored as a tuple."""
    values: Sequence[float]
    """Rate of each interval, one more than `boundaries`; stored as a tuple."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        boundaries = tuple(as_integer(f"{kind}: a boundary", each) for each in self.boundaries)
        values = tuple(as_finite(f"{kind}: a value", each) for each in self.values)
        if len(values) != len(boundaries) + 1:
            raise ValueError(
                f"{kind} needs one value more than boundaries, but has {len(values)} values and "
                f"{len(boundaries)} boundaries."
            )
        if any(low >= high for low, high in zip((-1, *boundaries), boundaries, strict=False)):
            raise ValueError(f"{kind}: boundaries must rise from 0 on, unlike {boundaries}.")
        if min(values) < 0:
            raise ValueError(f"{kind}: values must be at least 0, not {values}.")
        self._settle("boundaries", boundaries)
        self._settle("values", values)

    def _rate(self, step: int) -> float:
        return self.values[bisect.bisect_left(self.boundaries, step)]


@dataclass(frozen=True)
class ExponentialDecay(LearningRateSchedule):
    """Exponential decay: ``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Raises
    ------
    TypeError
        If a parameter has the wrong type.
    ValueError
        If the rate is negative or not finite, `decay_steps` below 1, or `decay_rate` outside
        (0, 1].

    Examples
    --------
    >>> ms.optimizers.schedules.ExponentialDecay(0.1, decay_steps=100, decay_rate=0.5)(100)
    0.05
    """

    initial_learning_rate: float
    """Rate of step 0."""
    decay_steps: int
    """Number of steps in which the rate falls by the factor `decay_rate`."""
    decay_rate: float
    """Factor of the decay, in (0, 1]."""
    staircase: bool = False
    """Whether the rate falls at once every `decay_steps` steps, and is constant in between."""

    def __post_init__(self) -> None:
        self._settle_rate("initial_learning_rate")
        self._settle_steps("decay_steps", at_least=1)
        decay_rate = as_finite("ExponentialDecay: decay_rate", self.decay_rate)
        if not 0 < decay_rate <= 1:
            raise ValueError(f"ExponentialDecay: decay_rate must be in (0, 1], not {decay_rate}.")
        self._settle("decay_rate", decay_rate)
        self._settle("staircase", bool(self.staircase))

    def _rate(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate**exponent


@dataclass(frozen=True)
class CosineDecay(LearningRateSchedule):
    """Decay along half a cosine wave to a minimum, after an optional linear warm-up.

    Without `warmup_target` the rate falls from `initial_learning_rate`. With it, the rate rises
    linearly from `initial_learning_rate` at step 0 to `warmup_target` at step `warmup_steps`,
    and falls from there. The decay takes `decay_steps` further steps and ends at `alpha` times
    the rate that it started from. Later steps use that final rate (Loshchilov and Hutter, "SGDR",
    2017, without restarts). The parameters have the names of Keras.

    Raises
    ------
    TypeError
        If a parameter has the wrong type.
    ValueError
        If a rate is negative or not finite, `decay_steps` below 1, `warmup_steps` negative,
        `alpha` outside [0, 1], or only one of `warmup_target` and `warmup_steps` is given.

    Examples
    --------
    >>> rate = ms.optimizers.schedules.CosineDecay(0.1, decay_steps=100)
    >>> rate(0), rate(100)
    (0.1, 0.0)
    """

    initial_learning_rate: float
    """Rate of step 0."""
    decay_steps: int
    """Number of steps of the decay, not counting the warm-up."""
    alpha: float = 0.0
    """Final rate, as a fraction of the highest rate."""
    warmup_target: float | None = None
    """Rate at the end of the warm-up; ``None`` for no warm-up."""
    warmup_steps: int = 0
    """Number of steps of the warm-up."""

    def __post_init__(self) -> None:
        self._settle_rate("initial_learning_rate")
        self._settle_steps("decay_steps", at_least=1)
        self._settle_steps("warmup_steps", at_least=0)
        alpha = as_finite("CosineDecay: alpha", self.alpha)
        if not 0 <= alpha <= 1:
            raise ValueError(f"CosineDecay: alpha must be in [0, 1], not {alpha}.")
        self._settle("alpha", alpha)
        if (self.warmup_target is None) != (self.warmup_steps == 0):
            raise ValueError(
                "CosineDecay: a warm-up needs both warmup_target and warmup_steps, but they are "
                f"{self.warmup_target} and {self.warmup_steps}."
            )
        if self.warmup_target is not None:
            self._settle_rate("warmup_target")

    def _rate(self, step: int) -> float:
        start = self.initial_learning_rate
        if self.warmup_target is None:
            return self._fallen(start, step)
        if step >= self.warmup_steps:
            return self._fallen(self.warmup_target, step - self.warmup_steps)
        return start + (self.warmup_target - start) * (step / self.warmup_steps)

    def _fallen(self, peak: float, step: int) -> float:
        share = min(step, self.decay_steps) / self.decay_steps
        cosine = (1 + math.cos(math.pi * share)) / 2
        return peak * ((1 - self.alpha) * cosine + self.alpha)
