"""Batch normalization, with the statistics of each replica or of all together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arguments import as_array, as_integer
from mpistrat.arrays import Array, Device, namespace_of, place
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.comm.wire import is_floating
from mpistrat.errors import ContextError
from mpistrat.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrat.pytorch import is_tensor
from mpistrat.strategies import get_replica_context, get_strategy
from mpistrat.trackable import Trackable
from mpistrat.variables import Variable


@dataclass(frozen=True)
class Moments:
    """Mean and (biased) variance of each feature; both 0 where there is no example."""

    mean: Array
    """Shape ``(num_features,)``, float64."""
    variance: Array
    """Shape ``(num_features,)``, float64."""
    count: float | None = None
    """Number of elements of each feature that they come from; ``None`` for moving averages."""


def along(features: Array, x: Array, axis: int) -> Array:
    """Return a value per feature so that it broadcasts with `x`, in the dtype of `x`."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return features.reshape(shape).astype(x.dtype, copy=False)


def _sum_features(x: Array, axis: int) -> Array:
    """Return the sum of each feature in float64, shape ``(num_features,)``."""
    xp: Any = namespace_of(x)
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    total: Array = xp.sum(x, axis=others, dtype=xp.float64)
    return total


def local_moments(x: Array, axis: int) -> Moments:
    """Return the moments of this replica's `x`, which may be empty."""
    # In two passes: the variance is that of what is left after the mean has been taken away.
    count = x.size // x.shape[axis]
    # An empty part has the count 0, and so adds nothing to the sums of all replicas.
    divisor = max(count, 1)
    mean = _sum_features(x, axis) / divisor
    rounded = mean.astype(x.dtype)
    squares = x - along(rounded, x, axis)
    squares *= squares
    # The squares are those of distances to the rounded mean. Their mean is too large by the square
    # of its distance from the mean.
    variance = _sum_features(squares, axis) / divisor - (mean - rounded) ** 2
    # Rounding may lead below 0, whose square root would be NaN.
    return Moments(mean, namespace_of(x).maximum(variance, 0), float(count))


def pooled_moments(call: CollectiveCall, local: Moments) -> Moments:
    """Return the moments of all replicas' examples together. **Collective**, one message."""
    # The variance is right to about `1e-16 * mean**2`.
    xp = namespace_of(local.mean)
    sums = [local.mean * local.count, (local.variance + local.mean**2) * local.count]
    total, squares, count = call.all_reduce(ReduceOp.SUM, [*sums, xp.asarray(local.count)])
    divisor = max(float(count), 1.0)
    mean = total / divisor
    return Moments(mean, xp.maximum(squares / divisor - mean**2, 0), float(count))


@dataclass(frozen=True)
class Normalization:
    """What the backward pass needs of the forward pass."""

    normalized: Array
    """The examples with mean 0 and variance 1."""
    scale: Array
    """gamma / standard deviation, shape ``(num_features,)``."""
    count: float | None
    """That of the moments."""
    dtype: np.dtype
    """That of the examples."""


def widened(x: Array) -> Array:
    """Return `x` in float32 where its dtype is smaller."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def normalize(
    x: Array, moments: Moments, gamma: Array, beta: Array, epsilon: float, axis: int
) -> tuple[Array, Normalization]:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, and what it leaves."""
    # The mean is taken away in two parts: rounded to the dtype of `x`, a large one would be off by
    # a good part of a standard deviation.
    wide = widened(x)
    inverse = 1 / namespace_of(x).sqrt(moments.variance + epsilon)
    rounded = moments.mean.astype(wide.dtype)
    normalized = wide - along(rounded, wide, axis)
    normalized *= along(inverse, wide, axis)
    normalized -= along((moments.mean - rounded) * inverse, wide, axis)
    y = normalized * along(gamma, wide, axis)
    y += along(beta, wide, axis)
    saved = Normalization(normalized, gamma * inverse, moments.count, x.dtype)
    return y.astype(x.dtype, copy=False), saved


def pull_back(
    saved: Normalization,
    gradient_y: Array,
    pool: Callable[[list[Array]], list[Array]],
    axis: int,
) -> tuple[Array, Array, Array]:
    """Return the gradients of the examples, of gamma and of beta; local where `pool` is."""
    # `pool` turns this replica's sums into those over all examples that the moments come from.
    # Moving averages do not depend on the examples, so they need none.
    gradient_y, normalized = widened(gradient_y), saved.normalized
    gradient_beta = _sum_features(gradient_y, axis)
    gradient_gamma = _sum_features(gradient_y * normalized, axis)
    if saved.count is None:
        gradient_x = gradient_y.astype(normalized.dtype)
    else:
        pooled = pool([gradient_beta, gradient_gamma])
        through_mean, through_variance = (each / max(saved.count, 1) for each in pooled)
        gradient_x = normalized * along(-through_variance, normalized, axis)
        gradient_x += gradient_y
        gradient_x -= along(through_mean, normalized, axis)
    gradient_x *= along(saved.scale, normalized, axis)
    return gradient_x.astype(saved.dtype, copy=False), gradient_gamma, gradient_beta


def _check_parameters(num_features: Any, momentum: Any, epsilon: Any, dtype: Any) -> None:
    """Refuse parameters out of range."""
    as_integer("BatchNorm: num_features", num_features, 1)
    if not 0 <= momentum <= 1:
        raise ValueError(f"BatchNorm: momentum must be in [0, 1], not {momentum}.")
    if not epsilon > 0:
        raise ValueError(f"BatchNorm: epsilon must be above 0, not {epsilon}.")
    if not is_floating(np.dtype(dtype)):
        raise TypeError(f"BatchNorm: dtype must be a floating one, not {np.dtype(dtype)}.")


def _checked_examples(what: str, value: Any, num_features: int, axis: int) -> Array:
    """Return `value`, examples or a gradient of their shape, as an array."""
    if is_tensor(value):
        raise TypeError(
            f"{what} takes NumPy and CuPy arrays: a PyTorch tensor would lose its graph. Use "
            "torch.nn.SyncBatchNorm, or give tensor.detach().numpy()."
        )
    array = as_array(what, value)
    if not is_floating(array.dtype):
        raise TypeError(f"{what} takes floating numbers, not {array.dtype}. Cast them first.")
    shape = tuple(array.shape)
    has_axis = len(shape) >= 2 and -len(shape) <= axis < len(shape)
    if not has_axis or shape[axis] != num_features:
        raise ValueError(
            f"{what} takes arrays of two or more axes with {num_features} features along axis "
            f"{axis}, not of the shape {shape}."
        )
    return array


def _ranks(layer: BatchNorm) -> Collectives:
    return context.collectives_of(layer.gamma.strategy)


class BatchNorm(Trackable):
    """Batch normalization (Ioffe and Szegedy, 2015): ``gamma * (x - mean) / std + beta``.

    In training, mean and variance are those of the replica's own examples, or with `synchronized`
    those of all replicas' examples, each counted once. The moving averages that inference uses
    are SyncOnRead variables: each replica has its own, and a checkpoint holds their mean. Without
    `synchronized` they differ from replica to replica.

    **Collective** in a strategy's scope, because it makes variables.

    Parameters
    ----------
    num_features : int
    axis : int
        Where the features are in the examples. The statistics are over all other axes.
    momentum : float
        In [0, 1]: what a moving average keeps of itself in each training step.
    epsilon : float
        Added to the variance.
    synchronized : bool
        Whether the replicas share their statistics, at one message in each direction.
    dtype : dtype
        Of the variables: a floating one. Examples may have another.
    name : str, optional
        By default ``"batch_norm"``.

    Attributes
    ----------
    gamma, beta : Variable
        Trainable, mirrored, of shape ``(num_features,)``; 1 and 0 at first.
    moving_mean, moving_variance : Variable
        SyncOnRead with aggregation MEAN, of the same shape; 0 and 1 at first. The variance is
        the biased one, divided by the number of elements.

    Raises
    ------
    ValueError, TypeError
        For an argument out of range or of another type.
    CollectiveMismatchError
        If the ranks disagree on an argument.

    Examples
    --------
    >>> norm = ms.layers.BatchNorm(2, synchronized=True)
    >>> y, saved = norm.forward(np.array([[1.0, 0.0], [3.0, 0.0]], np.float32))
    >>> y.round(2)
    array([[-1.,  0.],
           [ 1.,  0.]], dtype=float32)
    >>> gradients = norm.backward(saved, np.ones_like(y))
    """

    @context.made_in_scope
    def __init__(
        self,
        num_features: int,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        dtype: npt.DTypeLike = np.float32,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.name = "batch_norm" if name is None else name
        with context.collectives_of(get_strategy()).call("BatchNorm", self.name) as call:
            _check_parameters(num_features, momentum, epsilon, dtype)
            self.num_features = int(num_features)
            self.axis = as_integer("BatchNorm: axis", axis)
            self.momentum, self.epsilon = float(momentum), float(epsilon)
            self.synchronized = bool(synchronized)
            parameters = ("num_features", "axis", "momentum", "epsilon", "synchronized")
            call.agree(*(f"{each}={getattr(self, each)}" for each in parameters))
        shape, dtype = (self.num_features,), np.dtype(dtype)
        self.gamma = self._make_variable("gamma", np.ones(shape, dtype))
        self.beta = self._make_variable("beta", np.zeros(shape, dtype))
        self.moving_mean = self._make_average("moving_mean", np.zeros(shape, dtype))
        self.moving_variance = self._make_average("moving_variance", np.ones(shape, dtype))

    def _make_variable(self, what: str, value: np.ndarray, **modes: Any) -> Variable:
        variable = Variable(value, name=f"{self.name}/{what}", **modes)
        self._attach_child(what, variable)
        return variable

    def _make_average(self, what: str, value: np.ndarray) -> Variable:
        return self._make_variable(
            what,
            value,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.MEAN,
        )

    def forward(self, x: Array, training: bool = True) -> tuple[Array, Normalization]:
        """Normalize this replica's examples.

        **Collective** with `synchronized` in training, and in cross-replica context, where the
        moving averages are read; else **Local**.

        Parameters
        ----------
        x : array
            Of a floating dtype and two or more axes, `num_features` long along `axis`. May be
            empty; where no replica has an example, nothing changes.
        training : bool
            Whether to use the statistics of the examples, and to let the moving averages follow
            them. Else those averages are used: inside `Strategy.run` this replica's own, in
            cross-replica context the mean over replicas.

        Returns
        -------
        y : array
            Of the shape and dtype of `x`.
        saved : object
            For `backward`.

        Raises
        ------
        ValueError
            If the shape of `x` does not fit.
        TypeError
            If `x` is no array of a floating dtype.
        ContextError
            In training, outside a function given to `Strategy.run`.
        CollectiveError
            Where it is collective and the ranks disagree.
        """
        if not training:
            x, averages = self._examples_and_averages(x)
            mean, variance = (each.astype(np.float64) for each in averages)
            moments = Moments(mean, variance)
            return self._normalized(x, moments)
        collectives = self._collectives("forward")
        if not self.synchronized:
            x = self._checked("forward", x)
            moments = local_moments(widened(x), self.axis)
        else:
            with collectives.call("BatchNorm.forward", self.name) as call:
                # Inside of the call, so that an array that is refused on one rank is reported to
                # all.
                x = self._checked("forward", x)
                moments = pooled_moments(call, local_moments(widened(x), self.axis))
        if moments.count:
            self._follow(self.moving_mean, moments.mean)
            self._follow(self.moving_variance, moments.variance)
        return self._normalized(x, moments)

    def _examples_and_averages(self, x: Any) -> tuple[Array, list[Array]]:
        """Return the checked `x` and the moving averages: collective where reading those is."""
        averages, owner = [self.moving_mean, self.moving_variance], self.gamma.strategy
        what = f"BatchNorm.forward of {self.name!r}"
        if owner is None or context.mode_for(owner, what) is not context.Kind.CROSS_REPLICA:
            return self._checked("forward", x), [each.values[0] for each in averages]
        return self._reduced_averages(x)

    @context.collective("BatchNorm.forward", of=_ranks)
    def _reduced_averages(self, x: Any) -> tuple[Array, list[Array]]:
        """Return the checked `x` and the averages of all replicas. **Collective**."""
        strategy = self.gamma.strategy

        def reduced() -> tuple[Array, list[Array]]:
            with context.replicas_of(strategy).call("BatchNorm.forward", self.name) as call:
                own = [each.values[0] for each in (self.moving_mean, self.moving_variance)]
                return self._checked("forward", x), call.all_reduce(ReduceOp.MEAN, own)

        found: tuple[Array, list[Array]] = context.replica_set_of(strategy).each(reduced)[0]
        return found

    def backward(
        self, saved: Normalization, gradient_y: Array
    ) -> tuple[Array, list[tuple[Array, Variable]]]:
        """Return the gradients of the loss, which is the sum of the replicas' losses.

        **Collective** with `synchronized` after a forward pass in training, else **Local**.

        Parameters
        ----------
        saved : object
            From `forward`.
        gradient_y : array
            Gradient of this replica's loss with respect to the `y` of `forward`, of its shape.

        Returns
        -------
        gradient_x : array
            Of the shape and dtype of `x`; with `synchronized` that of all replicas' losses.
        grads_and_vars : list of (array, Variable)
            This replica's gradients of gamma and beta, for `apply_gradients` to sum.

        Raises
        ------
        ValueError
            If the shape of `gradient_y` does not fit.
        TypeError
            If it is no array of a floating dtype, or `saved` is not from `forward`.
        ContextError, CollectiveError
            As `forward`, where it is collective.
        """
        of_averages = isinstance(saved, Normalization) and saved.count is None
        if of_averages or not self.synchronized:
            return self._pulled_back(saved, gradient_y, lambda sums: sums)
        with self._collectives("backward").call("BatchNorm.backward", self.name) as call:
            pool = functools.partial(call.all_reduce, ReduceOp.SUM)
            return self._pulled_back(saved, gradient_y, pool)

    def _pulled_back(
        self, saved: Any, gradient_y: Any, pool: Callable[[list[Array]], list[Array]]
    ) -> tuple[Array, list[tuple[Array, Variable]]]:
        what = f"BatchNorm.backward of {self.name!r}"
        if not isinstance(saved, Normalization):
            raise TypeError(f"{what} takes what forward saved first, not {saved!r}.")
        gradient_y = self._checked("backward", gradient_y)
        if gradient_y.shape != saved.normalized.shape:
            raise ValueError(
                f"{what}: gradient_y has the shape {tuple(gradient_y.shape)}, but y the shape "
                f"{tuple(saved.normalized.shape)}."
            )
        gradient_x, *of_parameters = pull_back(saved, gradient_y, pool, self.axis)
        pairs = zip(of_parameters, (self.gamma, self.beta), strict=True)
        return gradient_x, [(array.astype(var.dtype, copy=False), var) for array, var in pairs]

    def _normalized(self, x: Array, moments: Moments) -> tuple[Array, Normalization]:
        gamma, beta = self.gamma.value(), self.beta.value()
        return normalize(x, moments, gamma, beta, self.epsilon, self.axis)

    def _follow(self, average: Variable, current: Array) -> None:
        step = (current - average.value()) * (1 - self.momentum)
        average.assign_add(step.astype(average.dtype), read_value=False)

    def _checked(self, method: str, value: Any) -> Array:
        """Return `value`, examples or their gradients, as an array on the replica's device."""
        what = f"BatchNorm.{method} of {self.name!r}"
        array = _checked_examples(what, value, self.num_features, self.axis)
        owner = self.gamma.strategy
        return place(array, Device("cpu") if owner is None else owner.extended.device)

    def _collectives(self, method: str) -> Collectives:
        """Return the collectives of the replica context that this is called in."""
        owner, replica = self.gamma.strategy, get_replica_context()
        if replica is None or owner not in (None, replica.strategy):
            raise ContextError(
                f"BatchNorm.{method} of {self.name!r} trains on the examples of each replica: it "
                f"needs the replica context of {owner!r}. Call it inside a function given to "
                "strategy.run; only training=False works elsewhere."
            )
        return context.replicas_of(replica.strategy)

    def __repr__(self) -> str:
        kind = "synchronized" if self.synchronized else "per replica"
        return f"<BatchNorm {self.name!r} num_features={self.num_features}, {kind}>"
