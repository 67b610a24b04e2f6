"""Metric base class: SyncOnRead SUM variables, an update, a result and a reset.

`from_sums` creates a metric from two functions.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mpistrat import context, nests, user_warnings
from mpistrat.arguments import as_array
from mpistrat.arrays import Array, host_copy, host_view, is_on_host, namespace_of
from mpistrat.collectives.collectives import Collectives
from mpistrat.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrat.strategies import get_strategy
from mpistrat.system import units
from mpistrat.trackable import Trackable
from mpistrat.values import DistributedValues, local_component
from mpistrat.variables import Variable

_Result = TypeVar("_Result")
Given: TypeAlias = npt.ArrayLike | DistributedValues[Any]


def _strategy_of(metric: Metric[Any]) -> Any:
    """Return the strategy of a metric whose sums exist."""
    return next(iter(metric._sums.values())).strategy


def _ranks(metric: Metric[Any]) -> Collectives:
    return context.collectives_of(_strategy_of(metric))


class Metric(Trackable, abc.ABC, Generic[_Result]):
    """Base of metrics.

    **Collective** in a strategy's scope, because it creates variables.

    Parameters
    ----------
    name : str, optional
        Name of the metric. Default: the class name in lower case.

    Examples
    --------
    >>> with strategy.scope():
    ...     loss = ms.metrics.Mean(name="loss")
    >>> strategy.run(lambda: loss.update_state([1.0, 3.0]))
    >>> float(loss.result())
    2.0
    >>> loss.reset_state()
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = type(self).__name__.lower() if name is None else name
        self._sums: dict[str, Variable] = {}
        self._is_plain = not context.distributes_variables(get_strategy())
        """Whether it was created outside every scope, and belongs to only one process."""

    def _check_scope(self) -> None:
        if self._is_plain:
            context.require_scope_of_several(f"The metric {self.name!r}")

    def _make_sum(self, what: str, shape: tuple[int, ...] = ()) -> Variable:
        variable = Variable(
            np.zeros(shape),
            trainable=False,
            name=f"{self.name}/{what}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self._attach_child(what, variable)
        self._sums[what] = variable
        units.on_undo(lambda: self._sums.pop(what, None))
        return variable

    def _add(self, *numbers: Any) -> None:
        """Add a number or array to each sum, in the order in which the sums were created."""
        if self._is_plain:
            self._check_scope()
        frame = context.current()
        is_replica = frame is not None and frame.kind is context.Kind.REPLICA
        here = frame.strategy if frame is not None and is_replica else None
        if here is not None and user_warnings.empty_parts:
            sums = zip(self._sums, numbers, strict=True)
            named = ((f"{what} of the metric {self.name!r}", number) for what, number in sums)
            user_warnings.warn_of_nan(context.layout_of(here).replica_id, named)
        for variable, number in zip(self._sums.values(), numbers, strict=True):
            if variable.strategy is here and variable._placement.is_here:
                # The same as assign_add, but faster, because each step does it many times.
                total = variable._component
                total += number if type(number) is float else beside(number, total)
            else:
                variable.assign_add(number, read_value=False)

    @abc.abstractmethod
    def _compute(self, sums: Mapping[str, Any]) -> _Result:
        """Return the result from the sums over all replicas, a mapping by the name of the sum."""

    def result(self) -> _Result:
        """Return the value over all replicas. **Collective**: every rank makes the call.

        All sums of the metric are sent in one message. Inside `Strategy.run`, too, the value covers
        all replicas and not only this one.

        Returns
        -------
        numpy scalar
            The same on every rank. Some metrics return an array of several values.

        Raises
        ------
        ContextError
            In the context of a different strategy.
        ValueError
            If the first update creates the sums of the metric, and there was no update yet; or
            inside `Strategy.run` of several replicas, if the metric was created outside the scope.
        CollectiveError
            If the ranks disagree.
        """
        self._check_scope()
        if not self._sums:
            raise ValueError(
                f"The metric {self.name!r} has no result before its first update_state."
            )
        strategy = _strategy_of(self)
        if strategy is None:
            sums = self._own_sums()
        else:
            context.mode_for(strategy, f"The metric {self.name!r}")
            sums = dict(zip(self._sums, self._reduced_sums(), strict=True))
        return self._compute({what: np.float64(host_copy(array)) for what, array in sums.items()})

    def _own_sums(self) -> dict[str, Array]:
        return {what: variable.values[0] for what, variable in self._sums.items()}

    @context.collective("result", of=_ranks)
    def _reduced_sums(self) -> list[Array]:
        """Return the sums over all replicas. **Collective**."""
        strategy, kind = _strategy_of(self), f"{type(self).__name__}.result"

        def reduced() -> list[Array]:
            with context.replicas_of(strategy).call(kind, self.name) as call:
                return list(call.all_reduce(ReduceOp.SUM, [*self._own_sums().values()]))

        return list(context.replica_set_of(strategy).each(reduced)[0])

    def reset_state(self) -> None:
        """Start again from zero.

        **Collective** in cross-replica context and outside every scope; local inside
        `Strategy.run`.
        """
        self._check_scope()
        for variable in self._sums.values():
            variable.assign(np.zeros(variable.shape, variable.dtype), read_value=False)

    def __repr__(self) -> str:
        sums = ", ".join(f"{what} {variable.shape}" for what, variable in self._sums.items())
        return f"<{type(self).__name__} {self.name!r} {f'from sums {sums}' if sums else 'empty'}>"


class SumsByUpdate(Metric[Any]):
    """A metric that learns the shapes of its sums from its first update."""

    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self._strategy = get_strategy()

    def _add_computed(self, compute: Callable[[], Mapping[str, Any]]) -> None:
        """Add the sums that `compute` returns by name; **Collective** the first time."""
        self._check_scope()
        kind = f"{type(self).__name__.lstrip('_')}.update_state"
        if self._sums:
            sums = compute()
            made = {what: variable.shape for what, variable in self._sums.items()}
            if _shapes(sums) != made:
                raise ValueError(
                    f"{kind}: {self.name!r} has sums of the shapes {made} after its first update, "
                    f"but this update has {_shapes(sums)}."
                )
        else:
            context.mode_for(self._strategy, f"The metric {self.name!r}")
            with context.collectives_of(self._strategy).call(kind, self.name) as call:
                sums = compute()
                call.agree(str(_shapes(sums)))
            context.replica_set_of(self._strategy).once(lambda: self._make_sums(_shapes(sums)))
        self._add(*sums.values())

    def _make_sums(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        # Variables are created in cross-replica context, but the first update may be inside `run`.
        with context.entered(context.Frame(context.Kind.CROSS_REPLICA, self._strategy)):
            for what, shape in shapes.items():
                self._make_sum(what, shape)


def _shapes(sums: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {what: tuple(np.shape(each)) for what, each in sums.items()}


class _FromSums(SumsByUpdate):
    """The metric that `from_sums` returns."""

    def __init__(
        self, sums_fn: Callable[..., Any], result_fn: Callable[[Any], Any], name: str | None
    ) -> None:
        for what, fn in ("sums_fn", sums_fn), ("result_fn", result_fn):
            if not callable(fn):
                raise TypeError(f"from_sums: {what} must be a function, not {fn!r}.")
        super().__init__("from_sums" if name is None else name)
        self._sums_fn, self._result_fn = sums_fn, result_fn
        self._structure: nests.Structure | None = None

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add the result of ``sums_fn(*args, **kwargs)``. Local, except for the first call."""

        def compute() -> dict[str, Array]:
            local = [local_component(each) for each in args]
            named = {name: local_component(each) for name, each in kwargs.items()}
            paths, leaves, self._structure = nests.flatten_with_paths(
                self._sums_fn(*local, **named)
            )
            sums = {}
            for path, leaf in zip(paths, leaves, strict=True):
                array = as_values("sums_fn's result", leaf)
                check_real("the sums", array)
                sums[f"sums/{path}" if path else "sums"] = array.astype(np.float64)
            return sums

        self._add_computed(compute)

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        assert self._structure is not None
        return self._result_fn(nests.unflatten(self._structure, sums.values()))


def from_sums(
    sums_fn: Callable[..., Any], result_fn: Callable[[Any], Any], name: str | None = None
) -> Metric[Any]:
    """Return a metric whose result is a function of sums over all examples.

    Its ``update_state(*args, **kwargs)`` adds the result of ``sums_fn(*args, **kwargs)`` for a part
    of a batch. Its ``result()`` calls `result_fn` with the sums over all updates and replicas. So
    the result does not depend on how examples are split among replicas. Local; the first
    ``update_state`` is **Collective**, because it creates variables: every rank makes that call,
    even for an empty part.

    Parameters
    ----------
    sums_fn : callable
        Returns a number, an array, or a nest of them, always of the same shapes. For an empty part
        all must be 0. Sums are stored in float64.
    result_fn : callable
        Called with such a nest of NumPy scalars and arrays. Returns the result.
    name : str, optional
        Name of the metric. Default: ``"from_sums"``.

    Returns
    -------
    Metric
        A new metric.

    Raises
    ------
    TypeError
        If `sums_fn` or `result_fn` is not a function.

    Examples
    --------
    >>> def sums_fn(x):
    ...     return {"square": (x**2).sum(), "count": x.size}
    >>> rms = ms.metrics.from_sums(sums_fn, lambda sums: (sums["square"] / sums["count"]) ** 0.5)
    >>> rms.update_state(np.array([3.0, 3.0]))
    >>> float(rms.result())
    3.0
    """
    return _FromSums(sums_fn, result_fn, name)


def as_values(what: str, value: Any) -> Array:
    """Return an argument of a metric (array, tensor, sequence or number) as an array."""
    if type(value) is np.ndarray:
        return value
    value = local_component(value)
    return np.asarray(value) if isinstance(value, list | tuple) else as_array(what, value)


def weighted(values: Any, sample_weight: Any) -> tuple[float, float]:
    """Return the weighted sum of `values` and the sum of the weights, both in float64."""
    values = as_values("values", values)
    check_real("values", values)
    if sample_weight is None:
        return float(values.sum(dtype=np.float64)), float(values.size)
    xp = namespace_of(values)
    values = values.astype(np.float64, copy=False)
    weights = weights_of(values, sample_weight)
    return float(xp.sum(values * weights)), float(xp.sum(weights))


def weights_of(values: Array, sample_weight: Any) -> Array:
    """Return the weight of each of `values` in float64, by default 1."""
    xp = namespace_of(values)
    if sample_weight is None:
        ones: Array = xp.ones(values.shape)
        return ones
    weights = as_values("sample_weight", sample_weight)
    check_real("sample_weight", weights)
    weights = weights.astype(np.float64, copy=False)
    try:
        broadcast: Array = xp.broadcast_to(beside(weights, values), values.shape)
    except ValueError:
        raise ValueError(
            f"sample_weight of shape {tuple(weights.shape)} cannot be broadcast to values of "
            f"shape {tuple(values.shape)}."
        ) from None
    return broadcast


def beside_first_axes(sample_weight: Any, ndim: int) -> Any:
    """Return the weights with axes of length 1 appended, up to `ndim` axes."""
    if sample_weight is None:
        return None
    weights = as_values("sample_weight", sample_weight)
    return weights.reshape(weights.shape + (1,) * (ndim - weights.ndim))


def as_pair(kind: str, y_true: Any, y_pred: Any, remedy: str) -> tuple[Array, Array]:
    """Return `y_true` and `y_pred`, which must have the same shape, as arrays on one device."""
    truth, guess = as_values("y_true", y_true), as_values("y_pred", y_pred)
    if type(truth) is np.ndarray is type(guess) and truth.shape == guess.shape:
        return truth, guess
    if tuple(truth.shape) != tuple(guess.shape):
        raise ValueError(
            f"{kind} compares arrays of one shape: y_true has the shape {tuple(truth.shape)}, "
            f"y_pred {tuple(guess.shape)}. {remedy}"
        )
    return truth, beside(guess, truth)


def check_real(what: str, array: Array) -> None:
    """Raise an error unless `array` contains real numbers."""
    if not _is_real(array.dtype):
        raise TypeError(f"{what} of a metric must be real numbers, not of dtype {array.dtype}.")


def class_numbers(kind: str, what: str, labels: Array) -> Array:
    """Return `labels`, which must be of an integer dtype."""
    if labels.shape == (0,) and labels.dtype == np.float64:
        return labels.astype(np.int64)  # an empty sequence has no dtype
    if labels.dtype.kind not in "iu":
        raise TypeError(
            f"{kind} takes class numbers of an integer dtype, but {what} has the dtype "
            f"{labels.dtype}. Cast it first."
        )
    return labels


@functools.lru_cache
def _is_real(dtype: np.dtype) -> bool:
    return bool(np.can_cast(dtype, np.float64, "same_kind"))


def beside(array: Array, other: Array) -> Array:
    """Return `array` in the same memory as `other`, on the host or the device."""
    return host_view(array) if is_on_host(other) else namespace_of(other).asarray(array)
