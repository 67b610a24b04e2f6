import itertools

import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_allclose, assert_array_equal
from tests.helpers import filenames


def make(strategy, scale=None, dtype=np.float32, **options):
    with strategy.scope():
        variable = ms.Variable(np.ones(3, dtype), name="w")
        loss_scale = ms.optimizers.LossScale(**(scale or {}))
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5, loss_scale=loss_scale, **options)
    return variable, loss_scale, optimizer


def apply(strategy, optimizer, variable, gradient):
    strategy.run(optimizer.apply_gradients, ([(gradient, variable)],))


def test_gradients_are_divided_by_the_scale(strategy, size):
    variable, loss_scale, optimizer = make(strategy, {"initial_scale": 1024})
    gradient = np.full(3, 0.25 * loss_scale.value / size, np.float16)
    apply(strategy, optimizer, variable, gradient)
    assert_allclose(variable.numpy(), 1 - 0.5 * 0.25, rtol=1e-3)


def test_a_scale_of_another_strategy_is_refused_between_steps_too(strategy):
    variable, own, optimizer = make(strategy)
    apply(strategy, optimizer, variable, np.zeros(3, np.float32))
    with ms.MPIStrategy(device="cpu").scope():
        optimizer.loss_scale = ms.optimizers.LossScale()
    with pytest.raises(ms.errors.ContextError, match="Different strategies"):
        apply(strategy, optimizer, variable, np.zeros(3, np.float32))
    optimizer.loss_scale = own
    apply(strategy, optimizer, variable, np.zeros(3, np.float32))
    assert optimizer.iterations.numpy() == 2


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_all_skip_a_step_that_overflows_anywhere(strategy, rank, size, bad):
    variable, loss_scale, optimizer = make(strategy, {"initial_scale": 8, "backoff_factor": 0.25})
    apply(strategy, optimizer, variable, np.ones(3))
    before, momentum = variable.numpy(), optimizer.slot(variable, "momentum").numpy()
    apply(strategy, optimizer, variable, np.array([1, bad if rank == size - 1 else 1, 1]))
    assert_array_equal(variable.numpy(), before)
    assert_array_equal(optimizer.slot(variable, "momentum").numpy(), momentum)
    assert (loss_scale.value, loss_scale.num_skipped_steps) == (2, 1)
    assert optimizer.iterations.numpy() == 1


def test_large_finite_gradients_are_no_overflow(strategy, size):
    # Their squares overflow float32, and so does a norm taken without care.
    variable, loss_scale, optimizer = make(strategy, {"initial_scale": 1}, global_clipnorm=3.0)
    apply(strategy, optimizer, variable, np.array([0, 3e30 / size, 4e30 / size], np.float32))
    assert loss_scale.num_skipped_steps == 0
    assert_allclose(variable.numpy(), [1, 1 - 0.9, 1 - 1.2], rtol=1e-5, atol=1e-6)


def test_the_scale_grows_after_good_steps_and_shrinks_after_bad(strategy):
    parameters = {"initial_scale": 4, "growth_interval": 3}
    variable, loss_scale, optimizer = make(strategy, parameters)
    history = []
    for good in (1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0):
        apply(strategy, optimizer, variable, np.full(3, 1.0 if good else np.inf))
        history.append(loss_scale.value)
    expected, scale, streak = [], 4.0, 0
    for good in (1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0):
        streak = streak + 1 if good else 0
        if not good:
            scale = max(1.0, scale / 2)
        elif streak == 3:
            scale, streak = scale * 2, 0
        expected.append(scale)
    assert history == expected


def test_a_scale_that_does_not_grow(strategy):
    variable, loss_scale, optimizer = make(strategy, {"initial_scale": 2, "growth_interval": None})
    for _ in range(5):
        apply(strategy, optimizer, variable, np.ones(3))
    assert loss_scale.value == 2


def test_half_precision_variables_keep_their_moments_in_float32(strategy, size):
    with strategy.scope():
        variable = ms.Variable(np.ones(4, np.float16))
        optimizer = ms.optimizers.Adam(0.01)
    for _ in range(3):  # the squares of these would be zero in float16
        apply(strategy, optimizer, variable, np.full(4, 1e-5 / size, np.float16))
    assert variable.dtype == np.float16
    assert optimizer.slot(variable, "second_moment").dtype == np.float32
    # The steps of Adam do not depend on the size of the gradient, but for rounding.
    assert_allclose(variable.numpy(), 0.97, atol=2e-3)


def test_the_scale_is_part_of_a_checkpoint(strategy, mpi_tmp_path):
    parameters = {"initial_scale": 64, "growth_interval": 2}
    variable, scale, optimizer = make(strategy, parameters)
    for bad in (0, 1, 0):
        apply(strategy, optimizer, variable, np.full(3, np.inf if bad else scale.value))
    ms.Checkpoint(w=variable, optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    other, other_scale, other_optimizer = make(strategy, parameters)
    checkpoint = ms.Checkpoint(w=other, optimizer=other_optimizer)
    checkpoint.restore(mpi_tmp_path / "run.h5")
    assert (other_scale.value, other_scale.num_skipped_steps) == (32, 1)
    apply(strategy, other_optimizer, other, np.ones(3))
    assert other_scale.value == 64, "the good step before the checkpoint counts"


@pytest.mark.parametrize("bad", [False, True])
def test_a_scale_that_changed_unread_is_a_warning(strategy, bad):
    with strategy.scope():
        scale = ms.optimizers.LossScale(8.0, growth_interval=1)
        variables = [ms.Variable(np.zeros(3)) for _ in range(2)]
        optimizers = [ms.optimizers.SGD(1.0, loss_scale=scale) for _ in range(2)]
    gradient = np.full(3, scale.value)
    apply(strategy, optimizers[0], variables[0], gradient * (np.inf if bad else 1))
    with pytest.warns(RuntimeWarning, match=r"become (4|16)\.0 and has not been read") as warned:
        strategy.run(lambda: optimizers[1].apply_gradients([(gradient, variables[1])]))
    assert filenames(warned) == [__file__], "the line of the program"
    gradient = np.full(3, scale.value)
    apply(strategy, optimizers[1], variables[1], gradient)


def test_clipping_counts_each_row_once(strategy, size):
    with strategy.scope():
        dense = ms.Variable(np.zeros(1), name="dense")
        table = ms.Variable(np.zeros((4, 1)), name="table")
        optimizer = ms.optimizers.SGD(1.0, global_clipnorm=1.0)
    # Over replicas row 2 adds up to 4, the dense gradient to 3: the norm is 5.
    rows = ms.IndexedSlices(np.full((2, 1), 2 / size), np.array([2, 2]))
    pairs = [(np.full(1, 3 / size), dense), (rows, table)]
    strategy.run(optimizer.apply_gradients, (pairs,))
    assert_allclose(dense.numpy(), -3 / 5)
    assert_allclose(table.numpy().ravel(), [0, 0, -4 / 5, 0])


def test_small_gradients_are_not_clipped(strategy, size):
    with strategy.scope():
        variable = ms.Variable(np.zeros(2))
        optimizer = ms.optimizers.SGD(1.0, global_clipnorm=5.0)
    apply(strategy, optimizer, variable, np.array([3.0, 4.0]) / size)
    assert_allclose(variable.numpy(), [-3, -4])


def test_gradients_that_are_views_of_what_the_step_writes(strategy):
    with strategy.scope():
        a, b = (ms.Variable(np.arange(1.0, 7).reshape(2, 3), name=name) for name in "ab")
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5)
        optimizer.apply_gradients([(np.ones((2, 3)), a), (np.ones((2, 3)), b)])
        start, momentum = a.numpy(), optimizer.slot(b, "momentum").numpy()
        # b's gradient is a's storage, reversed; a's is b's momentum.
        pairs = [(optimizer.slot(b, "momentum").value(), a), (a.value()[::-1], b)]
        before = b.numpy()
        optimizer.apply_gradients(pairs)
    assert_allclose(b.numpy(), before - (0.5 * momentum + 0.5 * start[::-1]))
    assert_allclose(a.numpy(), start - (0.5 * momentum + 0.5 * momentum))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
@pytest.mark.host_memory
def test_a_step_allocates_nothing_large(strategy, dtype):
    import tracemalloc

    n = 400_000
    gradient = np.ones(n, dtype)
    with strategy.scope():
        variable = ms.Variable(np.zeros(n, dtype))
        optimizer = ms.optimizers.Adam(0.1, weight_decay=0.1, global_clipnorm=1.0)
        optimizer.apply_gradients([(gradient, variable)])
        arrays = (variable, *(optimizer.slot(variable, f"{n}_moment") for n in ("first", "second")))
        addresses = [each._storage.__array_interface__["data"] for each in arrays]
        tracemalloc.start()
        optimizer.apply_gradients([(gradient, variable)])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 0.5 * gradient.nbytes + 2**18
    again = [each._storage.__array_interface__["data"] for each in arrays]
    assert again == addresses, "storage stays where it is"


def test_what_the_ranks_must_agree_on(strategy, others, rank):
    scale = 2.0 ** (1 + others)
    with strategy.scope(), pytest.raises(ms.errors.CollectiveMismatchError):
        ms.optimizers.LossScale(initial_scale=scale)


@pytest.mark.host_memory
def test_interleaved_variables_of_many_dtypes(strategy, rank, size):
    dtypes = [np.float16, np.float32, np.float64, np.complex64, np.longdouble]
    with strategy.scope():
        variables = [ms.Variable(np.ones(5, d), name=np.dtype(d).name) for d in dtypes]
        optimizer = ms.optimizers.SGD(0.25)
    for _, factor in zip(range(2), itertools.repeat(rank + 1), strict=False):
        pairs = [(np.full(5, factor, v.dtype), v) for v in variables]
        strategy.run(optimizer.apply_gradients, (pairs,))
    total = size * (size + 1) / 2
    for variable in variables:
        assert_allclose(variable.numpy(), 1 - 2 * 0.25 * total)
