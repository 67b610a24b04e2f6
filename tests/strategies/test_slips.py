"""Forgotten lines: a scope, `strategy.run`, one value for all; each raises or warns."""

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import context
from mpistrat.errors import CollectiveMismatchError, ScopeWarning
from tests.devices import assert_array_equal

MEAN = ms.VariableAggregation.MEAN
ON_READ = ms.VariableSynchronization.ON_READ

METRICS = {
    "Mean": (lambda: ms.metrics.Mean(), (1.0,)),
    "Sum": (lambda: ms.metrics.Sum(), (1.0,)),
    "Accuracy": (lambda: ms.metrics.Accuracy(), ([1], [1])),
    "TopKAccuracy": (lambda: ms.metrics.TopKAccuracy(1), ([1], [[0.1, 0.9]])),
    "F1": (lambda: ms.metrics.F1(), ([1], [1])),
    "AUC": (lambda: ms.metrics.AUC(), ([1], [0.5])),
    "ConfusionMatrix": (lambda: ms.metrics.ConfusionMatrix(2), ([1], [1])),
    "from_sums": (lambda: ms.metrics.from_sums(lambda x: x.sum(), lambda s: s), (np.ones(2),)),
}


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_from_outside_of_the_scope_is_refused_in_run(strategy, size, kind):
    make, values = METRICS[kind]
    metric = make()
    uses = [lambda: metric.update_state(*values), metric.result, metric.reset_state]
    for use in uses:
        if size > 1:
            with pytest.raises(ValueError, match=r"created outside of strategy\.scope\(\)"):
                strategy.run(use)
        elif kind not in ("from_sums", "F1"):  # which create their variables in run
            strategy.run(use)
    with strategy.scope():
        metric = make()
    strategy.run(lambda: metric.update_state(*values))
    assert metric.result() is not None


OPTIMIZERS = {
    "SGD": lambda: ms.optimizers.SGD(0.1),
    "momentum": lambda: ms.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: ms.optimizers.Adam(0.1),
    "AdamW": lambda: ms.optimizers.AdamW(0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_summed", [False, True])
def test_an_optimizer_or_variable_from_outside_is_refused_in_run(strategy, size, kind, is_summed):
    outside, plain = OPTIMIZERS[kind](), ms.Variable(np.zeros(2), name="plain")
    with strategy.scope():
        inside, variable = OPTIMIZERS[kind](), ms.Variable(np.zeros(2), name="w")
    for optimizer, target, what in ((outside, variable, "optimizer"), (inside, plain, "plain")):

        def step(optimizer=optimizer, target=target):
            optimizer.apply_gradients([(np.ones(2), target)], is_summed)

        if size > 1:
            with pytest.raises(ValueError, match=rf"{what}.* outside of strategy\.scope\(\)"):
                strategy.run(step)
        else:
            strategy.run(step)
    before = variable.numpy()
    strategy.run(lambda: inside.apply_gradients([(np.ones(2), variable)], is_summed))
    assert (variable.numpy() < before).all()


def test_helpers_of_optimizers_from_outside_are_refused_in_run(strategy, size):
    if size == 1:
        pytest.skip("needs several replicas")
    plain = ms.Variable(np.zeros(2), name="plain")
    accumulator = ms.optimizers.GradientAccumulator([plain])
    average = ms.optimizers.ExponentialMovingAverage(0.9)
    for use in (
        lambda: accumulator.add([(np.ones(2), plain)]),
        lambda: average.apply([plain]),
    ):
        with pytest.raises(ValueError, match=r"outside of strategy\.scope\(\)"):
            strategy.run(use)


def test_a_loss_scale_may_come_from_outside(strategy):
    scale = ms.optimizers.LossScale(2.0)
    with strategy.scope():
        variable, sgd = ms.Variable(np.zeros(2)), ms.optimizers.SGD(0.5, loss_scale=scale)
    strategy.run(lambda: sgd.apply_gradients([(np.ones(2) * scale.value, variable)]))
    assert (variable.numpy() < 0).all()


WRITES = {
    "assign": lambda v: v.assign(np.ones((2, 2))),
    "assign_add": lambda v: v.assign_add(np.ones((2, 2))),
    "assign_sub": lambda v: v.assign_sub([[1, 1], [1, 1]]),
    "scatter_add": lambda v: v.scatter_add(ms.IndexedSlices(np.ones((1, 2)), [0])),
    "scatter_update": lambda v: v.scatter_update(ms.IndexedSlices(np.ones((1, 2)), [0])),
    "batch_scatter_update": lambda v: v.batch_scatter_update(
        ms.IndexedSlices([[1.0]] * 2, [[0]] * 2)
    ),
}


@pytest.mark.parametrize("how", WRITES)
def test_another_write_to_a_variable_from_outside_warns_once_per_place(strategy, size, how):
    plain = ms.Variable(np.zeros((2, 2)), name="plain")

    def step():
        for _ in range(3):
            WRITES[how](plain)

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        strategy.run(step)
        strategy.run(step)
        WRITES[how](plain)  # outside of run it is a plain variable
    assert len(given) == (size > 1)
    for each in given:
        assert issubclass(each.category, ScopeWarning)
        assert how in str(each.message)
        assert "'plain'" in str(each.message)
        assert "Create it in the scope" in str(each.message)
        assert each.filename == __file__


COLLECTIVES = {
    "all_reduce": lambda c: c.all_reduce("sum", np.ones(2)),
    "start_all_reduce": lambda c: c.start_all_reduce("sum", 1.0).wait(),
    "all_gather": lambda c: c.all_gather(np.ones(2), 0),
    "merge_call": lambda c: c.merge_call(lambda strategy, x: x, (1.0,)),
    "broadcast": lambda c: c.broadcast(np.ones(2)),
    "scan": lambda c: c.scan("sum", 1.0),
    "barrier": lambda c: c.barrier(),
    "broadcast_object": lambda c: c.broadcast_object("x"),
    "all_gather_object": lambda c: c.all_gather_object("x"),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_the_default_replica_context_beside_open_replicas_warns(size, kind):
    # Other tests may have left strategies of several replicas open.
    is_warned = size > 1 or bool(context.open_strategies())
    own = ms.MPIStrategy(device="cpu")

    def use():
        return COLLECTIVES[kind](ms.get_replica_context())

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        first = use()
        again = use()
        own.run(use)
    assert_array_equal(first, again)
    found = [str(each.message) for each in given if each.category is ScopeWarning]
    assert len(found) == is_warned
    assert all("forgot strategy.run?" in text for text in found)
    own.close()


def differing_writes(rank):
    values = np.full((2, 2), float(rank))
    rows = ms.IndexedSlices(np.full((1, 2), float(rank)), [0])
    return {
        "array": lambda v, o: v["w"].assign(values),
        "list": lambda v, o: v["w"].assign_add(values.tolist()),
        "float32": lambda v, o: v["w"].assign_sub(values.astype(np.float32)),
        "number": lambda v, o: v["n"].assign(float(rank)),
        "integer": lambda v, o: v["i"].assign_add(rank),
        "rows": lambda v, o: v["w"].scatter_update(rows),
        "indices": lambda v, o: v["w"].scatter_add(ms.IndexedSlices(np.ones((1, 2)), [rank % 2])),
        "on read": lambda v, o: v["r"].assign(float(rank)),
        "gradients": lambda v, o: o.apply_gradients([(values, v["w"])]),
        "slices": lambda v, o: o.apply_gradients([(rows, v["w"])]),
        "last of two": lambda v, o: o.apply_gradients([(np.ones((2, 2)), v["w"]), (rank, v["n"])]),
    }


@pytest.mark.parametrize("kind", differing_writes(0))
@pytest.mark.parametrize("place", ["outside", "scope", "merge_call"])
def test_one_value_for_all_must_be_one(strategy, rank, size, kind, place):
    with strategy.scope():
        variables = {
            "w": ms.Variable(np.zeros((2, 2)), name="w"),
            "n": ms.Variable(0.0, name="n"),
            "i": ms.Variable(0, name="i"),
            "r": ms.Variable(0.0, synchronization=ON_READ, aggregation=MEAN, name="r"),
        }
        optimizer = ms.optimizers.SGD(0.1)

    def write(which):
        do = differing_writes(which)[kind]
        if place == "outside":
            do(variables, optimizer)
        elif place == "scope":
            with strategy.scope():
                do(variables, optimizer)
        else:

            def merge_fn(strategy):
                do(variables, optimizer)

            strategy.run(lambda: ms.get_replica_context().merge_call(merge_fn))

    write(1)
    if size == 1:
        return
    with pytest.raises(CollectiveMismatchError) as info:
        write(rank if size > 2 or kind != "indices" else rank % 2)
    assert "The values differ from rank to rank" in str(info.value)
    assert "forgot strategy.run?" in str(info.value)


def test_gradients_that_were_reduced_are_not_compared_in_replica_context(strategy):
    with strategy.scope():
        variable, sgd = ms.Variable(np.zeros(2)), ms.optimizers.SGD(1.0)

    def step():
        gradient = ms.get_replica_context().all_reduce("mean", np.ones(2))
        sgd.apply_gradients([(gradient, variable)], skip_gradients_aggregation=True)

    strategy.run(step)
    assert_array_equal(variable.numpy(), [-1, -1])


def uneven_batches(size):
    """Return the batches of `size` + 1 examples: of the second one, only rank 0 has an example."""
    return ms.data.Dataset.from_arrays(np.arange(size + 1.0)).batch(size)


NAN_USES = {
    "the gradient of 'w'": lambda v, o, m: lambda x: o.apply_gradients([(x.mean(), v)]),
    "assign of 'w'": lambda v, o, m: lambda x: v.assign(x.mean()),
    "of the metric 'loss'": lambda v, o, m: lambda x: m.update_state(x.mean()),
}


@pytest.mark.parametrize("what", NAN_USES)
@pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_mean_over_an_empty_part_is_named(strategy, rank, size, what):
    with strategy.scope():
        variable = ms.Variable(0.0, name="w", aggregation=MEAN)
        sgd, loss = ms.optimizers.SGD(0.1), ms.metrics.Mean("loss")
    step = NAN_USES[what](variable, sgd, loss)
    batches = strategy.distribute_dataset(uneven_batches(size))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ScopeWarning)
        for _ in range(2):
            for batch in batches:
                strategy.run(step, args=(batch,))
    texts = [str(each.message) for each in given if each.category is ScopeWarning]
    assert len(texts) == (rank > 0)
    for text in texts:
        assert what in text
        assert f"rank {rank} of {size} in batch 1 " in text


@pytest.mark.host_memory
def test_a_mean_of_tensors_over_an_empty_part_is_named(strategy, rank, size):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ScopeWarning)
        for batch in strategy.distribute_dataset(uneven_batches(size)):
            mean = strategy.run(lambda x: torch.from_numpy(x.copy()).mean(), args=(batch,))
            strategy.reduce("mean", mean)
    texts = [str(each.message) for each in given if each.category is ScopeWarning]
    assert len(texts) == (rank > 0)
    assert all("the value given to reduce" in text for text in texts)


@pytest.mark.filterwarnings("error::mpistrat.errors.ScopeWarning")
def test_a_nan_after_the_pass_is_not_of_an_empty_part(strategy, size):
    with strategy.scope():
        variable, sgd = ms.Variable(0.0, name="w"), ms.optimizers.SGD(0.1)
    for _ in strategy.distribute_dataset(uneven_batches(size)):
        pass
    strategy.run(lambda: sgd.apply_gradients([(float("nan"), variable)]))
    assert np.isnan(variable.numpy())


def test_a_sum_over_an_empty_part_is_fine(strategy, rank, size):
    with strategy.scope():
        variable, sgd = ms.Variable(0.0, name="w"), ms.optimizers.SGD(0.1)
        loss = ms.metrics.Mean("loss")

    def step(x):
        loss.update_state(x)
        sgd.apply_gradients([(x.sum() / size, variable)])

    for batch in strategy.distribute_dataset(uneven_batches(size)):
        strategy.run(step, args=(batch,))
    assert loss.result() == pytest.approx(size / 2)


@pytest.mark.parametrize("num_per_rank", [2, 3])
def test_several_replicas_on_a_rank_are_several_on_one_rank_too(size, num_per_rank):
    own = ms.MPIStrategy(device="cpu", num_replicas=num_per_rank * size)
    metric = ms.metrics.Mean()
    with pytest.raises(ValueError, match=r"created outside of strategy\.scope\(\)"):
        own.run(lambda: metric.update_state(1.0))
    own.close()
