"""Batch normalization: against PyTorch's on one rank, and over ranks against one rank."""

import numpy as np
import pytest

import mpistrat as ms
from tests import devices
from tests.devices import assert_allclose, assert_array_equal, on_host

SHAPES = {-1: (5,), 1: (5, 3, 2), 2: (3, 5)}
"""Shapes of one example with 5 features, by the axis of the features in a batch."""
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}


def part_of(rank, axis=-1, dtype=np.float64, mean=2.0):
    """Return the examples of a rank and a gradient for them; rank 1 has none."""
    rng = np.random.default_rng(rank)
    n = 0 if rank == 1 else 3 + 2 * rank
    x = mean + rng.standard_normal((n, *SHAPES[axis]))
    return x.astype(dtype), rng.standard_normal(x.shape).astype(dtype)


def joined(size, *args):
    parts = [part_of(rank, *args) for rank in range(size)]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def span_of(rank, *args):
    """Return the rows of a rank in the joined batch."""
    first = sum(len(part_of(r, *args)[0]) for r in range(rank))
    return slice(first, first + len(part_of(rank, *args)[0]))


def make(strategy, **options):
    with strategy.scope():
        layer = ms.layers.BatchNorm(5, **options)
        layer.gamma.assign(np.linspace(0.5, 2, 5, dtype=layer.gamma.dtype))
        layer.beta.assign(np.linspace(-1, 1, 5, dtype=layer.beta.dtype))
    return layer


def there_and_back(strategy, layer, x, gradient_y, training=True):
    """Return y, the gradients of x, and those of gamma and beta summed over replicas."""

    def step(x, gradient_y):
        y, saved = layer.forward(x, training=training)
        gradient_x, pairs = layer.backward(saved, gradient_y)
        assert [variable for _, variable in pairs] == [layer.gamma, layer.beta]
        of_parameters = ms.get_replica_context().all_reduce("sum", [each for each, _ in pairs])
        return [y, gradient_x, *of_parameters]

    results = strategy.run(step, args=(x, gradient_y))
    return [each.values[0] for each in results]


def averages(layer):
    return [layer.moving_mean.numpy(), layer.moving_variance.numpy()]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [-1, 1, 2])
def test_synchronized_replicas_equal_one_with_the_joined_batch(strategy, rank, size, axis, dtype):
    layer = make(strategy, axis=axis, synchronized=True, dtype=dtype)
    alone = ms.OneDeviceStrategy()
    whole = make(alone, axis=axis, dtype=dtype)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for mean in (2.0, -1.0):
        ours = there_and_back(strategy, layer, *part_of(rank, axis, dtype, mean))
        expected = there_and_back(alone, whole, *joined(size, axis, dtype, mean))
        rows = span_of(rank, axis)
        for one, other in zip(ours, [e[rows] if e.ndim > 1 else e for e in expected], strict=True):
            assert one.dtype == dtype
            assert_allclose(one, other, **tolerance)
        for one, other in zip(averages(layer), averages(whole), strict=True):
            assert_allclose(one, other, **tolerance)
    components = strategy.gather(strategy.run(lambda: layer.moving_mean.value()[None]), axis=0)
    assert (components == components[0]).all()  # to the bit


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [-1, 1])
def test_one_replica_agrees_with_torch(axis, dtype):
    torch = pytest.importorskip("torch")
    strategy = ms.OneDeviceStrategy()
    layer = make(strategy, axis=axis, momentum=0.9, epsilon=1e-5, dtype=dtype)
    kind = torch.nn.BatchNorm1d if axis == -1 else torch.nn.BatchNorm2d
    oracle = kind(5, eps=1e-5, momentum=0.1, dtype=getattr(torch, np.dtype(dtype).name))
    with torch.no_grad():
        oracle.weight[:] = torch.from_numpy(layer.gamma.numpy())
        oracle.bias[:] = torch.from_numpy(layer.beta.numpy())
    x, gradient_y = joined(3, axis, dtype)
    for training in (True, True, False):
        oracle.train(training)
        oracle.zero_grad()
        tensor = torch.from_numpy(x).requires_grad_()
        expected = oracle(tensor)
        expected.backward(torch.from_numpy(gradient_y))
        ours = there_and_back(strategy, layer, x, gradient_y, training)
        theirs = [expected.detach(), tensor.grad, oracle.weight.grad, oracle.bias.grad]
        for one, other in zip(ours, theirs, strict=True):
            assert_allclose(one, other.numpy(), rtol=1e-5, atol=5 * TOLERANCE[dtype])
        # PyTorch's average is of the unbiased variance: let both start the next step alike.
        assert_allclose(layer.moving_mean.numpy(), oracle.running_mean, rtol=1e-5)
        with torch.no_grad():
            oracle.running_var[:] = torch.from_numpy(layer.moving_variance.numpy())


def test_moving_averages_are_those_of_the_biased_moments(strategy, rank, size):
    layer = make(strategy, momentum=0.75, synchronized=True, dtype=np.float64)
    there_and_back(strategy, layer, *part_of(rank))
    x, _ = joined(size)
    assert_allclose(layer.moving_mean.numpy(), x.mean(axis=0) / 4, rtol=1e-12)
    assert_allclose(layer.moving_variance.numpy(), 0.75 + x.var(axis=0) / 4, rtol=1e-12)


def test_replicas_on_their_own(strategy, rank, size):
    layer = make(strategy, momentum=0.5, dtype=np.float64)
    x, gradient_y = part_of(rank)
    y, gradient_x, *_ = there_and_back(strategy, layer, x, gradient_y)
    alone = ms.OneDeviceStrategy(f"{devices.kind()}:{devices.index(rank)}")
    whole = make(alone, momentum=0.5, dtype=np.float64)
    expected = there_and_back(alone, whole, x, gradient_y)
    assert_array_equal(y, expected[0])
    assert_array_equal(gradient_x, expected[1])
    local = strategy.run(layer.moving_mean.value).values[0]
    assert_array_equal(local, whole.moving_mean.numpy())
    if rank == 1:  # it has seen no example
        assert_array_equal(local, 0)
    means = [part_of(r)[0].mean(axis=0) / 2 for r in range(size) if r != 1]
    assert_allclose(layer.moving_mean.numpy(), sum(means) / size, rtol=1e-12)


def test_inference_uses_the_moving_averages(strategy, rank, size):
    layer = make(strategy, momentum=0.5, epsilon=1e-9, dtype=np.float64)
    there_and_back(strategy, layer, *part_of(rank))
    x, gradient_y = joined(2)
    before = averages(layer)

    def expected(mean, variance):
        scale = layer.gamma.numpy() / np.sqrt(variance + 1e-9)
        return (x - mean) * scale + layer.beta.numpy(), gradient_y * scale

    own = strategy.run(
        lambda: [on_host(each.value()) for each in (layer.moving_mean, layer.moving_variance)]
    )
    y, gradient_x, *_ = there_and_back(strategy, layer, x, gradient_y, training=False)
    for one, other in zip((y, gradient_x), expected(*(o.values[0] for o in own)), strict=True):
        assert_allclose(one, other, rtol=1e-11, atol=1e-13)
    y, _ = layer.forward(x, training=False)  # in cross-replica context
    assert_allclose(y, expected(*before)[0], rtol=1e-11, atol=1e-13)
    assert_array_equal(averages(layer), before)


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("mean", [1e4, 3e6])
def test_float32_with_a_large_mean(strategy, rank, size, synchronized, mean):
    layer = make(strategy, synchronized=synchronized, momentum=0, epsilon=1e-12)
    rng = np.random.default_rng(rank)
    x = (mean + 4 * rng.standard_normal((100, 5))).astype(np.float32)
    y, *_ = there_and_back(strategy, layer, x, np.ones_like(x))
    parts = strategy.gather(ms.PerReplica(x), axis=0) if synchronized else x
    exact = parts.astype(np.float64)
    expected = (x - exact.mean(axis=0)) / exact.std(axis=0) * layer.gamma.numpy()
    expected += layer.beta.numpy()
    # With float32 sums, or the mean rounded to float32, y would be off by 1e-4 to 1.
    tolerance = 2e-6 + synchronized * 1e-16 * mean**2
    assert_allclose(y, expected, rtol=tolerance, atol=tolerance)
    if synchronized:
        variance = layer.moving_variance.numpy()
        assert_allclose(variance, exact.var(axis=0), rtol=tolerance)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_examples_may_have_another_dtype_than_the_variables(strategy, rank, dtype):
    layer = make(strategy, synchronized=True)
    x = part_of(rank, mean=0)[0].astype(dtype) * 1000  # squares overflow float16

    def step():
        y, saved = layer.forward(x)
        gradient_x, pairs = layer.backward(saved, np.ones_like(x))
        return y, gradient_x, [gradient for gradient, _ in pairs]

    y, gradient_x, gradients = strategy.run(step)
    assert y.values[0].dtype == gradient_x.values[0].dtype == dtype
    assert [each.values[0].dtype for each in gradients] == [np.float32] * 2
    own = on_host(y.values[0])
    assert np.isfinite(own).all()
    assert np.abs(own).max(initial=0) < 10


@pytest.mark.parametrize("synchronized", [False, True])
def test_a_batch_without_examples_changes_nothing(strategy, synchronized):
    layer = make(strategy, synchronized=synchronized)
    empty = np.zeros((0, 5), np.float32)
    y, gradient_x, *of_parameters = there_and_back(strategy, layer, empty, empty)
    assert y.shape == gradient_x.shape == (0, 5)
    assert_array_equal(of_parameters, np.zeros((2, 5)))
    assert_array_equal(averages(layer), [np.zeros(5), np.ones(5)])


@pytest.mark.fast
def test_one_message_in_each_direction(strategy, rank, counts):
    layers = {flag: make(strategy, synchronized=flag) for flag in (False, True)}
    x, gradient_y = part_of(rank)
    for synchronized, layer in layers.items():
        for training in (True, False):
            expected = {"all_reduce": 1} if synchronized and training else {}
            counts.clear()
            saved = strategy.run(lambda n=layer, t=training: [n.forward(x, t)[1]])[0]
            assert counts == expected
            counts.clear()
            strategy.run(layer.backward, args=(saved, gradient_y))
            assert counts == expected
        counts.clear()
        repr(layer)
        assert not counts


def test_the_pairs_train_the_layer(strategy, rank, size):
    layer = make(strategy, synchronized=True, dtype=np.float64)
    with strategy.scope():
        optimizer = ms.optimizers.SGD(learning_rate=0.5)
    before = layer.gamma.numpy(), layer.beta.numpy()
    x, gradient_y = part_of(rank)

    def step():
        _, saved = layer.forward(x)
        _, pairs = layer.backward(saved, gradient_y)
        optimizer.apply_gradients(pairs)

    strategy.run(step)
    x, gradient_y = joined(size)
    normalized = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + layer.epsilon)
    gradients = (gradient_y * normalized).sum(axis=0), gradient_y.sum(axis=0)
    for variable, old, gradient in zip((layer.gamma, layer.beta), before, gradients, strict=True):
        assert_allclose(variable.numpy(), old - gradient / 2, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_holds_the_mean_of_the_averages(strategy, rank, size, mpi_tmp_path):
    layer = make(strategy, momentum=0.5)
    there_and_back(strategy, layer, *part_of(rank))
    path = ms.Checkpoint(norm=layer).write(mpi_tmp_path / "norm.h5")
    copy = make(strategy, momentum=0.5)
    ms.Checkpoint(norm=copy).restore(path).assert_consumed()
    assert_allclose(averages(copy), averages(layer), rtol=1e-6)
    own = strategy.run(copy.moving_mean.value).values[0]
    assert_allclose(own, layer.moving_mean.numpy(), rtol=1e-6)
    assert_array_equal(copy.gamma.numpy(), layer.gamma.numpy())
    assert copy.gamma.trainable
    assert not copy.moving_mean.trainable


def test_what_the_layer_refuses(strategy, rank):
    for options, error, words in [
        ({"num_features": 0}, ValueError, "num_features"),
        ({"num_features": 2.5}, TypeError, "num_features"),
        ({"num_features": 2, "axis": 1.5}, TypeError, "axis"),
        ({"num_features": 2, "momentum": 1.5}, ValueError, "momentum"),
        ({"num_features": 2, "epsilon": 0}, ValueError, "epsilon"),
        ({"num_features": 2, "dtype": np.int32}, TypeError, "dtype"),
    ]:
        with strategy.scope(), pytest.raises(error, match=words):
            ms.layers.BatchNorm(**options)
    for synchronized in (False, True):
        layer = make(strategy, synchronized=synchronized, axis=1)
        for x, error, words in [
            (np.ones((3, 4)), ValueError, "5 features"),
            (np.ones(5), ValueError, "two or more axes"),
            (np.ones((3, 5), int), TypeError, "floating"),
            (np.ones((3, 5)) * 1j, TypeError, "floating"),
            ([[1.0] * 5], TypeError, "list"),
        ]:
            with pytest.raises(error, match=words):
                strategy.run(layer.forward, args=(x,))
        saved = strategy.run(lambda n=layer: [n.forward(np.ones((3, 5)))[1]])[0]
        with pytest.raises(ValueError, match="gradient_y"):
            strategy.run(layer.backward, args=(saved, np.ones((2, 5))))
        with pytest.raises(TypeError, match="saved"):
            strategy.run(layer.backward, args=(None, np.ones((3, 5))))
        with pytest.raises(ms.errors.ContextError, match=r"strategy\.run"):
            layer.forward(np.ones((3, 5)))
        with strategy.scope(), pytest.raises(ms.errors.ContextError, match=r"strategy\.run"):
            layer.forward(np.ones((3, 5)))


def test_tensors_are_refused():
    torch = pytest.importorskip("torch")
    layer = ms.layers.BatchNorm(5)
    with pytest.raises(TypeError, match="SyncBatchNorm"):
        layer.forward(torch.ones(3, 5))


def test_one_rank_with_a_bad_shape(strategy, others):
    layer = make(strategy, synchronized=True)
    expected = ms.errors.CollectiveMismatchError if others else ValueError
    with pytest.raises(expected, match="4"):
        strategy.run(layer.forward, args=(np.ones((3, 5 if others else 4)),))


def test_ranks_that_disagree_on_a_parameter(strategy, others):
    with strategy.scope(), pytest.raises(ms.errors.CollectiveMismatchError, match="momentum"):
        ms.layers.BatchNorm(5, momentum=0.9 if others else 0.99)


def test_outside_every_scope():
    x, gradient_y = joined(3)
    layers = [ms.layers.BatchNorm(5, synchronized=flag, dtype=np.float64) for flag in (False, True)]
    for layer in layers:
        y, saved = layer.forward(x)
        gradient_x, pairs = layer.backward(saved, gradient_y)
        assert_allclose(y.mean(axis=0), 0, atol=1e-12)
        assert_allclose(gradient_x.sum(axis=0), 0, atol=1e-12)
        ms.optimizers.SGD(0.1).apply_gradients(pairs)
    assert_allclose(layers[0].gamma.numpy(), layers[1].gamma.numpy(), rtol=1e-12)


@pytest.mark.host_memory
def test_variables_of_bfloat16(strategy):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with strategy.scope():
        layer = ms.layers.BatchNorm(2, dtype=bfloat16, synchronized=True)

    def step(x):
        y, saved = layer.forward(x)
        _, pairs = layer.backward(saved, y)
        assert [gradient.dtype for gradient, _ in pairs] == [bfloat16] * 2
        return y

    x = np.array([[1.0, -2.0], [3.0, 2.0]], bfloat16)
    y = strategy.run(lambda: step(x))
    assert_allclose(
        strategy.experimental_local_results(y)[0].astype(float), [[-1, -1], [1, 1]], atol=1e-2
    )
    assert layer.gamma.dtype == bfloat16


def test_bad_examples_of_one_rank_at_inference_are_an_error_on_all(strategy, others, size):
    with strategy.scope():
        layer = ms.layers.BatchNorm(2)
    with pytest.raises(Exception, match=r"BatchNorm\.forward") as error:
        layer.forward(np.ones((3, 2 if others else 5)), training=False)
    assert isinstance(error.value, ms.errors.CollectiveMismatchError if others else ValueError)


@pytest.mark.fast
def test_inference_across_replicas_is_one_message(strategy, counts):
    with strategy.scope():
        layer = ms.layers.BatchNorm(2)
    before = counts["all_reduce"]
    layer.forward(np.ones((3, 2)), training=False)
    assert counts["all_reduce"] == before + 1
