"""Every cell of the matrix: kind x aggregation x method x context, with reads in each.

What a cell does is computed here from scratch, for all ranks at once, as a function of their
number; a cell that is refused names its error. In replica and update context rank r writes
its own value, in the other two contexts all give the same.
"""

import contextlib

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import address_of
from tests import devices
from tests.devices import assert_allclose, assert_array_equal
from tests.helpers import triangle

Aggregation = ms.VariableAggregation
NONE, SUM, MEAN, FIRST = (
    Aggregation.NONE,
    Aggregation.SUM,
    Aggregation.MEAN,
    Aggregation.ONLY_FIRST_REPLICA,
)
START = [6.0, 2.0, 4.0]
ROWS = [0, 2, 2]
"""Row 1 stays, row 2 is written to twice."""

OPERATIONS = {
    "assign": lambda old, new: new,
    "assign_add": np.add,
    "assign_sub": np.subtract,
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda old, new: new,
    "batch_scatter_update": lambda old, new: new,
}
ARITHMETIC = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div")


def given_by(rank):
    """What a rank writes, whole or in three rows."""
    return np.array([1.0, 4.0, 2.0]) + rank


def is_sparse(method):
    return "scatter" in method


def applied(method, component, values):
    """The component after one write of `values`, one element after the other."""
    component = np.array(component)
    rows = ROWS if is_sparse(method) else range(3)
    for row, value in zip(rows, values, strict=True):
        component[row] = OPERATIONS[method](component[row], value)
    return component


def mirrored(method, aggregation, context, size):
    """Component of each rank after the write, or the error."""
    start = [np.array(START)] * size
    if is_sparse(method) and method not in ARITHMETIC and aggregation in (SUM, MEAN):
        return NotImplementedError
    if context == "update":
        return [applied(method, start[r], given_by(r)) for r in range(size)]
    if context in ("cross_replica", "default"):
        return [applied(method, start[r], given_by(0)) for r in range(size)]
    if aggregation is NONE:
        return ValueError
    if aggregation is FIRST:
        return [applied(method, start[r], given_by(0)) for r in range(size)]
    share = size if aggregation is MEAN else 1
    component = np.array(START)
    if is_sparse(method):
        for r in range(size):
            component = applied(method, component, given_by(r) / share)
    else:
        total = sum(given_by(r) for r in range(size)) / share
        component = applied(method, component, total)
    return [component] * size


def sync_on_read(method, aggregation, context, size):
    if is_sparse(method):
        return NotImplementedError
    start = [np.array(START)] * size
    if context in ("replica", "update"):
        return [applied(method, start[r], given_by(r)) for r in range(size)]
    if aggregation is SUM:
        return [given_by(0) / size] * size if method == "assign" else ValueError
    return [applied(method, start[r], given_by(0)) for r in range(size)]


def plain(method, aggregation, context, size):
    return [applied(method, START, given_by(r if context == "replica" else 0)) for r in range(size)]


KINDS = {"mirrored": mirrored, "sync_on_read": sync_on_read, "plain": plain}


def aggregated(aggregation, components):
    """What a SyncOnRead variable reads across replicas."""
    if aggregation is NONE:
        return ValueError
    if aggregation is FIRST:
        return components[0]
    return sum(components) / (len(components) if aggregation is MEAN else 1)


def make(strategy, kind, aggregation):
    on_read = ms.VariableSynchronization.ON_READ
    mode = on_read if kind == "sync_on_read" else ms.VariableSynchronization.AUTO
    with strategy.scope() if kind != "plain" else contextlib.nullcontext():
        return ms.Variable(START, name="w", synchronization=mode, aggregation=aggregation)


def in_context(strategy, context, variable, fn):
    """Call `fn` in `context`, and return what it returns on this rank."""
    if context == "replica":
        (result,) = strategy.experimental_local_results(strategy.run(fn))
    elif context == "update":
        (result,) = strategy.extended.update(variable, lambda _: fn(), group=False)
    elif context == "cross_replica":
        with strategy.scope():
            result = fn()
    else:
        result = fn()
    return result


def do_write(variable, method, rank, read_value):
    value = given_by(rank)
    if is_sparse(method):
        value = ms.IndexedSlices(value, ROWS)
    return getattr(variable, method)(value, read_value=read_value)


@pytest.mark.thorough_product
@pytest.mark.parametrize("context", ["replica", "cross_replica", "update", "default"])
@pytest.mark.parametrize("aggregation", list(Aggregation), ids=lambda each: each.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*created outside of strategy.scope:UserWarning")
def test_matrix(strategy, rank, size, kind, aggregation, context):
    is_local = context in ("replica", "update")
    writer = rank if is_local and not (kind == "plain" and context != "replica") else 0
    for method in OPERATIONS:
        variable = make(strategy, kind, aggregation)
        address = address_of(variable.values[0])
        expected = KINDS[kind](method, aggregation, context, size)
        reads_across = kind == "sync_on_read" and not is_local

        def write(read_value, variable=variable, method=method):
            return do_write(variable, method, writer, read_value)

        if isinstance(expected, type):
            with pytest.raises(expected, match=f"(?s){method}.*'w'"):
                in_context(strategy, context, variable, lambda: write(True))
            expected = [np.array(START)] * size
        else:
            assert in_context(strategy, context, variable, lambda: write(False)) is None
        read = aggregated(aggregation, expected) if reads_across else expected[rank]
        check_reads(strategy, context, variable, read)
        assert_allclose(variable.values[0], expected[rank], err_msg=method)
        assert address_of(variable.values[0]) == address, "moved in memory"
    assert strategy.reduce("sum", 1) == size


def check_reads(strategy, context, variable, expected):
    reads = (
        variable.value,
        variable.read_value,
        variable.numpy,
        lambda: np.asarray(variable),
        lambda: variable + 0,
        lambda: variable[:],
    )
    for read in reads:
        if isinstance(expected, type):
            with pytest.raises(expected, match="'w' has aggregation NONE"):
                in_context(strategy, context, variable, read)
        else:
            assert_allclose(in_context(strategy, context, variable, read), expected)


@pytest.mark.parametrize("context", ["replica", "cross_replica", "update", "default"])
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*created outside of strategy.scope:UserWarning")
def test_a_write_returns_the_value_that_the_context_reads(
    strategy, rank, size, kind, aggregation, context
):
    is_local = context in ("replica", "update")
    for method in OPERATIONS:
        if isinstance(KINDS[kind](method, aggregation, context, size), type):
            continue
        variable = make(strategy, kind, aggregation)
        result = in_context(
            strategy,
            context,
            variable,
            lambda v=variable, m=method: do_write(v, m, rank if is_local else 0, True),
        )
        read = in_context(strategy, context, variable, variable.value)
        assert_array_equal(result, read)
        if kind != "sync_on_read" or is_local:
            assert devices.kind() == "gpu" or not result.flags.writeable


@pytest.mark.parametrize("method", OPERATIONS)
@pytest.mark.parametrize("kind", ["mirrored", "sync_on_read"])
def test_a_per_replica_is_refused_in_cross_replica_context(strategy, size, kind, method):
    variable = make(strategy, kind, FIRST)
    value = ms.IndexedSlices(given_by(0), ROWS) if is_sparse(method) else given_by(0)
    refusal = ValueError
    if kind == "sync_on_read" and is_sparse(method):
        refusal = NotImplementedError
    with strategy.scope(), pytest.raises(refusal, match=method):
        getattr(variable, method)(ms.PerReplica(value))
    assert variable.numpy().tolist() == START
    if refusal is ValueError:
        getattr(variable, method)(ms.Mirrored(value), read_value=False)
        assert_allclose(variable.values[0], applied(method, START, given_by(0)))
    assert strategy.reduce("sum", 1) == size


@pytest.mark.parametrize("kind", ["mirrored", "sync_on_read"])
def test_a_sync_on_read_variable_may_be_given_in_place_of_its_value(strategy, rank, size, kind):
    total = make(strategy, "sync_on_read", SUM)
    strategy.run(lambda: total.assign(np.full(len(START), rank + 1.0)))
    sums = [triangle(size + 1)] * len(START)
    variable = make(strategy, kind, MEAN)
    assert variable.assign(total).tolist() == sums
    assert_allclose(variable.assign_add(total), 2 * np.array(sums))
    assert_allclose(total.assign(total), sums)
