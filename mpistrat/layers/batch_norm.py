"""Batch normalization, with the statistics of each replica or of all replicas together."""

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
    """Mean and (biased) variance of each feature; both are 0 without examples."""

    mean: Array
    """Means, of shape ``(num_features,)`` and dtype float64."""
    variance: Array
    """Variances, of shape ``(num_features,)`` and dtype float64."""
    count: float | None = None
    """Number of elements per feature behind these statistics; ``None`` for moving averages."""


def along(features: Array, x: Array, axis: int) -> Array:
    """Return one value per feature, reshaped to broadcast with `x`, in the dtype of `x`."""
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
    # In two passes: the variance is computed after the mean has been subtracted.
    count = x.size // x.shape[axis]
    # An empty part has the count 0, so it adds nothing to the sums over all replicas.
    divisor = max(count, 1)
    mean = _sum_features(x, axis) / divisor
    rounded = mean.astype(x.dtype)
    squares = x - along(rounded, x, axis)
    squares *= squares
    # These are squares of distances to the rounded mean. Their mean is too large by the square of
    # the distance between the rounded and the exact mean.
    variance = _sum_features(squares, axis) / divisor - (mean - rounded) ** 2
    # Rounding may lead to a value below 0, whose square root would be NaN.
    return Moments(mean, namespace_of(x).maximum(variance, 0), float(count))


def pooled_moments(call: CollectiveCall, local: Moments) -> Moments:
    """Return the moments of all replicas' examples together. **Collective**, one message."""
    # The error of the variance is about `1e-16 * mean**2`.
    xp = namespace_of(local.mean)
    sums = [local.mean * local.count, (local.variance + local.mean**2) * local.count]
    total, squares, count = call.all_reduce(ReduceOp.SUM, [*sums, xp.asarray(local.count)])
    divisor = max(float(count), 1.0)
    mean = total / divisor
    return Moments(mean, xp.maximum(squares / divisor - mean**2, 0), float(count))


@dataclass(frozen=True)
class Normalization:
    """Data of the forward pass that the backward pass needs."""

    normalized: Array
    """The examples with mean 0 and variance 1."""
    scale: Array
    """gamma / standard deviation, shape ``(num_features,)``."""
    count: float | None
    """The count of the moments."""
    dtype: np.dtype
    """The dtype of the examples."""


def widened(x: Array) -> Array:
    """Return `x` in float32 if its dtype is smaller."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def normalize(
    x: Array, moments: Moments, gamma: Array, beta: Array, epsilon: float, axis: int
) -> tuple[Array, Normalization]:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, and data for `pull_back`."""
    # The mean is subtracted in two parts: a large mean, rounded to the dtype of `x`, could be wrong
    # by a considerable part of a standard deviation.
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
    """Return the gradients of the examples, of gamma and of beta. Local if `pool` is local."""
    # `pool` turns this replica's sums into sums over all examples that the moments come from.
    # Moving averages do not depend on the examples, so they need no such sums.
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
    """Raise an error for parameters out of range."""
    as_integer("BatchNorm: num_features", num_features, 1)
    if not 0 <= momentum <= 1:
        raise ValueError(f"BatchNorm: momentum must be in [0, 1], not {momentum}.")
    if not epsilon > 0:
        raise ValueError(f"BatchNorm: epsilon must be above 0, not {epsilon}.")
    if not is_floating(np.dtype(dtype)):
        raise TypeError(f"BatchNorm: dtype must be a floating one, not {np.dtype(dtype)}.")


def _checked_examples(what: str, value: Any, num_features: int, axis: int) -> Array:
    """Return `value`, which holds examples or a gradient of their shape, as an array."""
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

    In training, mean and variance come from the replica's own examples. With `synchronized` they
    come from the examples of all replicas, each counted once. Inference uses moving averages, which
    are SyncOnRead variables: each replica has its own, and a checkpoint holds their mean. Without
    `synchronized` they differ between replicas.

    **Collective** in a strategy's scope, because it creates variables.

    Parameters
    ----------
    num_features : int
        Number of features, which is the length of `axis`.
    axis : int
        Axis of the features in the examples. The statistics are over all other axes.
    momentum : float
        Weight of the old moving average in each training step, in [0, 1].
    epsilon : float
        Added to the variance.
    synchronized : bool
        Whether the replicas share their statistics, which costs one message in each direction.
    dtype : dtype
        Dtype of the variables, which must be floating. Examples may have a different dtype.
    name : str, optional
        Name of the layer. Default: ``"batch_norm"``.

    Attributes
    ----------
    gamma, beta : Variable
        Trainable, mirrored, of shape ``(num_features,)``; initially 1 and 0.
    moving_mean, moving_variance : Variable
        SyncOnRead with aggregation MEAN, of the same shape; initially 0 and 1. The variance is
        the biased one, divided by the number of elements.

    Raises
    ------
    ValueError, TypeError
        For an argument that is out of range or has the wrong type.
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

        **Collective** with `synchronized` in training, and in cross-replica context, because that
        reads the moving averages; else **Local**.

        Parameters
        ----------
        x : array
            Examples of a floating dtype with two or more axes, of length `num_features` along
            `axis`. May be empty. If no replica has an example, the moving averages do not change.
        training : bool
            Whether to use the statistics of the examples, and to update the moving averages with
            them. Otherwise the moving averages are used: inside `Strategy.run` this replica's own,
            in cross-replica context the mean over replicas.

        Returns
        -------
        y : array
            The normalized examples, with the shape and dtype of `x`.
        saved : object
            Data for `backward`.

        Raises
        ------
        ValueError
            If the shape of `x` does not match.
        TypeError
            If `x` is not an array of a floating dtype.
        ContextError
            In training, outside a function passed to `Strategy.run`.
        CollectiveError
            If it is collective and the ranks disagree.
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
                # Checked inside the call, so that all ranks learn of an invalid array on one rank.
                x = self._checked("forward", x)
                moments = pooled_moments(call, local_moments(widened(x), self.axis))
        if moments.count:
            self._follow(self.moving_mean, moments.mean)
            self._follow(self.moving_variance, moments.variance)
        return self._normalized(x, moments)

    def _examples_and_averages(self, x: Any) -> tuple[Array, list[Array]]:
        """Return the checked `x` and the moving averages. **Collective** if reading them is."""
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
            The data that `forward` returned.
        gradient_y : array
            Gradient of this replica's loss with respect to the `y` of `forward`, in its shape.

        Returns
        -------
        gradient_x : array
            Gradient with respect to `x`, in its shape and dtype. With `synchronized` it is the
            gradient of all replicas' losses.
        grads_and_vars : list of (array, Variable)
            This replica's gradients of gamma and beta, which `apply_gradients` sums.

        Raises
        ------
        ValueError
            If the shape of `gradient_y` does not match.
        TypeError
            If it is not an array of a floating dtype, or `saved` is not from `forward`.
        ContextError, CollectiveError
            Like `forward`, if it is collective.
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
        """Return `value`, examples or gradients, as an array on the replica's device."""
        what = f"BatchNorm.{method} of {self.name!r}"
        array = _checked_examples(what, value, self.num_features, self.axis)
        owner = self.gamma.strategy
        return place(array, Device("cpu") if owner is None else owner.extended.device)

    def _collectives(self, method: str) -> Collectives:
        """Return the collectives of the current replica context."""
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
