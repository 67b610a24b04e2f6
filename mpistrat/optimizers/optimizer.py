"""Optimizer base class: reduce the gradients, then update each variable in place."""

from __future__ import annotations

import abc
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import context, user_warnings
from mpistrat.arguments import as_finite, as_real, format_value, is_constant
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.optimizers.agreed_step import (
    RATE,
    AgreedStep,
    PreparedStep,
    PreparedSteps,
    take_prepared_step,
)
from mpistrat.optimizers.loss_scale import LossScale
from mpistrat.optimizers.sharded_slots import is_divided, summed_in_parts
from mpistrat.optimizers.slots import (
    Slots,
    check_can_shard_slots,
    zero_slot,
)
from mpistrat.optimizers.step_gradients import (
    agree_on_gradients,
    check_gradients,
    check_owners,
    check_scope,
    listed,
    owner_among,
    split_pairs,
    sum_over_replicas,
    variables_in,
    warn_of_nan,
)
from mpistrat.optimizers.update import Rule, Target
from mpistrat.options import VariableAggregation
from mpistrat.strategies import get_strategy
from mpistrat.strategies.one_replica import default_strategy
from mpistrat.system.hints import OPTIMIZER_ARGUMENTS, Hinted
from mpistrat.system.text import brief
from mpistrat.trackable import Dependent, Trackable
from mpistrat.variables import Variable
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.variable import placement_of, storage_of

_OTHER_NAMES = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "betas": "beta_1 and beta_2",
    "clipnorm": "global_clipnorm",
    "param_groups": "learning_rate, which all variables share",
}
"""Attributes of PyTorch's optimizers. Python would accept an assignment, without any effect."""


@context.collective("apply_gradients", writes=True, of=context.collectives_of)
def _apply_in_unit(
    strategy: context.Strategy, optimizer: Optimizer, pairs: Any, skip_gradients_aggregation: bool
) -> None:
    """Call `Optimizer.apply_gradients` within a unit of the ranks of `strategy`."""
    optimizer.apply_gradients(pairs, skip_gradients_aggregation)


class Optimizer(Hinted, Trackable, abc.ABC):
    """Base of optimizers.

    **Collective** in a strategy's scope, because it creates the variable `iterations`.

    In a checkpoint, the slot ``momentum`` of the variable ``model/kernel`` has the path
    ``optimizer/momentum/model/kernel``, whatever the variable's name is. Slots of a variable that
    is not in the checkpoint are stored under the variable's name, which must then be unique. Copy
    an optimizer together with its variables, ``copy.deepcopy((variables, optimizer))``, so that
    the copy keeps its slots.

    Parameters
    ----------
    learning_rate : float or callable
        Learning rate, at least 0. A callable is called with the step number and returns the rate.
    weight_decay : float, optional
        Decoupled weight decay: before each step a variable shrinks by ``learning_rate *
        weight_decay`` of itself (Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
        2019). Of `IndexedSlices` only the named rows shrink.
    global_clipnorm : float, optional
        Largest norm of all gradients of a step together, summed over replicas. Gradients with a
        larger norm are scaled down to it.
    loss_scale : LossScale, optional
        Factor that the gradients have been multiplied by. All ranks skip a step if its gradients
        are not finite.
    **parameters
        Parameters of the subclass, which become attributes.

    Raises
    ------
    TypeError
        If a parameter has the wrong type.
    ValueError
        For a value out of range.
    CollectiveMismatchError
        If the ranks disagree on a parameter. A program may change a parameter between two steps;
        the next step checks it again.

    Examples
    --------
    >>> with strategy.scope():
    ...     weight, sgd = ms.Variable(np.zeros(2)), ms.optimizers.SGD(0.5, momentum=0.9)
    >>> gradient = np.ones(2) / strategy.num_replicas_in_sync
    >>> strategy.run(lambda: sgd.apply_gradients([(gradient, weight)]))
    >>> weight.numpy(), sgd.slot(weight, "momentum").numpy()
    (array([-0.5, -0.5]), array([0.5, 0.5]))
    """

    sharded_slots = False
    """Whether each rank keeps the slots for only a part of every mirrored variable."""

    _argument_hints = OPTIMIZER_ARGUMENTS

    @context.made_in_scope
    def __init__(
        self,
        learning_rate: float | Callable[[int], float],
        weight_decay: float | None = None,
        global_clipnorm: float | None = None,
        loss_scale: LossScale | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        parameters |= {
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "global_clipnorm": global_clipnorm,
            "loss_scale": loss_scale,
        }
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.global_clipnorm = global_clipnorm
        self.loss_scale = loss_scale
        vars(self).update(parameters)
        self._constant_parameters = [each for each in parameters if each != "learning_rate"]
        self._parameters_of = operator.attrgetter("learning_rate", *self._constant_parameters)
        with context.collectives_of(get_strategy()).call(type(self).__name__) as call:
            self._check_parameters()
            call.agree(*self._format_parameters(parameters))
        self.iterations = Variable(
            InitialValue.replicated(np.int64(0)),
            trainable=False,
            name="iterations",
            # Not NONE, so that a program may also assign the counter inside of run.
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )
        self._attach_child("iterations", self.iterations)
        if loss_scale is not None:
            self._attach_child("loss_scale", loss_scale)
        self._slots = Slots()
        self._prepared = PreparedSteps()
        self._checked: tuple[Sequence[Any], str] = (), ""
        self._remote_targets: dict[int, tuple[Target, list[Any]]] = {}
        """Targets for parts of variables that this rank stores for other ranks."""
        get_strategy().extended._note_optimizer(self)

    def _check_parameters(self) -> None:
        """Raise an error for parameters out of range."""
        kind = type(self).__name__
        if not callable(self.learning_rate):
            as_finite(f"{kind}: learning_rate", self.learning_rate, 0)
        if self.weight_decay is not None:
            as_finite(f"{kind}: weight_decay", self.weight_decay, 0)
        if self.global_clipnorm is not None:
            clipnorm = as_real(f"{kind}: global_clipnorm", self.global_clipnorm)
            if not clipnorm > 0:
                raise ValueError(f"{kind}: global_clipnorm must be above 0, not {clipnorm}.")
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise TypeError(f"{kind}: loss_scale must be a LossScale, not {self.loss_scale!r}.")
        if not isinstance(self.sharded_slots, bool):
            raise TypeError(f"{kind}: sharded_slots must be a bool, not {self.sharded_slots!r}.")
        if self.sharded_slots:
            check_can_shard_slots(kind, get_strategy())

    def _format_parameters(self, names: Iterable[str]) -> list[str]:
        """Return the parameters that were set, in the form that the ranks compare."""
        values = [(name, getattr(self, name)) for name in names]
        return [
            f"{name}={value!r}" if isinstance(value, LossScale) else f"{name}={format_value(value)}"
            for name, value in values
            if value is not None
        ]

    def __repr__(self) -> str:
        given = ((name, getattr(self, name)) for name in self._constant_parameters)
        parameters = [f"learning_rate={brief(self.learning_rate)}"]
        shown = [(name, each) for name, each in given if each is not None and each is not False]
        parameters += [f"{name}={brief(each)}" for name, each in shown]
        done = self.iterations._shown_values()
        parameters += [] if done is None else [f"iterations={done}"]
        return f"<{type(self).__name__} {' '.join(parameters)}>"

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Update each variable by its gradient.

        In replica context the gradients are first summed over replicas, small ones in one message.
        In cross-replica context, and outside every scope with the variables of a strategy, the
        gradients must already be the same on all ranks. The ranks then compare the values of host
        arrays, but only the shapes and dtypes of device arrays. **Collective**: every rank passes
        the same variables in the same order. Under `ParameterServerStrategy` it is not: each call
        in a closure is a step by its own gradients.

        Parameters
        ----------
        grads_and_vars : iterable of (gradient, Variable)
            Gradients are arrays or sequences of the variable's shape, `IndexedSlices`, or
            ``None``, which skips the variable with a warning. They are cast to the variable's
            dtype, within its kind, before they are summed.
        skip_gradients_aggregation : bool
            Whether the gradients are already summed over replicas.

        Raises
        ------
        ValueError
            If the list is empty, has no gradient or contains a variable twice, if a shape does not
            match, if a gradient that is not summed is a `PerReplica`, or if the optimizer or a
            variable was created outside the scope.
        TypeError
            If a dtype does not fit, or a variable does not have a floating dtype.
        IndexError
            If `IndexedSlices` have an index out of range.
        ContextError
            If a variable, or the optimizer, belongs to a different strategy.
        CollectiveError
            If the ranks disagree, for example about which gradient is ``None``.
        """
        frame = context.current()
        strategy = default_strategy() if frame is None else frame.strategy
        is_list = type(grads_and_vars) in (zip, list)  # the usual case; `listed` checks the others
        # A list, because a unit of an elastic job may read the pairs a second time.
        pairs = list(grads_and_vars) if is_list else listed(grads_and_vars)
        # Reads attributes instead of calling `context.is_default`, because every step runs this.
        extended: Any = strategy.extended
        if extended._is_default:
            strategy = owner_among((*variables_in(pairs), self.iterations), strategy)
            extended = strategy.extended
        if extended._is_remote:
            extended._apply_gradients(self, strategy, pairs)
            return
        is_ours = frame is not None and frame.strategy is strategy
        is_replica = is_ours and frame.replica_context is not None  # type: ignore[union-attr]
        summed = is_replica and not skip_gradients_aggregation
        # Inside `run`, the whole run is already the unit.
        if not is_replica and context.collectives_of(strategy).needs_unit:
            _apply_in_unit(strategy, self, pairs, skip_gradients_aggregation)
            return
        replicas = extended._replicas
        prepared: PreparedStep | None = None
        gradients: list[Any] = []
        if summed:
            steps, counter = self._prepared, self.iterations
            prepared, gradients = steps.find(replicas.channel, strategy, counter, pairs)
            if prepared is not None and user_warnings.empty_parts:
                warn_of_nan(gradients, prepared.variables)
            if prepared is not None and take_prepared_step(self, prepared, gradients):
                return
        with replicas.call(f"{type(self).__name__}.apply_gradients") as call:
            step = self._agreed_step(call, strategy, pairs, summed, prepared, gradients)
        # After the call has ended, because a step may call collectives: for new slots, norms, or
        # weights of other ranks. Once per rank, because its replicas share the variables.
        extended._replica_set.once(step)

    def _agreed_step(
        self,
        call: CollectiveCall,
        strategy: Any,
        pairs: Any,
        summed: bool,
        prepared: PreparedStep | None,
        gradients: list[Any],
    ) -> Callable[[], None]:
        """Return a function that takes the step, once the ranks agree on it. **Collective**."""
        if self.loss_scale is not None:  # the program may have replaced it since the last step
            check_owners(call.kind, strategy, self.loss_scale._of_strategy())
        parameters = self._agreed_parameters()
        has_changed = prepared is not None and prepared.parameters != parameters
        if prepared and has_changed and is_divided(self, prepared.variables):
            prepared = None  # the slots do not exist yet
        variables: Sequence[Variable] = () if prepared is None else prepared.variables
        if prepared is None:
            gradients, variables = self._checked_pairs(call.kind, strategy, pairs, summed)
        scale = 1.0 if self.loss_scale is None else self.loss_scale._divisor()
        number = int(storage_of(self.iterations) if prepared is None else prepared.iterations)
        # Before the ranks agree: if a schedule raises on one rank, all ranks then raise, and no
        # gradient has been summed.
        rate = self._rate(number)
        # Not in the signature, whose digest is computed only once: a schedule changes the rate in
        # each step.
        call.include(rate, f"{RATE} {rate}")
        unsummed: list[int] = []
        if prepared is not None:
            if has_changed:
                prepared.prepare(call, gradients, parameters)
            settled = prepared.reduction.all_reduce(call, gradients, lends=True)
        elif summed:
            unsummed = summed_in_parts(call, self, gradients, variables)
            settled = sum_over_replicas(call, gradients, variables, parameters, unsummed)
            if not is_divided(self, variables):
                counter = self.iterations
                self._prepared.keep(call, strategy, gradients, variables, counter, parameters)
        else:
            settled = agree_on_gradients(call, gradients, variables, parameters)
        return AgreedStep(
            self, strategy, prepared, settled, variables, unsummed, rate, number, scale, summed
        ).take

    def _checked_pairs(
        self, kind: str, strategy: Any, pairs: Any, summed: bool
    ) -> tuple[list[Any], list[Variable]]:
        """Return the checked gradients and their variables."""
        gradients, variables = split_pairs(kind, pairs)
        check_scope(f"The optimizer {self!r}", self.iterations)
        check_owners(kind, strategy, [*variables, self.iterations])
        gradients = check_gradients(kind, gradients, variables, summed)
        each = zip(gradients, variables, strict=True)
        missing = [variable.name for gradient, variable in each if gradient is None]
        if missing:
            warnings.warn(f"No gradient for the variables {missing}: skipped.", stacklevel=4)
        return gradients, variables

    def _agreed_parameters(self) -> str:
        """Check the parameters; return all but the rate, in the form that the ranks compare."""
        values = self._parameters_of(self)
        last, formatted = self._checked
        # For constants, identity is enough, and takes less time than formatting them in each step.
        # Parameters that can change in place are never kept.
        if len(values) == len(last) and all(map(operator.is_, values, last)):
            return formatted
        self._check_parameters()
        formatted = ", ".join(self._format_parameters(self._constant_parameters))
        self._checked = (values if all(map(is_constant, values)) else ()), formatted
        return formatted

    def _rate(self, step: int) -> float:
        rate = self.learning_rate
        if not callable(rate):
            return float(rate)
        return as_finite(f"{type(self).__name__}: learning_rate({step})", rate(step), 0)

    @property
    @abc.abstractmethod
    def _rule(self) -> Rule:
        """The update of each element."""

    @abc.abstractmethod
    def _constants(self, rate: float, step: int) -> tuple[float, ...]:
        """Return the constants of the rule for the step number `step`, from 0."""

    def slot(self, variable: Variable, name: str) -> Variable:
        """Return the slot `name` of `variable`, such as ``"momentum"``. Local.

        Parameters
        ----------
        variable : Variable
            A variable that the optimizer has updated.
        name : str
            Name of the slot.

        Returns
        -------
        Variable
            The slot, with a shape like the variable's.

        Raises
        ------
        KeyError
            If it does not exist yet: the first `apply_gradients` creates slots, or a checkpoint
            restores them.
        """
        if not placement_of(variable).is_here:
            self._learn_slots()
        slot = self._slots.find(variable, name)
        if slot is None:
            raise KeyError(
                f"{type(self).__name__} keeps no slot {name!r} for the variable "
                f"{variable.name!r}, at least not before the first apply_gradients."
            )
        return slot

    def _targets(self, variables: Sequence[Variable]) -> list[Target]:
        """Return the memory that a step on `variables` writes to."""
        return [self._target(variable, self._rule.kernel.slots) for variable in variables]

    def _deferred_slots(self) -> Mapping[str, Callable[[Variable], Variable]]:
        """Return the functions that create slots, by name."""
        if not placement_of(self.iterations).is_here:
            makers: Mapping[str, Callable[[Variable], Variable]]
            makers = self.iterations.strategy.extended._slot_makers(self)
            return makers
        return {
            name: functools.partial(zero_slot, name=name, is_sharded=self.sharded_slots)
            for name in self._rule.kernel.slots
        }

    def _checkpoint_dependents(self) -> list[Dependent]:
        if not placement_of(self.iterations).is_here:
            self._learn_slots()
        return super()._checkpoint_dependents()

    def _learn_slots(self) -> None:
        """Register the slots that the holders of remote variables have created."""
        extended = self.iterations.strategy.extended
        if not extended._is_answered():
            return
        for name, slot, variable in extended._find_slots(self):
            if self._slots.find(variable, name) is None:
                self._attach_child(name, slot, of=variable)

    def _attach_child(self, name: str, child: object, *, of: object = None) -> None:
        """Add a child. If `of` is given, the child is the slot `name` of that variable."""
        # **Collective** if a restore is waiting for the child, else **Local**.
        super()._attach_child(name, child, of=of)
        if isinstance(of, Variable) and isinstance(child, Variable):
            self._slots.add(of, name, child)

    def _target(self, variable: Variable, names: tuple[str, ...]) -> Target:
        """Return the memory of `variable` and its slots `names`, which are created if missing."""
        target = self._slots.known_target(variable, names)
        if target is None:
            for name in names:
                if self._slots.find(variable, name) is None:
                    slot = zero_slot(variable, name, self.sharded_slots)
                    self._attach_child(name, slot, of=variable)
            target = self._slots.target(variable, names)
        return target

    if not TYPE_CHECKING:  # type checkers report attributes that are not declared

        def __setattr__(self, name: str, value: Any) -> None:
            # Classes of user programs may have attributes with these names.
            if name in _OTHER_NAMES and type(self).__module__.startswith("mpistrat."):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}, so setting it would change "
                    f"nothing. Set {_OTHER_NAMES[name]}."
                )
            super().__setattr__(name, value)
