"""`assert_replicas_agree`: which variable, and which ranks."""

import dataclasses

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ReplicaDriftError


def make(strategy, value, name="w", **options):
    with strategy.scope():
        return ms.Variable(value, name=name, **options)


def drift(strategy, variable, ranks, value):
    """Write `value` on some ranks alone."""
    own = strategy.cluster_resolver.task_id in ranks
    strategy.extended.update(variable, lambda v: v.assign(value) if own else None)


@pytest.fixture
def check(strategy):
    return strategy.extended.assert_replicas_agree


@pytest.fixture
def last(size):
    """The rank that goes astray."""
    if size == 1:
        pytest.skip("needs two replicas that can differ")
    return size - 1


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f4", "c16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_replicas_that_agree_pass(strategy, size, check, dtype, shape):
    variable = make(strategy, lambda: np.random.default_rng().uniform(0, 2, shape).astype(dtype))
    assert check(variable) is None
    strategy.extended.update(variable, lambda v: v.assign(np.ones(shape, dtype)))
    check([variable, {"again": variable}])
    assert strategy.reduce("sum", 1) == size


def test_the_first_variable_that_differs_is_named(strategy, check, size, last):
    variables = {name: make(strategy, np.zeros((2, 3)), name=name) for name in "abc"}
    drift(strategy, variables["b"], [last], np.array([[0, 0, 0], [0, 2.5, -0.5]]))
    for among in (variables, list(variables.values()), variables["b"]):
        with pytest.raises(ReplicaDriftError) as caught:
            check(among)
        text = str(caught.value)
        assert "'b'" in text
        assert "'a'" not in text
        assert "float64 of the shape (2, 3)" in text
        others = "rank 0" if last == 1 else f"ranks 0-{last - 1}" if last > 2 else "ranks 0-1"
        assert f"  {others}: one value" in text
        assert f"  rank {last}: a different value" in text
        assert "Other variables that differ: 0." in text
    assert strategy.reduce("sum", 1) == size, "the strategy stays usable"
    variables["b"].assign(np.zeros((2, 3)))
    check(variables)


def test_others_that_differ_are_counted(strategy, check, last):
    variables = [make(strategy, np.zeros(2), name=name) for name in "abcd"]
    for variable in variables[1:]:
        drift(strategy, variable, [last], np.ones(2))
    with pytest.raises(ReplicaDriftError, match=r"'b' at '1'(?s:.)*Other variables that differ: 2"):
        check(variables)


def test_the_largest_group_is_named_first(strategy, check, rank, size, last):
    variable = make(strategy, np.zeros(1))
    drift(strategy, variable, [0], np.full(1, 4.0))
    with pytest.raises(ReplicaDriftError) as caught:
        check(variable)
    # With two ranks no group is the larger one, and that of rank 0 counts.
    astray = 1 if size == 2 else 0
    assert f"  rank {astray}: a different value" in str(caught.value)
    drift(strategy, variable, range(size), np.full(1, float(rank)))
    with pytest.raises(ReplicaDriftError) as caught:
        check(variable)
    assert "  rank 0: one value" in str(caught.value)
    for r in range(1, size):
        assert f"  rank {r}: a different value" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "value", "other"),
    [
        ("?", [0, 1], [1, 1]),
        ("u8", [0, 5], [2**64 - 1, 5]),
        ("f2", [1, 2], [1, 4]),
        ("f8", [0.0, 1], [-0.0, 1]),
        ("f8", [1, 1], [np.nan, 1]),
        ("c8", [1, 1j], [1, 3 + 5j]),
    ],
)
def test_any_bit_that_differs_is_drift(strategy, check, last, dtype, value, other):
    variable = make(strategy, np.array(value, dtype))
    drift(strategy, variable, [last], np.array(other, dtype))
    with pytest.raises(ReplicaDriftError, match=f"rank {last}: a different value"):
        check(variable)


def test_nan_on_all_ranks_is_agreement(strategy, check):
    check(make(strategy, np.array([np.nan, 1])))


@dataclasses.dataclass
class Layer:
    kernel: ms.Variable
    units: int = 3
    model: object = None


class Model:
    def __init__(self, strategy):
        self.layers = [Layer(make(strategy, np.zeros(2), name=f"kernel_{i}")) for i in range(2)]
        self.layers[0].model = self
        self.metric = ms.metrics.Mean(name="loss")
        self.activation = np.tanh


def test_objects_are_searched_for_variables(strategy, check, rank, size):
    with strategy.scope():
        model = Model(strategy)
        optimizer = ms.optimizers.SGD(0.1, momentum=0.9)
    first = model.layers[0].kernel
    optimizer.apply_gradients([(np.ones(2), first), (np.ones(2), model.layers[1].kernel)])
    strategy.run(lambda: model.metric.update_state(float(rank)))
    checkpoint = ms.Checkpoint(model=model, optimizer=optimizer)
    for each in (model, optimizer, checkpoint, [model.layers, optimizer]):
        check(each)
    if size == 1:
        return
    second = model.layers[1].kernel
    value = second.numpy()
    drift(strategy, second, [size - 1], value + 1)
    for each, path in ((model, "layers/1/kernel"), (checkpoint, "model/layers/1/kernel")):
        with pytest.raises(ReplicaDriftError, match=f"'kernel_1' at '{path}'"):
            check(each)
    second.assign(value)
    (slot,) = [
        each.child
        for each in optimizer._checkpoint_dependents()
        if each.of is first and each.child.shape == (2,)
    ]
    drift(strategy, slot, [size - 1], np.full(2, 9.0))
    with pytest.raises(ReplicaDriftError, match=f"'{slot.name}'"):
        check(checkpoint)
    check(model)


def test_what_cannot_be_compared_is_refused(strategy, size, check):
    on_read = make(
        strategy,
        0.0,
        "total",
        synchronization=ms.VariableSynchronization.ON_READ,
        aggregation=ms.VariableAggregation.SUM,
    )
    variable = make(strategy, 0.0)
    for bad, error, text in (
        (on_read, ValueError, "'total' differs from replica to replica by nature"),
        ([variable, on_read], ValueError, "'total'"),
        ([], ValueError, "no variable"),
        ({"model": object}, TypeError, "takes variables"),
        ([variable, 1.0], TypeError, "1.0 of type float"),
        (np.ones(2), TypeError, "takes variables"),
        (None, TypeError, "takes variables"),
    ):
        with pytest.raises(error, match=text):
            check(bad)
    with strategy.scope():
        metric = ms.metrics.Mean()
    with pytest.raises(ValueError, match="no variable"):
        check(metric)
    with pytest.raises(ms.errors.ContextError, match="merge_call"):
        strategy.run(lambda: check(variable))
    with pytest.raises(ms.errors.ContextError, match="mixed"):
        check(ms.OneDeviceStrategy().run(lambda: ms.Variable(1.0, name="elsewhere")))
    assert strategy.reduce("sum", 1) == size


def test_ranks_must_compare_the_same_variables(strategy, check, others):
    variables = [make(strategy, 0.0, name=name) for name in "ab"]
    with pytest.raises(ms.errors.CollectiveMismatchError, match="assert_replicas_agree"):
        check(variables if others else variables[:1])


def test_one_bad_argument_is_an_error_on_all(strategy, check, others):
    variable = make(strategy, 0.0)
    with pytest.raises(ms.errors.CollectiveMismatchError if others else TypeError):
        check(variable if others else 1.0)


def test_plain_variables_and_the_default_strategy():
    variable = ms.Variable(np.ones(2))
    ms.get_strategy().extended.assert_replicas_agree([variable])
    ms.OneDeviceStrategy().extended.assert_replicas_agree(variable)


def test_merge_call_is_the_way_from_replica_context(strategy, check):
    variable = make(strategy, 0.0)

    def merge(_):
        check(variable)

    strategy.run(lambda: ms.get_replica_context().merge_call(merge))


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.host_memory
def test_bytes_that_hold_no_value_do_not_count(strategy, check, rank, dtype):
    with strategy.scope():
        variable = ms.Variable(np.ones(8, dtype), name="w")

    def rewrite(w):
        random = np.random.default_rng(rank).integers(0, 256, w._storage.nbytes)
        w._storage.view(np.uint8)[:] = random
        for part in (w._storage.real, w._storage.imag) if w.dtype.kind == "c" else (w._storage,):
            np.add(np.zeros(8), 1, out=part)  # leaves the padding of x86's long double alone

    strategy.extended.update(variable, rewrite)
    check(variable)
