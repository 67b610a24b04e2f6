"""Assertions for tests on several ranks, and a conformance suite that strategies subclass."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.comm.ops import combine
from mpistrat.comm.wire import accumulator_dtype, cast, wire_dtype
from mpistrat.data import Dataset
from mpistrat.errors import ContextError
from mpistrat.metrics import Mean, from_sums
from mpistrat.optimizers import SGD, ExponentialMovingAverage, GradientAccumulator
from mpistrat.options import (
    InputContext,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import (
    Strategy,
    get_replica_context,
    get_strategy,
    in_cross_replica_context,
)
from mpistrat.system.text import rank_list
from mpistrat.values import IndexedSlices, Mirrored
from mpistrat.variables import Variable


def assert_all_ranks(strategy: Strategy, condition: Any, message: str = "") -> None:
    """Fail on every rank if `condition` is false on any rank.

    **Collective**: every rank must make the call. If a plain ``assert`` fails on only one rank,
    the other ranks do not find out before their next collective.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose ranks make the call.
    condition : object
        The condition on this rank, of which only the truth value counts.
    message : str, optional
        Text at the beginning of the error message. Default: none.

    Raises
    ------
    AssertionError
        On every rank. It names the ranks on which `condition` is false.

    Examples
    --------
    >>> ms.testing.assert_all_ranks(strategy, strategy.size > 0, "there are ranks")
    """
    answers = context.collectives_of(strategy).gather_json(bool(condition), "assert_all_ranks")
    wrong = [rank for rank, answer in enumerate(answers) if not answer]
    if wrong:
        text = f"false on {rank_list(wrong)} of {len(answers)}"
        raise AssertionError(f"{message}: {text}" if message else text)


@contextlib.contextmanager
def refused(error: type[Exception], pattern: str = "") -> Iterator[None]:
    """Assert that the ``with`` block raises `error` with a text that matches `pattern`."""
    try:
        yield
    except error as caught:
        assert re.search(pattern, str(caught)), f"{pattern!r} is not in {str(caught)!r}"
    else:
        raise AssertionError(f"nothing was raised where {error.__name__} was expected")


def replica() -> ReplicaContext:
    """Return the context of the current replica."""
    found = get_replica_context()
    assert found is not None
    return found


def replica_id() -> int:
    """Return the number of the current replica."""
    return replica().replica_id_in_sync_group


def reduction_tree(rows: npt.ArrayLike) -> np.ndarray:
    """Return the sum of the rows of an array, bit for bit as replicas compute it. Local.

    The sum is a binary tree: neighbouring rows are added first, then neighbouring sums, and so on.
    A row without a neighbour is added in a later round. 16-bit floats are added in float32, and
    rounded once at the end.

    Parameters
    ----------
    rows : array of shape (num_replicas, *shape)
        Row i is the array that replica i passes to ``all_reduce("sum", ...)``.

    Returns
    -------
    numpy.ndarray
        The sum, with shape ``shape`` and the dtype of `rows`.

    Raises
    ------
    ValueError
        If there is no row.
    TypeError
        If values of this dtype cannot be added.

    Examples
    --------
    >>> rows = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
    >>> float(ms.testing.reduction_tree(rows)), float(rows.cumsum()[-1])
    (0.0, 1.0)
    """
    array = np.asarray(rows)
    if array.ndim == 0 or not len(array):
        raise ValueError(f"reduction_tree needs rows, not an array of the shape {array.shape}.")
    wire = wire_dtype(ReduceOp.SUM, array.dtype)
    flat = cast(array.reshape(len(array), -1), accumulator_dtype(wire), copy=True)
    total = combine(ReduceOp.SUM, flat).reshape(array.shape[1:])
    return cast(total, array.dtype.newbyteorder("="))


class StrategyTests:
    """Conformance tests for a strategy. Subclass it, and pytest collects the tests.

    The tests compute every expected value from the number of replicas, so they run with any number.

    Examples
    --------
    >>> class TestMyStrategy(ms.testing.StrategyTests):
    ...     def make_strategy(self):
    ...         return ms.OneDeviceStrategy()
    """

    distributes = True
    """False for a strategy that does not wrap values and variables, such as the default one."""
    repeats = False
    """True for a strategy that may repeat the function of `run`, as elastic jobs do."""

    def make_strategy(self) -> Strategy:
        """Return the strategy under test. Subclasses must override it. **Collective**.

        Returns
        -------
        Strategy
            A new strategy, over all ranks of the test.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make_strategy().")

    def setup_method(self) -> None:
        """Create the strategy before each test. **Collective**."""
        self.strategy = self.make_strategy()
        self.size = self.strategy.num_replicas_in_sync
        self.total = self.size * (self.size - 1) // 2

    def check_each(self, value: Any, expected: Callable[[int], Any]) -> None:
        """Assert on each replica that its component has the expected value. **Collective**.

        Parameters
        ----------
        value : PerReplica, Mirrored or object
            The value to check, as `run` returns it.
        expected : callable
            Takes the number of a replica, and returns the expected component as a Python number,
            list or other object.
        """

        def check(component: Any) -> None:
            wanted = expected(replica_id())
            found = component.tolist() if hasattr(component, "tolist") else component
            assert found == wanted, f"replica {replica_id()}: {found!r}, not {wanted!r}"

        self.strategy.run(check, args=(value,))

    def variable(self, value: Any, aggregation: str, on_read: bool = False) -> Variable:
        """Return a new variable of the strategy. **Collective**.

        Parameters
        ----------
        value : array_like
            The initial value.
        aggregation : str
            The name of a `mpistrat.VariableAggregation`, such as ``"SUM"``.
        on_read : bool
            Whether each replica has its own value, which is aggregated when it is read. Default:
            false.

        Returns
        -------
        Variable
            The variable, created in the scope of the strategy.
        """
        mode = VariableSynchronization.ON_READ if on_read else VariableSynchronization.AUTO
        with self.strategy.scope():
            return Variable(
                value, synchronization=mode, aggregation=VariableAggregation[aggregation]
            )

    def test_scope_makes_the_strategy_current(self) -> None:
        before = get_strategy()
        with self.strategy.scope() as inside:
            assert inside is self.strategy
            assert get_strategy() is self.strategy
            assert in_cross_replica_context()
            assert get_replica_context() is None
            with self.strategy.scope():
                assert get_strategy() is self.strategy
        assert get_strategy() is before

    def test_run_calls_once_in_replica_context(self) -> None:
        calls = []

        def fn(number: int, *, text: str) -> Any:
            calls.append(replica_id())
            assert not in_cross_replica_context()
            assert replica().strategy is self.strategy
            assert replica().num_replicas_in_sync == self.size
            assert text == "text"
            return {"a": [number + replica_id(), None], "b": replica_id() * 2.0}

        result = self.strategy.run(fn, args=(1,), kwargs={"text": "text"})
        self.check_each(result["a"][0], lambda number: 1 + number)
        self.check_each(result["b"], lambda number: number * 2.0)
        assert self.repeats or max(Counter(calls).values()) == 1

    def test_each_replica_gets_its_component_of_arguments(self) -> None:
        numbers = self.strategy.distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        result = self.strategy.run(
            lambda nest, y: nest["x"][0] + 10 * y,
            args=({"x": [numbers]},),
            kwargs={"y": numbers},
            options=RunOptions(),
        )
        self.check_each(result, lambda number: 11 * number)
        if self.distributes:
            largest = self.strategy.run(lambda: replica().all_reduce("max", numbers))
            self.check_each(largest, lambda _: self.size - 1)

    def test_run_refuses_bad_arguments_and_nesting(self) -> None:
        with refused(ValueError, "list or tuple"):
            self.strategy.run(print, args="text")

        def nested() -> None:
            with refused(ContextError, "merge_call"):
                self.strategy.run(int)
            with refused(ContextError, "merge_call"):
                self.strategy.reduce("sum", 1)

        self.strategy.run(nested)

    def test_merge_call_enters_cross_replica_context(self) -> None:
        def merge(strategy: Strategy, value: Any) -> Any:
            assert strategy is self.strategy
            assert in_cross_replica_context()
            return strategy.extended.reduce_to("sum", value, "cpu:0")

        result = self.strategy.run(lambda: replica().merge_call(merge, args=(replica_id(),)))
        self.check_each(result, lambda _: self.total)

        def merge_nest(strategy: Strategy, nest: Any, *, text: str) -> Any:
            return strategy.reduce("max", nest["x"][0]), nest["x"], text

        def fn() -> Any:
            number = replica_id()
            return replica().merge_call(merge_nest, ({"x": [number]},), {"text": "text"})

        largest, given, text = self.strategy.run(fn)
        self.check_each(largest, lambda _: self.size - 1)
        self.check_each(given[0], int)
        assert text == "text"

    def test_a_replica_context_ends_with_its_run(self) -> None:
        if self.distributes:
            kept: list[ReplicaContext] = []
            self.strategy.run(lambda: kept.append(replica()))
            with refused(ContextError, "run"):
                kept[0].all_reduce("sum", 1)

    def test_exceptions_pass_and_leave_the_strategy_usable(self) -> None:
        def fail() -> None:
            raise ZeroDivisionError("on purpose")

        before = get_strategy()
        with refused(ZeroDivisionError, "on purpose"):
            self.strategy.run(fail)
        assert get_strategy() is before
        self.check_each(self.strategy.run(replica_id), int)

    def test_all_reduce(self) -> None:
        def fn() -> Any:
            number = replica_id()
            slices = IndexedSlices(np.ones((1, 2)), np.array([number]))
            nest = {"x": np.full(3, number, np.float32), "y": [number + 1, slices]}
            begun = replica().start_all_reduce(ReduceOp.MAX, number)
            summed: Any = replica().all_reduce("sum", nest)
            largest = begun.wait()
            assert summed["x"].dtype == np.float32
            return summed["x"], summed["y"][0], summed["y"][1].indices, largest

        ones, numbers, indices, largest = self.strategy.run(fn)
        self.check_each(ones, lambda _: [self.total] * 3)
        self.check_each(numbers, lambda _: self.total + self.size)
        self.check_each(indices, lambda _: list(range(self.size)))
        self.check_each(largest, lambda _: self.size - 1)

    def test_what_replicas_send_each_other(self) -> None:
        size = self.size
        rows = np.array_split(np.arange(size + 1), size)

        def fn() -> None:
            context, own = replica(), replica_id()
            context.barrier()
            assert context.all_gather_object({"a": own}) == [{"a": each} for each in range(size)]
            assert context.broadcast_object(f"of {own}", size - 1) == f"of {size - 1}"
            sent = np.array([own]) if own == size - 1 else None
            assert context.broadcast(sent, size - 1).tolist() == [size - 1]
            whole = np.arange(size + 1)
            assert context.reduce_scatter("sum", whole).tolist() == (rows[own] * size).tolist()
            turned = context.all_to_all(np.arange(size) + 100 * own)
            assert turned.tolist() == [100 * each + own for each in range(size)]
            assert context.scatter(np.arange(size) * 3).tolist() == [3 * own]
            number = np.array([own])
            assert context.shift(number, 1, fill=-1).tolist() == [own - 1]
            assert context.shift(number, -1, periodic=True).tolist() == [(own + 1) % size]
            assert context.scan("sum", number).tolist() == [own * (own + 1) // 2]
            out = np.full(3, float(own))
            assert context.all_reduce("max", out, out=out) is out
            assert out.tolist() == [size - 1] * 3

        self.strategy.run(fn)

    def test_random_numbers_depend_on_key_and_replica(self) -> None:
        def expected(number: int) -> int:
            sequence = np.random.SeedSequence((3, 4), spawn_key=(2**32 - 2, number))
            return int(np.random.Generator(np.random.PCG64(sequence)).integers(2**40))

        drawn = self.strategy.run(lambda: int(replica().rng(3, 4).integers(2**40)))
        self.check_each(drawn, expected)

    def test_all_gather(self) -> None:
        def fn() -> Any:
            nest = {"a": np.full((replica_id(), 2), replica_id()), "b": [np.arange(2)]}
            gathered: Any = replica().all_gather(nest, 0)
            return gathered["a"][:, 0], gathered["b"][0]

        ragged, even = self.strategy.run(fn)
        rows = [number for number in range(self.size) for _ in range(number)]
        self.check_each(ragged, lambda _: rows)
        self.check_each(even, lambda _: [0, 1] * self.size)

    def test_gather_and_its_refusals(self) -> None:
        values = self.strategy.run(lambda: np.array([replica_id()]))
        assert self.strategy.gather(values, 0).tolist() == list(range(self.size))
        ragged = self.strategy.run(lambda: np.full((replica_id() % 3, 2), replica_id()))
        rows = [number for number in range(self.size) for _ in range(number % 3)]
        assert self.strategy.gather(ragged, 0)[:, 0].tolist() == rows
        numbers = self.strategy.run(lambda: float(replica_id()))
        for value, axis in [(numbers, 0), (values, 1)]:
            with refused(ValueError, "axis"):
                self.strategy.gather(value, axis)

    def test_reduce_over_replicas(self) -> None:
        values = self.strategy.run(
            lambda: {"a": np.full(2, replica_id()), "b": [replica_id() + 0.5]}
        )
        expected = {
            ReduceOp.SUM: self.total,
            ReduceOp.MEAN: self.total / self.size,
            ReduceOp.MIN: 0,
            ReduceOp.MAX: self.size - 1,
        }
        for op, number in expected.items():
            half = 0.5 * self.size if op is ReduceOp.SUM else 0.5
            reduced: Any = self.strategy.reduce(op, values)
            assert reduced["a"].tolist() == [number] * 2
            assert reduced["b"][0] == number + half

    def test_reduce_over_the_batch_axis(self) -> None:
        examples = self.strategy.run(lambda: np.arange(replica_id() + 1.0))
        joined = np.concatenate([np.arange(r + 1.0) for r in range(self.size)])
        assert self.strategy.reduce("sum", examples, axis=0) == joined.sum()
        np.testing.assert_allclose(self.strategy.reduce("mean", examples, axis=0), joined.mean())
        both = self.strategy.run(lambda: np.full((replica_id() + 1, 2), replica_id()))
        assert self.strategy.reduce("max", both, axis=(0, 1)) == self.size - 1
        with refused(ValueError, "axis 1"):
            self.strategy.reduce("sum", examples, axis=1)
        unknown: Any = "median"
        with refused(ValueError, "Unknown reduction"):
            self.strategy.reduce(unknown, examples, axis=0)

    def test_each_task_is_a_destination(self) -> None:
        if not self.distributes:
            return
        strategy = self.strategy
        value = strategy.run(lambda: np.full(2, replica_id() + 1.0))
        for task, device in enumerate(strategy.extended.worker_devices):
            reduced = strategy.extended.reduce_to("sum", value, device)
            if task == strategy.rank:
                assert reduced.tolist() == [self.total + self.size] * 2
            else:
                assert reduced is None
        variable = self.variable(np.zeros(2), "NONE")
        pairs: list[tuple[Any, Any]] = [(value, variable), (value, "cpu:0")]
        mirrored, placed = strategy.extended.batch_reduce_to("mean", pairs)
        assert isinstance(mirrored, Mirrored)
        assert mirrored.values[0].tolist() == placed.tolist() == [(self.size + 1) / 2] * 2
        assert not variable.numpy().any()

    def test_mirrored_variables(self) -> None:
        variable = self.variable(np.zeros(2), "SUM")
        self.strategy.run(lambda: variable.assign_add(np.full(2, replica_id() + 1.0)))
        assert variable.numpy().tolist() == [self.total + self.size] * 2
        variable.assign(np.ones(2))
        assert variable.numpy().tolist() == [1, 1]
        variable.assign_add(np.ones(2))
        variable.assign_sub(np.full(2, 4.0))
        assert variable.numpy().tolist() == [-2, -2]
        with refused(ValueError, "not broadcast"):
            variable.assign(1.0)
        assert self.strategy.extended.variable_created_in_scope(variable)

    def test_sync_on_read_variables(self) -> None:
        variable = self.variable(0.0, "SUM", on_read=True)
        assert not variable.trainable
        self.strategy.run(lambda: variable.assign_add(float(replica_id())))
        self.check_each(self.strategy.run(variable.read_value), float)
        assert variable.numpy() == self.total
        assert self.strategy.extended.read_var(variable) == self.total
        count, (quotient, rest) = self.variable(0, "SUM", on_read=True), divmod(-7, self.size)
        assert count.assign(-7) == -7
        shares = self.strategy.run(count.read_value)
        self.check_each(shares, lambda number: quotient + (number < rest))

    def test_update_writes_locally(self) -> None:
        variable = self.variable(1.0, "SUM")
        arguments = (Mirrored(2.0),)
        result = self.strategy.extended.update(
            variable, lambda v, x: v.assign_add(x), arguments, group=False
        )
        assert all(each == 3.0 for each in result)
        assert variable.numpy() == 3.0

    def test_values_from_a_function(self) -> None:
        values = self.strategy.distribute_values_from_function(
            lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
        )
        self.check_each(values, lambda number: (number, self.size))

    def test_batches_are_divided_over_replicas(self) -> None:
        batches = self.strategy.distribute_dataset(Dataset.range(7).batch(4))
        for _ in range(2):
            for batch, rows in zip(batches, ([0, 1, 2, 3], [4, 5, 6]), strict=True):
                share = -(-len(rows) // self.size)
                parts = [rows[n * share : (n + 1) * share] for n in range(self.size)]
                self.check_each(batch, parts.__getitem__)
                assert self.strategy.reduce("sum", batch, axis=0) == sum(rows)
                mean = self.strategy.reduce("mean", batch, axis=0)
                np.testing.assert_allclose(mean, np.mean(rows))

    def test_each_replica_may_have_a_data_set(self) -> None:
        def make(context: InputContext) -> Dataset:
            assert context.num_input_pipelines == context.num_replicas_in_sync == self.size
            batch_size = context.get_per_replica_batch_size(self.size)
            return Dataset.range(context.input_pipeline_id + 1).batch(batch_size)

        batches = self.strategy.distribute_datasets_from_function(make)
        for _ in range(2):
            steps = 0
            for step, batch in enumerate(batches):
                rows = [[step] if step <= number else [] for number in range(self.size)]
                self.check_each(batch, rows.__getitem__)
                steps += 1
            assert steps == self.size

    def test_steps_take_the_sum_of_gradients(self) -> None:
        variable = self.variable(np.ones(3), "NONE")
        with self.strategy.scope():
            sgd = SGD(0.5)
        for number in range(1, 4):  # the optimizer may use a prepared step after the first
            self.strategy.run(
                lambda: sgd.apply_gradients([(np.full(3, replica_id() + 1.0), variable)])
            )
            expected = 1 - 0.5 * number * (self.total + self.size)
            assert variable.numpy().tolist() == [expected] * 3
            assert sgd.iterations.numpy() == number

    def test_gradients_are_added_up(self) -> None:
        variable = self.variable(np.ones(3), "NONE")
        with self.strategy.scope():
            sgd, accumulator = SGD(0.5), GradientAccumulator([variable])

        def add(factor: float) -> None:
            accumulator.add([(np.full(3, factor * (replica_id() + 1)), variable)])

        for number, inside in enumerate([True, False, True], start=1):
            self.strategy.run(add, args=(1.0,))
            self.strategy.run(add, args=(3.0,))
            if inside:
                self.strategy.run(lambda: accumulator.apply(sgd))
            else:
                accumulator.apply(sgd)
            expected = 1 - 2 * number * (self.total + self.size)
            assert variable.numpy().tolist() == [expected] * 3
            assert sgd.iterations.numpy() == number
            assert accumulator.num_added == 0

    def test_averages_follow_variables(self) -> None:
        variable = self.variable(np.zeros(2), "NONE")
        with self.strategy.scope():
            average = ExponentialMovingAverage(0.5)
        self.strategy.run(lambda: average.apply([variable]))
        variable.assign([4.0, 8.0])
        self.strategy.run(lambda: average.apply([variable]))
        assert average.average(variable).numpy().tolist() == [2, 4]

    def test_metrics_are_of_all_replicas(self) -> None:
        with self.strategy.scope():
            mean = Mean()
            summed: Any = from_sums(lambda x: {"sum": x.sum()}, lambda sums: sums["sum"])
        self.strategy.run(lambda: mean.update_state(np.full(replica_id() + 1, replica_id())))
        for _ in range(2):
            self.strategy.run(lambda: summed.update_state(np.full(2, replica_id())))
        assert summed.result() == 4 * self.total
        numbers = [number for number in range(self.size) for _ in range(number + 1)]
        np.testing.assert_allclose(mean.result(), np.mean(numbers), rtol=1e-6)
        mean.reset_state()
        assert not mean.result() > 0
