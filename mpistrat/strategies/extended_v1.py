"""Version 1 of tf.distribute: methods of StrategyExtended, and a strategy that always raises."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpistrat import context, nests
from mpistrat.arguments import as_array
from mpistrat.arrays import Array, Device, place
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.context import call_in_update_context
from mpistrat.errors import ContextError, OutOfRangeError, warn_deprecated
from mpistrat.options import ReduceOpLike
from mpistrat.strategies.destinations import Destination, parse_destination
from mpistrat.values import Mirrored, PerReplica, unwrap_mirrored
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.data.dataset import Dataset
    from mpistrat.data.iterators import ElementIterator, Optional
    from mpistrat.layout import Layout


class MultiStepContext:
    """Outputs of the last of several steps.

    Parameters
    ----------
    strategy : Strategy
        Strategy that runs the steps.
    initial_outputs : dict, optional
        Outputs before the first step, by name.

    Examples
    --------
    >>> outputs = ms.MultiStepContext(strategy)
    >>> outputs.set_last_step_output("loss", 1.0, "mean")
    >>> outputs.set_non_tensor_output("phase", "warm-up")
    >>> outputs.last_step_outputs, outputs.non_tensor_outputs
    ({'loss': np.float64(1.0)}, {'phase': 'warm-up'})
    """

    def __init__(self, strategy: Any, initial_outputs: Mapping[str, Any] | None = None) -> None:
        self._strategy = strategy
        self._last_step_outputs = dict(initial_outputs or {})
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """Outputs that the last step passed to `set_last_step_output`, by name. Local."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """Outputs that were passed to `set_non_tensor_output`, by name. Local."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOpLike | None = None
    ) -> None:
        """Store `output` as this step's output of that name.

        **Collective** if `reduce_op` is given, else local.

        Parameters
        ----------
        name : str
            Key of the output in `last_step_outputs`.
        output : nest
            Arrays, numbers or distributed values if `reduce_op` is given; otherwise any object.
        reduce_op : ReduceOp or str, optional
            How to reduce `output` over replicas. ``None`` stores it unchanged.

        Raises
        ------
        ContextError
            In replica context without `reduce_op`: the replicas' outputs would differ.
        """
        frame = context.current()
        if frame is None or frame.kind is not context.Kind.REPLICA:
            if reduce_op is not None:
                output = self._strategy.reduce(reduce_op, output)
            self._last_step_outputs[name] = output
            return
        if reduce_op is None:
            raise ContextError(
                f"set_last_step_output({name!r}) inside strategy.run needs a reduce_op, because "
                "each replica has its own output. Pass one, or call it in cross-replica "
                "context."
            )
        frame.replica_context.merge_call(
            lambda strategy, value: self.set_last_step_output(name, value, reduce_op), (output,)
        )

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Store `output` unchanged. Local.

        Parameters
        ----------
        name : str
            Key of the output in `non_tensor_outputs`.
        output : object
            Any object.
        """
        self._non_tensor_outputs[name] = output


class InputIterator:
    """An iterator that starts again when it is initialised.

    Parameters
    ----------
    dataset : iterable
        A distributed dataset, or a plain one under the default strategy.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        # The first get_next creates it, so that initialising a new iterator skips no epoch.
        self._iterator: Any = None

    def __repr__(self) -> str:
        return f"<InputIterator of {self._dataset!r}>"

    def initialize(self) -> None:
        """Start the next epoch, or the first one. Local."""
        self._iterator = None

    def get_next(self) -> Any:
        """Return the next element.

        Returns
        -------
        nest
            The element.

        Raises
        ------
        OutOfRangeError
            At the end of the epoch.
        """
        element = self.get_next_as_optional()
        if not element.has_value():
            raise OutOfRangeError("The pass has ended. Call initialize() for the next.")
        return element.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` with the next element, or an empty one at the end of the epoch."""
        from mpistrat.data.iterators import Optional

        if self._iterator is None:
            self._iterator = iter(self._dataset)
        try:
            return Optional(next(self._iterator))
        except StopIteration:
            return Optional()


class ExtendedV1(abc.ABC):
    """Methods for steps on iterators, non-slot variables and roles of ranks."""

    _collectives: Collectives
    _layout: Layout
    """The replica of this rank, and which shard of it this rank is."""
    _container: Any

    @property
    def device(self) -> Device:
        """Device on which the replica of this rank computes. Local."""
        return self._collectives.device

    @property
    def xp(self) -> Any:
        """Array namespace of the replica's device: NumPy's or CuPy's. Local."""
        return self.device.namespace()

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes must never change: always false. Local."""
        return False

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Device string of each rank's replica. Local."""
        device_of = self._collectives.capabilities.device_of
        return tuple(device_of(rank).on_task(rank) for rank in range(self._layout.num_ranks))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Device strings of the variables: the devices of the replicas. Local."""
        return self.worker_devices

    @abc.abstractmethod
    def _check_locality(self, what: str, place: Any) -> None:
        """Check that `place` is a variable of this strategy or its non-slot devices."""

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each rank runs the program by itself: always true. Local."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether this rank initialises its variables: always true. Local."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints: true on rank 0. Local."""
        return self._layout.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank reports progress: true on rank 0. Local."""
        return self._layout.rank == 0

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> Dataset:
        """Return a dataset of the examples along the first axis of a nest of arrays. Local.

        Parameters
        ----------
        numpy_input : nest of numpy.ndarray
            Arrays of equal length along axis 0. A list of arrays is stacked to one array, as in
            tf.data.
        session : None
            Must be ``None``: there are no sessions.

        Returns
        -------
        Dataset
            A dataset that is neither batched nor shuffled.

        Raises
        ------
        ContextError
            Inside a replica function.
        ValueError
            If a `session` is given, or the arrays of a list differ in shape.

        Examples
        --------
        >>> strategy.extended.experimental_make_numpy_dataset(np.zeros((5, 2)))
        <Dataset from_arrays(float64 (5, 2)), 5 examples>
        """
        context.require_cross_replica(self._container, "experimental_make_numpy_dataset")
        if session is not None:
            raise ValueError(
                "experimental_make_numpy_dataset: there are no sessions here. Leave out the "
                "argument session."
            )
        from mpistrat.data.dataset import Dataset

        return Dataset.from_arrays(nests.map_nest(_stacked, numpy_input, atoms=(list,)))

    def broadcast_to(
        self, array: npt.ArrayLike | Mirrored[Any], destinations: Destination
    ) -> Mirrored[Array]:
        """Return rank 0's `array` as a `Mirrored` value.

        **Collective**: every rank makes the call, with an array of the same shape and dtype.

        Parameters
        ----------
        array : array or number
            Rank 0's contents are sent; the others only have the same shape and dtype.
        destinations : Variable, distributed value, array or device string
            Place of the result. A device string may not name a single rank.

        Returns
        -------
        Mirrored
            Rank 0's array, on every rank.

        Raises
        ------
        TypeError, ValueError
            If the value or the destination is of a different kind.

        Examples
        --------
        >>> strategy.extended.broadcast_to(np.ones(2), "cpu:0")
        Mirrored(array([1., 1.]))
        """
        context.require_cross_replica(self._container, "broadcast_to")
        # Before the call, because reading the variable may itself be a collective.
        array = array.value() if isinstance(array, Variable) else array
        with self._collectives.call("broadcast_to") as call:
            where = parse_destination(call, destinations, self._container)
            if where is not None and where.task is not None:
                raise ValueError(
                    f"broadcast_to: the destination {destinations!r} is on one rank, but the value "
                    f'goes to all. Use "{where.kind}:{where.index}".'
                )
            if isinstance(array, PerReplica):
                raise ValueError(
                    "broadcast_to sends one array from rank 0 to all ranks, but got a PerReplica: "
                    "forgot strategy.run? Pass numpy.asarray(value) to send rank 0's component, or "
                    "combine the components with strategy.reduce first."
                )
            value = broadcast(call, as_array(call.kind, unwrap_mirrored(array)))
        return Mirrored(value if where is None else place(value, Device(where.kind, where.index)))

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: ElementIterator | InputIterator,
        iterations: int = 1,
        initial_loop_values: dict[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call ``fn(context, inputs)`` `iterations` times in cross-replica context. Deprecated.

        **Collective**: every rank makes the call.

        Parameters
        ----------
        fn : callable
            Stores its outputs in the `MultiStepContext` that it gets.
        iterator : iterator of a distributed dataset
            Its next element is passed as `inputs`.
        iterations : int
            Number of steps; not negative.
        initial_loop_values : dict, optional
            Outputs before the first step, by name.

        Returns
        -------
        MultiStepContext
            The outputs of the last step.

        Raises
        ------
        ValueError
            If `iterations` is negative.
        OutOfRangeError
            If the data end before the last step.
        """
        warn_deprecated("experimental_run_steps_on_iterator", "Use Strategy.run in a loop.")
        context.require_cross_replica(self._container, "experimental_run_steps_on_iterator")
        if iterations < 0:
            raise ValueError(f"iterations must be at least 0, not {iterations}.")
        outputs = MultiStepContext(self._container, initial_loop_values)
        with context.entered(context.Frame(context.Kind.CROSS_REPLICA, self._container)):
            for _ in range(iterations):
                fn(outputs, iterator.get_next())
        return outputs

    def read_var(self, v: Variable) -> Array:
        """Return the current value of a variable over all replicas.

        **Collective** for a SyncOnRead variable, whose components it aggregates, and for a sharded
        one; else local.

        Parameters
        ----------
        v : Variable
            A variable of this strategy.

        Returns
        -------
        array
            The result of ``v.read_value()``.

        Examples
        --------
        >>> with strategy.scope():
        ...     strategy.extended.read_var(ms.Variable(2.0))
        array(2.)
        """
        context.require_cross_replica(self._container, "read_var")
        return v.read_value()

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the devices of variables that are not slots: those of every replica. Deprecated.

        Local.

        Parameters
        ----------
        var_list : sequence of Variable
            Ignored, because every variable is on every replica.

        Returns
        -------
        tuple of str
            Device strings.
        """
        warn_deprecated("non_slot_devices", "Every variable lives on every replica.")
        return self.parameter_devices

    def update_non_slot(
        self,
        colocate_with: Variable | tuple[str, ...],
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` in update context, where writes are local. Deprecated.

        **Collective**: every rank makes the call, but it sends nothing.

        Parameters
        ----------
        colocate_with : tuple of str or Variable
            The result of `non_slot_devices`, or a variable of this strategy.
        fn : callable
            Called on each rank with the arguments.
        args, kwargs : sequence, mapping
            Arguments of `fn`. A `Mirrored` value is passed as this rank's component.
        group : bool
            Whether to return the result merged, or a tuple with this rank's.

        Returns
        -------
        nest or tuple
            The result of `fn`, with a `Mirrored` for each array or number; this rank's results in a
            tuple if `group` is false.

        Raises
        ------
        ValueError
            If an argument holds a `PerReplica`, or for any other `colocate_with`.
        ContextError
            Inside a replica function.
        """
        warn_deprecated("update_non_slot", "Use update(variable, fn) for each variable.")
        context.require_cross_replica(self._container, "update_non_slot")
        self._check_locality("update_non_slot", colocate_with)
        return call_in_update_context(
            self._container, "update_non_slot", fn, (), args, kwargs, group
        )


def _stacked(leaf: Any) -> Any:
    return np.stack(leaf) if isinstance(leaf, list) else leaf


class _Refusing:
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks these up
            raise AttributeError(name)
        self()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "ParameterServerStrategyV1 belongs to TensorFlow's Estimators, which mpistrat has not. "
            "Its second version is ParameterServerStrategy(num_ps=0, variable_partitioner=None, "
            "comm=None) with coordinator.ClusterCoordinator(strategy)."
        )

    def __repr__(self) -> str:
        return "<ParameterServerStrategyV1, which is not here>"


ParameterServerStrategyV1 = _Refusing()
"""Placeholder for the first version of TensorFlow's parameter server. Its attributes and calls
raise `NotImplementedError`, which names the second version."""
