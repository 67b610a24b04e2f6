"""Variables, metrics, layers and the array namespace on devices."""

import json
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import host_view, is_on_host
from tests.helpers import result_of

M = ms.metrics


@pytest.fixture
def xp(gpus):
    return gpus.extended.xp


@pytest.fixture
def weight(gpus):
    with gpus.scope():
        return ms.Variable(np.arange(6, dtype=np.float32).reshape(2, 3), name="w")


FUNCTIONS = {
    "exp": lambda xp, w, x: xp.exp(w),
    "matmul": lambda xp, w, x: xp.matmul(x, w),
    "sum": lambda xp, w, x: xp.sum(w, axis=0),
    "where": lambda xp, w, x: xp.where(w, w, 1),
    "concatenate": lambda xp, w, x: xp.concatenate([w, x[:, :3]]),
    "stack": lambda xp, w, x: xp.stack((w, w)),
    "maximum": lambda xp, w, x: xp.maximum(w, 2),
    "linalg": lambda xp, w, x: xp.linalg.norm(w),
    "reshape": lambda xp, w, x: xp.reshape(w, (3, 2)),
    "asarray": lambda xp, w, x: xp.asarray(w),
    "mean": lambda xp, w, x: xp.mean(w),
    "take": lambda xp, w, x: xp.take(w, xp.asarray([1, 0]), axis=0),
    "operators": lambda xp, w, x: (2 * w + 1) / (w + 1) - w,
    "right": lambda xp, w, x: x @ w,
    "left": lambda xp, w, x: w @ x.T[:3],
    "comparison": lambda xp, w, x: w > 2,
    "numpy": lambda xp, w, x: np.exp(w),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_xp_take_variables(gpus, hosts, xp, weight, name):
    function, given = FUNCTIONS[name], np.ones((4, 4))[:, :2] if name != "left" else np.ones((4, 3))
    if name == "concatenate":
        given = np.ones((4, 4))
    with hosts.scope():
        on_host = ms.Variable(np.arange(6, dtype=np.float32).reshape(2, 3), name="w")
    found = function(xp, weight, xp.asarray(given.astype("f4")))
    expected = function(hosts.extended.xp, on_host, given.astype("f4"))
    assert not is_on_host(found)
    np.testing.assert_allclose(found.get(), np.asarray(expected), rtol=1e-6)


def test_arrays_are_updated_in_place_by_a_variable(xp, weight):
    array = xp.ones((2, 3), dtype=np.float32)
    array += weight
    np.testing.assert_array_equal(array.get(), 1 + np.arange(6, dtype="f4").reshape(2, 3))


def test_mirrored_values_are_arrays_too(gpus, xp):
    value = gpus.extended.broadcast_to(xp.ones(3), "gpu")
    assert not is_on_host(xp.exp(value))
    np.testing.assert_array_equal((value * 2).get(), np.full(3, 2.0))


def test_numbers_on_devices_are_indices(gpus, xp):
    three = xp.asarray(3)
    with gpus.scope():
        variable = ms.Variable(three)
    constant = ms.optimizers.schedules.ExponentialDecay(1.0, 3, 0.5)
    for each in (variable, ms.Mirrored(three)):
        assert list(range(each)) == [0, 1, 2]
    assert constant(three) == 0.5
    with pytest.raises(TypeError):
        range(ms.Mirrored(xp.asarray([3, 4])))
    with pytest.raises(TypeError, match="an integer"):
        constant(xp.asarray(3.0))


def test_arrays_have_the_special_methods_of_cupy(xp):
    names = Path(__file__).parents[1] / "standin" / "cupy" / "names.json"
    # Python adds some to all of these classes.
    by_python = {"__weakref__", "__buffer__", "__release_buffer__"}
    found = {name for name in dir(xp.ndarray) if name.endswith("__")} - by_python
    assert found <= set(json.loads(names.read_text())["ndarray"])


def test_writes_take_device_and_host_arrays(xp, weight):
    weight.assign(xp.ones((2, 3), dtype=np.float32))
    weight.assign_add(np.ones((2, 3), np.float32))
    weight.assign_sub([[1, 1, 1]] * 2)
    assert not is_on_host(weight.value())
    np.testing.assert_array_equal(weight.numpy(), np.ones((2, 3)))
    assert "w" in repr(weight)


def test_scatters_accumulate(gpus, xp, size):
    with gpus.scope():
        table = ms.Variable(
            np.zeros((5, 2), np.float32), name="t", aggregation=ms.VariableAggregation.SUM
        )
    slices = ms.IndexedSlices(xp.ones((3, 2), dtype=np.float32), xp.asarray([1, 1, 3]))
    gpus.run(lambda: table.scatter_add(slices))
    expected = np.zeros((5, 2))
    expected[1], expected[3] = 2 * size, size
    np.testing.assert_array_equal(table.numpy(), expected)


def test_sync_on_read_sums(gpus, xp, rank, size):
    with gpus.scope():
        total = ms.Variable(
            np.zeros(2),
            name="r",
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    gpus.run(lambda: total.assign_add(xp.full(2, rank + 1.0)))
    np.testing.assert_array_equal(np.asarray(total), np.full(2, size * (size + 1) / 2))


@pytest.mark.parametrize("destination", ["gpu", "cpu:0", "GPU"])
def test_reductions_to_a_named_device(gpus, xp, size, destination):
    found = gpus.extended.reduce_to("sum", xp.ones(3), destination)
    found = found.values[0] if isinstance(found, ms.Mirrored) else found
    assert is_on_host(found) == destination.startswith("cpu")
    assert float(found[0]) == size


METRICS = {
    "Mean": (M.Mean, "s"),
    "Sum": (M.Sum, "s"),
    "MeanSquaredError": (M.MeanSquaredError, "ss"),
    "Accuracy": (M.Accuracy, "tt"),
    "TopKAccuracy": (lambda: M.TopKAccuracy(2), "lp"),
    "Precision": (M.Precision, "ts"),
    "thresholds": (lambda: M.Precision(thresholds=[0.2, 0.5]), "ts"),
    "top_k": (lambda: M.Precision(top_k=2), "op"),
    "class_id": (lambda: M.Recall(class_id=1), "op"),
    "F1": (lambda: M.F1(average="macro"), "op"),
    "AUC": (M.AUC, "ts"),
    "ConfusionMatrix": (lambda: M.ConfusionMatrix(3), "ll"),
    "MeanIoU": (lambda: M.MeanIoU(3), "ll"),
}
GIVEN = {
    "t": np.array([0, 1, 1, 0]),
    "s": np.array([0.1, 0.8, 0.4, 0.6]),
    "l": np.array([0, 2, 1, 1]),
    "p": np.random.default_rng(0).random((4, 3)),
    "o": np.eye(3)[[0, 2, 1, 1]],
}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_take_device_arrays(gpus, xp, name, is_weighted):
    make, letters = METRICS[name]
    if name == "AUC" and is_weighted:
        pytest.skip("AUC has no weights")
    results = []
    for move in (xp.asarray, np.asarray):
        with gpus.scope():
            metric = make()
        keywords = {"sample_weight": move(np.array([1.0, 2, 3, 4]))} if is_weighted else {}
        args = [move(GIVEN[letter]) for letter in letters]
        for _ in range(2):
            gpus.run(lambda: metric.update_state(*args, **keywords))  # noqa: B023
        results.append(np.asarray(metric.result()))
    np.testing.assert_allclose(*results, rtol=1e-12)


def test_labels_that_are_neither_0_nor_1_are_refused(gpus, xp):
    with gpus.scope():
        metric = M.Precision()
    with pytest.raises(ValueError, match="0 or 1"):
        gpus.run(lambda: metric.update_state(xp.asarray([2, 0]), xp.asarray([0.1, 0.2])))


@pytest.mark.parametrize("is_training", [True, False])
def test_batch_norm(gpus, hosts, rank, is_training):
    x = np.random.default_rng(rank).random((8, 3)).astype(np.float32)
    found = []
    for strategy in (gpus, hosts):
        with strategy.scope():
            layer = ms.layers.BatchNorm(3)

        given = strategy.extended.xp.asarray(x)

        def forward(layer=layer, given=given):
            made = layer.forward(given, training=is_training)
            return made[0] if isinstance(made, tuple) else made

        (own,) = strategy.experimental_local_results(strategy.run(forward))
        found.append(host_view(own))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_collectives_keep_arrays_on_their_device(gpus, xp, rank, size):
    replica = ms.get_replica_context

    def step():
        return {
            "broadcast": replica().broadcast(xp.full(3, rank), 0),
            "gather": replica().all_gather(xp.full((rank + 1, 2), rank), axis=0),
            "to_all": replica().all_to_all(xp.arange(4.0 * size), 0, 0),
            "scatter": replica().scatter(xp.arange(4.0 * size) if rank == 0 else None, 0),
            "reduced": replica().reduce_scatter("sum", xp.arange(4.0 * size), 0),
            "scan": replica().scan("sum", xp.ones(3)),
        }

    found = result_of(gpus, step)
    assert not any(map(is_on_host, found.values()))
    rows = np.repeat(range(size), range(1, size + 1))
    assert found["gather"].get()[:, 0].tolist() == rows.tolist()
    assert found["scan"].get().tolist() == [rank + 1.0] * 3
    assert found["reduced"].get().tolist() == [size * (4.0 * rank + i) for i in range(4)]
    assert found["broadcast"].get().tolist() == [0, 0, 0]


def test_results_are_written_to_out(gpus, xp, size):
    out = xp.empty(4, dtype=np.float32)
    gpus.run(lambda: ms.get_replica_context().all_reduce("sum", xp.ones(4, dtype="f4"), out=out))
    assert out.get().tolist() == [size] * 4


@pytest.mark.parametrize("size_of_array", [4, 70_000])
def test_results_are_written_to_out_in_the_other_memory(gpus, xp, size, size_of_array):
    for _ in range(3):  # of which the later ones are repeated reductions
        for here, there in ((xp, np), (np, xp)):
            value, out = (
                here.ones(size_of_array, dtype="f4"),
                there.zeros(size_of_array, dtype="f4"),
            )
            gpus.run(lambda: ms.get_replica_context().all_reduce("sum", value, out=out))  # noqa: B023
            assert (host_view(out) == size).all()
            assert (host_view(value) == 1).all()
