"""Gradient accumulation: micro-batches added up on each replica, reduced once."""

import copy
import warnings

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from tests.devices import assert_allclose, on_host
from tests.helpers import as_bytes, filenames

NUM_MICRO = 4
SUM_PATH = "variables/accumulator/gradient_sum/weight"


class Problem:
    """Least squares: its gradient is a sum over examples, so any split gives the same one."""

    def __init__(self, num_examples, seed=0):
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(num_examples, 3))
        self.y = rng.normal(size=num_examples)

    def gradients(self, part, weight, bias):
        weight, bias = on_host([weight, bias])
        x, error = self.x[part], self.x[part] @ weight + bias - self.y[part]
        return x.T @ error / len(self.y), error.sum() / len(self.y)

    def parts(self, rank, size):
        """The examples of each micro-batch of `rank`: uneven ones, some of them empty."""
        cuts = np.random.default_rng(7).integers(0, len(self.y) + 1, size * NUM_MICRO - 1)
        bounds = [0, *sorted(cuts), len(self.y)]
        bounds[1] = bounds[0]  # the first micro-batch of rank 0 is empty
        return [slice(bounds[i], bounds[i + 1]) for i in range(rank, size * NUM_MICRO, size)]


def model(optimizer=lambda: ms.optimizers.SGD(0.1, momentum=0.9)):
    weight, bias = ms.Variable(np.ones(3), name="weight"), ms.Variable(0.5, name="bias")
    return weight, bias, optimizer()


@pytest.mark.parametrize(
    "optimizer", [lambda: ms.optimizers.SGD(0.1, momentum=0.9), lambda: ms.optimizers.Adam(0.1)]
)
def test_micro_batches_are_one_big_batch(strategy, rank, size, optimizer):
    problem = Problem(num_examples=5 * size * NUM_MICRO)
    with strategy.scope():
        weight, bias, inner = model(optimizer)
        accumulator = ms.optimizers.GradientAccumulator([weight, bias])

    def micro_step(part):
        gradients = problem.gradients(part, weight.value(), bias.value())
        accumulator.add(zip(gradients, (weight, bias), strict=True))

    plain_weight, plain_bias, plain = model(optimizer)
    for _ in range(3):
        for number, part in enumerate(problem.parts(rank, size), start=1):
            strategy.run(lambda part=part: micro_step(part))
            assert accumulator.num_added == number
        strategy.run(lambda: accumulator.apply(inner))
        assert accumulator.num_added == 0
        gradients = problem.gradients(slice(None), plain_weight.value(), plain_bias.value())
        plain.apply_gradients(zip(gradients, (plain_weight, plain_bias), strict=True))
    assert_allclose(weight.numpy(), plain_weight.numpy(), rtol=1e-12)
    assert_allclose(bias.numpy(), plain_bias.numpy(), rtol=1e-12)
    assert inner.iterations.numpy() == 3


def test_the_sums_are_reduced_once_and_adding_sends_nothing(strategy, counts):
    with strategy.scope():
        variables = [ms.Variable(np.zeros(50, np.float32)) for _ in range(160)]
        optimizer = ms.optimizers.SGD(0.1)
        accumulator = ms.optimizers.GradientAccumulator(variables)
    pairs = [(np.ones(50, np.float32), variable) for variable in variables]
    counts.clear()
    strategy.run(lambda: optimizer.apply_gradients(pairs))
    one_step = dict(counts)
    counts.clear()
    for _ in range(3):
        strategy.run(lambda: accumulator.add(pairs))
    assert not counts
    strategy.run(lambda: accumulator.apply(optimizer))
    assert dict(counts) == one_step != {}
    assert variables[-1].numpy()[0] == np.float32(-0.1 * 4 * strategy.num_replicas_in_sync)


def test_it_may_be_applied_in_cross_replica_context_and_outside_of_it(strategy, rank, size):
    with strategy.scope():
        weight = ms.Variable(np.zeros(2))
        optimizer = ms.optimizers.SGD(1.0)
        accumulator = ms.optimizers.GradientAccumulator([weight])
        strategy.run(lambda: accumulator.add([(np.full(2, rank + 1.0), weight)]))
        accumulator.apply(optimizer)
    total = size * (size + 1) / 2
    assert weight.numpy().tolist() == [-total] * 2
    strategy.run(lambda: accumulator.add([(np.full(2, rank + 1.0), weight)]))
    accumulator.apply(optimizer)
    assert weight.numpy().tolist() == [-2 * total] * 2


def test_plain_variables_outside_every_scope(size):
    weight = ms.Variable(np.zeros(2))
    accumulator = ms.optimizers.GradientAccumulator(iter([weight]))
    for _ in range(3):
        accumulator.add([([1, 2], weight)])
    accumulator.apply(ms.optimizers.SGD(0.5))
    assert weight.numpy().tolist() == [-1.5, -3.0]


def test_the_sums_for_an_optimizer_of_ones_own(strategy, size):
    with strategy.scope():
        weight, bias, _ = model()
    # Outside every scope it belongs to the strategy of its variables.
    accumulator = ms.optimizers.GradientAccumulator([weight, bias])
    assert accumulator.variables == (weight, bias)
    assert "2 variables, num_added=0" in repr(accumulator)
    strategy.run(lambda: accumulator.add([(np.ones(3), weight)]))
    (total, first), (missing, second) = accumulator.grads_and_vars()
    assert first is weight
    assert second is bias
    assert missing is None
    assert total.tolist() == [size] * 3
    total[:] = -1
    assert accumulator.grads_and_vars()[0][0].tolist() == [size] * 3
    accumulator.reset()
    assert accumulator.num_added == 0
    with pytest.raises(ValueError, match=r"grads_and_vars: no gradient.*num_added is 0"):
        accumulator.grads_and_vars()


def test_rows_are_added_where_they_belong(strategy, rank, size):
    with strategy.scope():
        table = ms.Variable(np.zeros((size + 2, 2), np.float32))
        optimizer = ms.optimizers.SGD(1.0)
        accumulator = ms.optimizers.GradientAccumulator([table])

    def step():
        rows = ms.IndexedSlices(np.ones((3, 2)), [rank, rank, size])
        accumulator.add([(rows, table)])
        accumulator.add([(np.ones(table.shape, np.float32), table)])
        accumulator.apply(optimizer)

    strategy.run(step)
    expected = [-size - 2.0] * size + [-2.0 * size, -size]
    assert table.numpy()[:, 1].tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_added_in_float32(strategy, size, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    half = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with strategy.scope():
        weight = ms.Variable(np.zeros(2, half))
        optimizer = ms.optimizers.SGD(1.0)
        accumulator = ms.optimizers.GradientAccumulator([weight])
    tiny = np.float32(half.type(1e-4))

    def step():
        accumulator.add([(np.ones(2, half), weight)])
        for _ in range(100):  # each would vanish beside 1 in half precision
            accumulator.add([(np.full(2, tiny, half), weight)])
        ((total, _),) = accumulator.grads_and_vars()
        accumulator.apply(optimizer)
        return total

    total = strategy.experimental_local_results(strategy.run(step))[0]
    assert total.dtype == np.float32
    assert_allclose(total, size * (1 + 100 * tiny), rtol=1e-5)
    assert weight.dtype == half
    assert weight.numpy().tolist() == (-total).astype(half).tolist()
    # A float32 gradient keeps its bits too.
    strategy.run(lambda: accumulator.add([(np.full(2, 1 + 2**-20, np.float32), weight)]))
    assert accumulator.grads_and_vars()[0][0][0] == np.float32(size * (1 + 2**-20))


def test_variables_without_any_gradient_are_skipped(strategy, size):
    with strategy.scope():
        weight, bias, optimizer = model(lambda: ms.optimizers.SGD(0.5, weight_decay=0.5))
        accumulator = ms.optimizers.GradientAccumulator([weight, bias])

    def step():
        accumulator.add([(None, weight), (None, bias)])
        accumulator.add([(np.ones(3), weight), (None, bias)])
        accumulator.add([(np.ones(3), weight)])
        assert accumulator.num_added == 3
        accumulator.apply(optimizer)

    with pytest.warns(UserWarning, match=r"\['bias'\]: skipped") as caught:
        strategy.run(step)
    assert filenames(caught) == [__file__]
    assert bias.numpy() == 0.5, "neither gradient nor weight decay"
    assert_allclose(weight.numpy(), [0.75 - size] * 3)


def test_what_was_given_is_copied(strategy, size):
    with strategy.scope():
        weight = ms.Variable(np.zeros(2))
        accumulator = ms.optimizers.GradientAccumulator([weight])
    gradient = np.ones(2)
    strategy.run(lambda: accumulator.add([(gradient, weight)]))
    gradient[:] = 7
    assert accumulator.grads_and_vars()[0][0].tolist() == [size] * 2


def test_a_copy_goes_with_the_copies_of_its_variables(strategy, size):
    with strategy.scope():
        weight = ms.Variable(np.zeros(2))
        accumulator = ms.optimizers.GradientAccumulator([weight])
    strategy.run(lambda: accumulator.add([(np.ones(2), weight)]))
    twin_weight, twin = copy.deepcopy((weight, accumulator))
    strategy.run(lambda: twin.add([(np.ones(2), twin_weight)]))
    assert (accumulator.num_added, twin.num_added) == (1, 2)
    assert twin.grads_and_vars()[0][0].tolist() == [2 * size] * 2
    assert accumulator.grads_and_vars()[0][0].tolist() == [size] * 2


def test_bad_arguments_of_the_constructor(strategy):
    integer, weight = ms.Variable(np.arange(3), name="count"), ms.Variable(np.zeros(2), name="w")
    make = ms.optimizers.GradientAccumulator
    for bad, error, words in [
        ([], ValueError, "no variable"),
        ([weight, weight], ValueError, "twice.*'w', 'w'"),
        ([integer], TypeError, "'count' of dtype int64"),
        ([np.zeros(2)], TypeError, "takes variables, not array"),
        (weight, TypeError, "iterable of variables, not <Variable 'w'"),
        (3, TypeError, "iterable of variables, not 3"),
    ]:
        with strategy.scope(), pytest.raises(error, match=words):
            make(bad)
    other = ms.OneDeviceStrategy()
    with other.scope():
        foreign = ms.Variable(np.zeros(2), name="foreign")
    with strategy.scope(), pytest.raises(ms.errors.ContextError, match="'foreign' belongs to"):
        make([foreign])
    with strategy.scope():
        assert make([weight]).num_added == 0, "the strategy is still usable"


def test_a_bad_gradient_changes_nothing(strategy, rank, size):
    with strategy.scope():
        weight, bias, _ = model()
        accumulator = ms.optimizers.GradientAccumulator([weight, bias])
        stranger = ms.Variable(np.zeros(3), name="stranger")
    good = (np.ones(3), weight)
    for bad, error, words in [
        ([], ValueError, "no .*pair"),
        ([good, good[0]], TypeError, "element 1"),
        ([good, (np.ones(3), stranger)], ValueError, r"\['stranger'\] are not.*'weight', 'bias'"),
        ([good, (np.ones(2), bias)], ValueError, r"variable 'bias' has the shape \(2,\)"),
        ([good, (np.ones((), complex), bias)], TypeError, "variable 'bias' has the dtype complex"),
        ([good, (ms.IndexedSlices([1.0], [3]), weight)], IndexError, "'weight' has indices"),
    ]:
        with pytest.raises(error, match=r"GradientAccumulator\.add") as caught:
            strategy.run(lambda bad=bad: accumulator.add(bad))
        assert caught.match(words)
    assert accumulator.num_added == 0
    strategy.run(lambda: accumulator.add([good]))
    assert accumulator.grads_and_vars()[0][0].tolist() == [size] * 3


def test_wrong_contexts(strategy, size):
    with strategy.scope():
        weight = ms.Variable(np.zeros(2))
        accumulator = ms.optimizers.GradientAccumulator([weight])
        with pytest.raises(ValueError, match=r"inside strategy\.run"):
            accumulator.add([(np.ones(2), weight)])
    with pytest.raises(ValueError, match=r"inside strategy\.run"):
        accumulator.add([(np.ones(2), weight)])
    other = ms.OneDeviceStrategy()
    with other.scope():
        foreign = ms.optimizers.SGD(0.1)
        with pytest.raises(ms.errors.ContextError, match="cannot be mixed"):
            accumulator.grads_and_vars()
    with pytest.raises(ms.errors.ContextError, match="GradientAccumulator belongs to"):
        other.run(lambda: accumulator.add([(np.ones(2), weight)]))
    plain = ms.Variable(np.zeros(2))
    outside = ms.optimizers.GradientAccumulator([plain])
    expected = ValueError if size > 1 else ms.errors.ContextError
    with pytest.raises(expected, match="GradientAccumulator (belongs to|was created outside)"):
        strategy.run(lambda: outside.add([(np.ones(2), plain)]))
    strategy.run(lambda: accumulator.add([(np.ones(2), weight)]))
    with pytest.raises(ms.errors.ContextError, match="'iterations' belongs to"):
        strategy.run(lambda: accumulator.apply(foreign))
    with pytest.raises(TypeError, match=r"apply takes an optimizer, not 'sgd'"):
        strategy.run(lambda: accumulator.apply("sgd"))
    assert accumulator.num_added == 1


def test_apply_before_add(strategy):
    with strategy.scope():
        weight, _, optimizer = model()
        accumulator = ms.optimizers.GradientAccumulator([weight])
    with pytest.raises(ValueError, match=r"GradientAccumulator\.apply: no gradient"):
        strategy.run(lambda: accumulator.apply(optimizer))
    strategy.run(lambda: accumulator.add([(None, weight)]))
    with pytest.raises(ValueError, match="num_added is 1"):
        strategy.run(lambda: accumulator.apply(optimizer))


@pytest.mark.parametrize("extra", [0, 1])
def test_replicas_that_have_not_added_alike_are_reported(strategy, others, extra):
    """Without and with an `add` of the last rank's own."""
    with strategy.scope():
        weight, bias, optimizer = model()
        accumulator = ms.optimizers.GradientAccumulator([weight, bias])

    def step():
        accumulator.add([(np.ones(3), weight), (1.0 if others or extra else None, bias)])
        for _ in range(0 if others else extra):
            accumulator.add([(np.ones(3), weight)])
        accumulator.apply(optimizer)

    words = "after 1 calls of add.*after 2 calls of add" if extra else "bias"
    with pytest.raises(ms.errors.CollectiveMismatchError, match=f"(?s){words}"):
        strategy.run(step)
    assert weight.values[0].tolist() == [1] * 3


def test_replicas_with_other_variables_are_reported(strategy, others):
    with strategy.scope():
        weight, bias, _ = model()
        with pytest.raises(ms.errors.CollectiveMismatchError, match="GradientAccumulator"):
            ms.optimizers.GradientAccumulator([weight, bias] if others else [weight])


def saved_job(strategy):
    with strategy.scope():
        weight = ms.Variable(np.zeros(2), name="weight")
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5)
        accumulator = ms.optimizers.GradientAccumulator([weight])
    objects = {"weight": weight, "optimizer": optimizer, "accumulator": accumulator}
    return ms.Checkpoint(**objects), weight, optimizer, accumulator


def test_an_interrupted_accumulation_goes_on_where_it_was(strategy, rank, size, mpi_tmp_path):
    checkpoint, weight, _, accumulator = saved_job(strategy)
    for number in range(3):
        strategy.run(
            lambda number=number: accumulator.add([(np.full(2, rank + number / 3), weight)])
        )
    total = 3 * (size * (size - 1) / 2) + size
    path = checkpoint.write(mpi_tmp_path / "run.h5")
    if rank == 0:
        with h5py.File(path) as file:
            assert_allclose(file[SUM_PATH], total, rtol=1e-14)
    # As many replicas as before, one fewer (and the last one on its own), and one alone.
    fewer = MPI.COMM_WORLD.Split(rank == size - 1)
    for comm in (MPI.COMM_WORLD, fewer, MPI.COMM_SELF):
        resumed = ms.MPIStrategy(comm, device="cpu")
        again, weight, optimizer, accumulator = saved_job(resumed)
        again.restore(path).assert_consumed()
        assert accumulator.num_added == 3
        resumed.run(
            lambda weight=weight, a=accumulator: a.add([(np.ones(2) * weight.shape[0], weight)])
        )
        resumed.run(lambda a=accumulator, optimizer=optimizer: a.apply(optimizer))
        expected = -0.5 * (total + 2 * resumed.num_replicas_in_sync)
        assert_allclose(weight.numpy(), expected, rtol=1e-14)
    fewer.Free()


def test_a_sum_of_one_replica_is_shared_by_all(strategy, rank, mpi_tmp_path):
    path = mpi_tmp_path / "run.h5"
    if rank == 0:
        alone, weight, _, accumulator = saved_job(ms.OneDeviceStrategy())
        weight.strategy.run(lambda: accumulator.add([(np.full(2, 12.0), weight)]))
        alone.write(path)
    checkpoint, weight, _, accumulator = saved_job(strategy)
    checkpoint.restore(path).assert_consumed()
    assert accumulator.num_added == 1
    assert_allclose(accumulator.grads_and_vars()[0][0], 12, rtol=1e-14)


def test_a_checkpoint_for_other_variables_is_refused(strategy, mpi_tmp_path):
    checkpoint, *_ = saved_job(strategy)
    path = checkpoint.write(mpi_tmp_path / "run.h5")
    with strategy.scope():
        weight, bias = ms.Variable(np.zeros(2)), ms.Variable(0.0)
        accumulator = ms.optimizers.GradientAccumulator([weight, bias])
    with pytest.raises(ms.errors.CheckpointMismatchError, match="for 1 variables.* for 2"):
        ms.Checkpoint(accumulator=accumulator, weight=weight).restore(path)


def test_a_step_that_fails_keeps_the_sums(strategy, size):
    def rate(step):
        raise ArithmeticError("no rate")

    with strategy.scope():
        weight = ms.Variable(np.zeros(2))
        optimizer, broken = ms.optimizers.SGD(1.0), ms.optimizers.SGD(rate)
        accumulator = ms.optimizers.GradientAccumulator([weight])
    strategy.run(lambda: accumulator.add([(np.ones(2), weight)]))
    with pytest.raises(ArithmeticError):
        strategy.run(lambda: accumulator.apply(broken))
    strategy.run(lambda: accumulator.apply(optimizer))
    assert weight.numpy().tolist() == [-size] * 2


def test_an_overflow_on_one_rank_skips_the_step_of_all(strategy, rank, size):
    with strategy.scope():
        weight = ms.Variable(np.zeros(2, np.float16))
        scale = ms.optimizers.LossScale(8.0, growth_interval=None)
        optimizer = ms.optimizers.SGD(1.0, loss_scale=scale)
        accumulator = ms.optimizers.GradientAccumulator([weight])

    def step(values):
        for value in values:
            gradient = np.full(2, value * scale.value, np.float16)
            accumulator.add([(gradient, weight)])
        accumulator.apply(optimizer)

    strategy.run(step, ([1.0, np.inf if rank == size - 1 else 1.0],))
    assert weight.numpy().tolist() == [0, 0]
    assert (scale.value, scale.num_skipped_steps, accumulator.num_added) == (4.0, 1, 0)
    strategy.run(step, ([0.25, 0.5],))
    assert weight.numpy().tolist() == [-0.75 * size] * 2


def test_all_replicas_end_with_the_same_bits(strategy, rank):
    with strategy.scope():
        weight, bias, optimizer = model()
        accumulator = ms.optimizers.GradientAccumulator([weight, bias])
    rng = np.random.default_rng(rank)

    def step():
        for _ in range(3):
            accumulator.add([(rng.normal(size=3), weight), (rng.normal(), bias)])
        accumulator.apply(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of strategies of other tests
        strategy.run(step)
    own = np.frombuffer(as_bytes(weight.value()) + as_bytes(bias.value()), np.uint8)
    for extreme in ("min", "max"):
        assert strategy.reduce(extreme, own).tolist() == own.tolist()
