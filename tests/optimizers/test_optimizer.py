import copy
import warnings

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.native import native_library
from tests.devices import assert_allclose, assert_array_equal
from tests.helpers import filenames


def reference_sgd(w, gradients, rate, momentum, nesterov, decay):
    velocity = np.zeros_like(w)
    for g in gradients:
        w = w - rate * decay * w
        velocity = momentum * velocity + rate * g
        w = w - (momentum * velocity + rate * g if nesterov else velocity)
    return w


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0, False, 0), (0.9, False, 0), (0.9, True, 0.1)]
)
def test_sgd(strategy, rank, size, momentum, nesterov, decay):
    start = np.array([1.0, -2.0, 3.0])
    per_replica = np.random.default_rng(0).normal(size=(5, size, 3))
    with strategy.scope():
        variable = ms.Variable(start, name="w")
        optimizer = ms.optimizers.SGD(0.1, momentum, nesterov, weight_decay=decay)
    for step in range(5):
        strategy.run(
            lambda g: optimizer.apply_gradients([(g, variable)]), (per_replica[step, rank],)
        )
    expected = reference_sgd(start, per_replica.sum(1), 0.1, momentum, nesterov, decay)
    assert_allclose(variable.numpy(), expected, rtol=1e-12)
    assert optimizer.iterations.numpy() == 5
    if momentum:
        assert optimizer.slot(variable, "momentum").shape == (3,)


def test_adam_is_the_published_rule(strategy, rank, size):
    gradients = np.random.default_rng(1).normal(size=(4, size, 2))
    with strategy.scope():
        variable = ms.Variable(np.ones(2))
        optimizer = ms.optimizers.Adam(0.01)
    w, m, v = np.ones(2), np.zeros(2), np.zeros(2)
    for step in range(4):
        strategy.run(lambda g: optimizer.apply_gradients([(g, variable)]), (gradients[step, rank],))
        g = gradients[step].sum(0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
        w = w - 0.01 * m_hat / (np.sqrt(v_hat) + 1e-8)
    assert_allclose(variable.numpy(), w, rtol=1e-10)


def test_sparse_gradients_accumulate_duplicates(strategy, size):
    with strategy.scope():
        variable = ms.Variable(np.zeros((4, 2)))
        optimizer = ms.optimizers.SGD(1.0)
    rows = ms.IndexedSlices(np.ones((2, 2)), np.array([1, 1]))
    strategy.run(lambda: optimizer.apply_gradients([(rows, variable)]))
    assert variable.numpy()[:, 0].tolist() == [0, -2 * size, 0, 0]


def test_missing_gradients(strategy, size):
    with strategy.scope():
        first, second = ms.Variable(1.0, name="first"), ms.Variable(1.0, name="second")
        optimizer = ms.optimizers.SGD(0.5)
    with pytest.warns(UserWarning, match="second") as caught:
        strategy.run(lambda: optimizer.apply_gradients([(1.0, first), (None, second)]))
    assert filenames(caught) == [__file__]
    assert first.numpy() == 1 - 0.5 * size
    assert second.numpy() == 1.0
    for pairs in ([], [(None, first)]):
        with pytest.raises(ValueError, match=r"SGD\.apply_gradients"):
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
    with pytest.raises(TypeError):
        optimizer.apply_gradients([(1.0, first)], unknown=1)
    with pytest.raises(ValueError, match="'first'"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), first)]))


def test_a_gradient_missing_on_one_rank_is_a_collective_error(strategy, others):
    with strategy.scope():
        pair = ms.Variable(1.0), ms.Variable(1.0)
        optimizer = ms.optimizers.SGD(0.5)

    def fn():
        gradients = [1.0, 1.0 if others else None]
        optimizer.apply_gradients(zip(gradients, pair, strict=True))

    with warnings.catch_warnings(), pytest.raises(ms.errors.CollectiveError):
        warnings.simplefilter("ignore")
        strategy.run(fn)


def test_cross_replica_and_default_contexts(strategy):
    with strategy.scope():
        variable = ms.Variable(1.0)
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5)
        optimizer.apply_gradients([(ms.Mirrored(1.0), variable)])
    assert variable.numpy() == 0.5, "mirrored gradients are not multiplied"
    plain, optimizer = ms.Variable(1.0), ms.optimizers.SGD(lambda step: 0.5 / (step + 1))
    optimizer.apply_gradients([(1.0, plain)])
    optimizer.apply_gradients([(1.0, plain)])
    assert plain.numpy() == 0.25


def one_variable(strategy, start=(1.0, 1.0), dtype=np.float32, **kwargs):
    with strategy.scope():
        variable = ms.Variable(np.array(start, dtype), name="w")
        return variable, ms.optimizers.SGD(kwargs.pop("rate", 0.5), **kwargs)


@pytest.mark.parametrize(
    "gradient",
    [np.array([1, 2]), [1.0, 2.0], (1.0, 2.0), np.array([1, 2], ">f8"), np.array([1, 2], "f2")],
    ids=["integers", "list", "tuple", "byte order", "float16"],
)
def test_gradients_become_arrays_of_the_variables_dtype(strategy, size, gradient):
    variable, optimizer = one_variable(strategy, rate=2.0**-20)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
    expected = 1 - np.array([1, 2], np.float32) * np.float32(2.0**-20 * size)
    assert_array_equal(variable.numpy(), expected)


@pytest.mark.parametrize(
    ("gradient", "error", "pattern"),
    [
        (np.array([1j, 2]), TypeError, "'w' has the dtype complex128"),
        (np.array(["a", "b"]), TypeError, "'w' has the dtype <U1"),
        ("ab", TypeError, "'w'"),
        ([[1.0], [1.0, 2.0]], ValueError, "'w' is a sequence"),
        (np.ones(3), ValueError, r"'w' has the shape \(3,\)"),
        (ms.IndexedSlices([[1.0]], [0]), ValueError, "'w' has rows"),
        (ms.IndexedSlices([1.0], [0], (5,)), ValueError, "'w' has rows"),
        (ms.IndexedSlices([1.0, 2.0], [2, 0]), IndexError, "'w' has indices from 0 to 2"),
        (ms.IndexedSlices([1.0], [-1]), IndexError, "'w' has indices from -1"),
    ],
)
def test_a_bad_gradient_changes_nothing(strategy, gradient, error, pattern):
    variable, optimizer = one_variable(strategy)
    with strategy.scope():
        first = ms.Variable(1.0, name="first")
    with pytest.raises(error, match=pattern):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, first), (gradient, variable)]))
    assert first.numpy() == 1
    assert variable.numpy().tolist() == [1, 1]
    assert optimizer.iterations.numpy() == 0
    strategy.run(lambda: optimizer.apply_gradients([(1.0, first)]))


def test_pairs_and_variables_that_no_optimizer_takes(strategy):
    variable, optimizer = one_variable(strategy)
    with strategy.scope():
        count = ms.Variable(3, name="count")
    for pairs in ([variable], [(np.ones(2), "w")], 5, [(np.ones(2), variable, 1)]):
        with pytest.raises(TypeError):
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        with pytest.raises(TypeError):
            optimizer.apply_gradients(pairs)
    with pytest.raises(TypeError, match="'count' of dtype int64"):
        strategy.run(lambda: optimizer.apply_gradients([(1, count)]))


def test_a_bad_gradient_on_one_rank_does_not_mix_two_steps(strategy, rank, size, others):
    variable, optimizer = one_variable(strategy)

    def step():
        if others:
            optimizer.apply_gradients([(np.ones(2), variable)])
        else:
            with pytest.raises(ValueError, match="'w'"):
                optimizer.apply_gradients([(np.ones(3), variable)])
        optimizer.apply_gradients([(np.ones(2), variable)])

    with pytest.raises(ms.errors.CollectiveMismatchError, match=f"rank {size - 1}"):
        strategy.run(step)
    assert variable.numpy().tolist() == [1, 1]


def test_the_order_of_variables_must_agree(strategy, others):
    variable, optimizer = one_variable(strategy)
    with strategy.scope():
        twin = ms.Variable(np.ones(2, np.float32), name="twin")
    pairs = [(np.ones(2), variable), (np.zeros(2), twin)]
    with pytest.raises(ms.errors.CollectiveMismatchError, match="twin"):
        strategy.run(lambda: optimizer.apply_gradients(pairs if others else pairs[::-1]))


@pytest.mark.parametrize("in_run", [True, False])
def test_a_missing_gradient_is_agreed_on_without_aggregation(strategy, others, in_run):
    variable, optimizer = one_variable(strategy)
    with strategy.scope():
        second = ms.Variable(1.0, name="second")

    def step():
        gradient = 1.0 if others else None
        optimizer.apply_gradients([(np.ones(2), variable), (gradient, second)], True)

    with warnings.catch_warnings(), pytest.raises(ms.errors.CollectiveError, match="second"):
        warnings.simplefilter("ignore")
        if in_run:
            strategy.run(step)
        else:
            step()
    assert variable.numpy().tolist() == [1, 1]


def test_outside_every_scope_gradients_are_mirrored(strategy, rank):
    variable, optimizer = one_variable(strategy, momentum=0.5)
    optimizer.apply_gradients([(np.ones(2), variable)])
    assert variable.numpy().tolist() == [0.5, 0.5]
    assert optimizer.slot(variable, "momentum").strategy is strategy
    for gradient in (ms.PerReplica(np.full(2, float(rank))), ms.PerReplica([1.0, 1.0])):
        with pytest.raises(ValueError, match="drift apart"):
            optimizer.apply_gradients([(gradient, variable)])
        with strategy.scope(), pytest.raises(ValueError, match="drift apart"):
            optimizer.apply_gradients([(gradient, variable)])
        with pytest.raises(ValueError, match="drift apart"):
            strategy.run(lambda g=gradient: optimizer.apply_gradients([(g, variable)], True), ())
    assert variable.numpy().tolist() == [0.5, 0.5]


def test_outside_every_scope_the_ranks_agree(strategy, others):
    variable, optimizer = one_variable(strategy)
    with pytest.raises(ms.errors.CollectiveError):
        if others:
            optimizer.apply_gradients([(np.ones(2), variable)])
        else:
            variable.assign([1.0, 1.0])


def test_two_strategies_cannot_be_mixed(strategy):
    variable, optimizer = one_variable(strategy)
    other = ms.OneDeviceStrategy()
    with other.scope():
        stranger = ms.Variable(1.0, name="stranger")
    pairs = [(np.ones(2), variable), (1.0, stranger)]
    pattern = "'stranger' belongs to .*OneDeviceStrategy.*MPIStrategy"
    with pytest.raises(ms.errors.ContextError, match=pattern):
        optimizer.apply_gradients(pairs)
    with pytest.raises(ms.errors.ContextError, match=pattern):
        strategy.run(lambda: optimizer.apply_gradients(pairs))
    with other.scope(), pytest.raises(ms.errors.ContextError, match="'w' belongs to .*MPIStrategy"):
        optimizer.apply_gradients(pairs[:1])
    assert variable.numpy().tolist() == [1, 1]


def test_plain_variables_keep_plain_slots(strategy):
    plain, optimizer = ms.Variable(1.0, name="plain"), ms.optimizers.SGD(0.5, momentum=0.5)
    with strategy.scope():
        optimizer.apply_gradients([(1.0, plain)])
    assert plain.numpy() == 1 - 0.5
    optimizer.apply_gradients([(1.0, plain)])
    assert plain.numpy() == 1 - 0.5 - (0.25 + 0.5)
    assert optimizer.slot(plain, "momentum").strategy is None


def test_a_gradient_that_is_a_view_of_a_variable_keeps_its_value(strategy):
    variable, optimizer = one_variable(strategy, weight_decay=1.0)
    with strategy.scope():
        second = ms.Variable(np.ones(2, np.float32), name="second")
    optimizer.apply_gradients([(variable.value(), variable), (variable, second)])
    assert variable.numpy().tolist() == [0, 0]
    assert second.numpy().tolist() == [0, 0]


def test_indexed_slices_check_what_they_are_given():
    slices = ms.IndexedSlices([[1.0, 2.0]], [0], [3, 2])
    assert slices.values.shape == (1, 2)
    assert slices.indices.dtype == np.int64
    assert slices.dense_shape == (3, 2)
    assert ms.IndexedSlices([[1.0, 2.0]], [0], np.array([3, 2])).dense_shape == (3, 2)
    assert ms.IndexedSlices(np.zeros((0, 2)), []).indices.size == 0
    values, indices = np.ones((2, 2)), np.array([0, 1], np.uint8)
    kept = ms.IndexedSlices(values, indices)
    assert kept.values is values
    assert kept.indices is indices
    for bad in ([0.0], [True], np.array([1.5]), ["0"]):
        with pytest.raises(TypeError, match="integer indices"):
            ms.IndexedSlices([1.0], bad)
    with pytest.raises(TypeError, match="numbers"):
        ms.IndexedSlices(["a"], [0])
    for values, indices, shape in (([1.0], [0, 1], None), (1.0, 0, None), ([[1.0]], [0], (3, 2))):
        with pytest.raises(ValueError, match="IndexedSlices"):
            ms.IndexedSlices(values, indices, shape)


def test_indexed_slices_of_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    values, indices = torch.ones(2, 3), torch.tensor([0, 1])
    slices = ms.IndexedSlices(values, indices)
    assert slices.values is values
    assert slices.indices is indices
    with pytest.raises(TypeError, match="integer indices"):
        ms.IndexedSlices(values, torch.ones(2))


def test_tensors_as_gradients(strategy, size):
    torch = pytest.importorskip("torch")
    variable, optimizer = one_variable(strategy)
    gradient = torch.ones(2, dtype=torch.float64, requires_grad=True)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
    rows = ms.IndexedSlices(torch.ones(1), torch.tensor([1]))
    strategy.run(lambda: optimizer.apply_gradients([(rows, variable)]))
    assert variable.numpy().tolist() == [1 - 0.5 * size, 1 - size]


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_deep_copies_of_a_pair_keep_their_slots(strategy, size, optimizer_first):
    variable, optimizer = one_variable(strategy, momentum=0.5)

    def step(optimizer, variable):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), variable)]))

    step(optimizer, variable)
    if optimizer_first:
        twin_optimizer, twin = copy.deepcopy((optimizer, variable))
    else:
        twin, twin_optimizer = copy.deepcopy((variable, optimizer))
    assert twin_optimizer.slot(twin, "momentum") is not optimizer.slot(variable, "momentum")
    step(optimizer, variable)
    step(twin_optimizer, twin)
    assert twin.numpy().tolist() == variable.numpy().tolist()
    assert variable.numpy()[0] == 1 - 0.5 * size - 0.75 * size
    assert next(each.of for each in twin_optimizer._checkpoint_dependents()) is twin


def test_slots_find_their_variables_by_path_not_by_name(strategy, mpi_tmp_path):
    """Default names differ in each program, and two variables may share one."""

    def make(names, others=0):
        with strategy.scope():
            for _ in range(others):
                ms.Variable(0.0)
            model = {key: ms.Variable(np.ones(2), name=name) for key, name in names.items()}
            return model, ms.optimizers.SGD(0.5, momentum=0.5)

    def step(model, optimizer, keys=("a", "b", "c")):
        pairs = [(np.full(2, ord(key) - 96.0), model[key]) for key in keys]
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    model, optimizer = make({"a": None, "b": "w", "c": "w"})
    step(model, optimizer)
    path = ms.Checkpoint(model=model, optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    step(model, optimizer)

    twin, twin_optimizer = make({"c": None, "a": "w", "b": "x"}, others=3)
    status = ms.Checkpoint(model=twin, optimizer=twin_optimizer).restore(path)
    step(twin, twin_optimizer, keys="cab")
    status.assert_consumed()
    for key, variable in model.items():
        assert twin[key].numpy().tolist() == variable.numpy().tolist()


def test_slots_that_only_a_name_could_tell_apart_are_refused(strategy, mpi_tmp_path):
    with strategy.scope():
        variables = [ms.Variable(0.0, name="w") for _ in range(2)]
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5)
        optimizer.apply_gradients([(1.0, variable) for variable in variables])
    with pytest.raises(ValueError, match=r"called 'w' that are not in it.* Add these variables"):
        ms.Checkpoint(optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    ms.Checkpoint(optimizer=optimizer, model=variables).write(mpi_tmp_path / "run.h5")


def test_slots_have_paths_that_cannot_collide(strategy, mpi_tmp_path):
    names = ["a", "a/b", "a%2Fb", ".", ""]
    with strategy.scope():
        variables = [ms.Variable(float(i), name=name) for i, name in enumerate(names)]
        optimizer = ms.optimizers.SGD(0.5, momentum=0.5)
        optimizer.apply_gradients([(1.0, variable) for variable in variables])
    path = ms.Checkpoint(optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    with h5py.File(path) as file:
        keys = sorted(file["variables/optimizer/momentum"])
    assert keys == sorted(["a", "a%2Fb", "a%252Fb", "%2E", "%"])
    optimizer.slot(variables[1], "momentum").assign(7.0)
    ms.Checkpoint(optimizer=optimizer).restore(path).assert_consumed()
    assert optimizer.slot(variables[1], "momentum").numpy() == 0.5


def test_a_slot_that_a_checkpoint_refuses_stops_the_step_before_it_moves(strategy, mpi_tmp_path):
    def make(length):
        with strategy.scope():
            pair = ms.Variable(1.0, name="a"), ms.Variable(np.ones(length), name="b")
            return pair, ms.optimizers.SGD(0.5, momentum=0.5)

    def step(pair, optimizer):
        optimizer.apply_gradients([(np.ones(each.shape), each) for each in pair])

    pair, optimizer = make(2)
    step(pair, optimizer)
    path = ms.Checkpoint(optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    pair, optimizer = make(3)
    ms.Checkpoint(optimizer=optimizer).restore(path).expect_partial()
    for _ in range(2):
        with pytest.raises(ms.errors.CheckpointMismatchError, match="momentum/b"):
            step(pair, optimizer)
        assert pair[0].numpy() == 1
    assert optimizer.slot(pair[0], "momentum").numpy() == 0.5
    with pytest.raises(KeyError, match="'momentum' for the variable 'b'"):
        optimizer.slot(pair[1], "momentum")


def test_a_bad_parameter_on_one_rank_is_named(strategy, size, others):
    def make():
        if others:
            return ms.optimizers.SGD(0.1)
        with pytest.raises(ValueError, match="momentum"):
            ms.optimizers.SGD(0.1, momentum=2)
        return ms.optimizers.SGD(0.1)

    with (
        strategy.scope(),
        pytest.raises(ms.errors.CollectiveMismatchError, match=f"rank {size - 1}"),
    ):
        make()


def test_the_ranks_agree_on_parameters(strategy, others):
    with strategy.scope(), pytest.raises(ms.errors.CollectiveMismatchError, match=r"0\.25"):
        ms.optimizers.Adam(0.5 if others else 0.25)


def test_rates_that_differ_are_noticed(strategy, rank, others):
    with strategy.scope():
        variable = ms.Variable(1.0)
        optimizer = ms.optimizers.SGD(lambda step: 0.1 * (rank + 1))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="with the learning rate 0.1"):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, variable)]))


def test_a_variable_that_comes_twice_is_refused(strategy):
    with strategy.scope():
        optimizer, variable = ms.optimizers.SGD(0.1), ms.Variable(1.0, name="w")
    pairs = [(1.0, variable), (2.0, variable)]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"twice: \['w', 'w'\]\. Add its gradients"):
            strategy.run(optimizer.apply_gradients, (pairs,))
    assert variable.numpy() == 1


def test_what_is_no_list_of_pairs_is_refused(strategy, size):
    with strategy.scope():
        optimizer = ms.optimizers.SGD(0.1)
    for given in (None, 3):
        with pytest.raises(TypeError, match="pairs"):
            optimizer.apply_gradients(given)
    assert strategy.reduce("sum", 1) == size


@pytest.mark.fast
@pytest.mark.host_memory
def test_warm_steps_check_nothing_again(strategy, monkeypatch):
    variable, optimizer = one_variable(strategy, momentum=0.5)

    def step(gradient):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

    step(np.ones(variable.shape, variable.dtype))
    with monkeypatch.context() as patched:
        if native_library() is not None:
            patched.setattr("mpistrat.optimizers.optimizer.check_gradients", None)
        step(np.full(variable.shape, 2, variable.dtype))
    step([2.0] * variable.size)  # no array: a step of the long way, on all ranks
    assert optimizer.iterations.numpy() == 3
    with strategy.scope():
        optimizer.iterations = ms.Variable(np.int64(7), trainable=False)
    step(np.ones(variable.shape, variable.dtype))
    assert optimizer.iterations.numpy() == 8
