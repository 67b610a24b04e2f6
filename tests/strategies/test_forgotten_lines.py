"""Further forgotten lines and wrong names, each of which raises or warns."""

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import user_warnings
from mpistrat.errors import ScopeWarning
from mpistrat.optimizers import SGD, Adam


@pytest.fixture(autouse=True)
def _nothing_given_yet(monkeypatch):
    monkeypatch.setattr(user_warnings, "_given", set())


def scope_warnings(work):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ScopeWarning)
        work()
    return [str(each.message) for each in given if issubclass(each.category, ScopeWarning)]


PASSED = {
    "argument": lambda batch: ((batch,), {}),
    "keywords": lambda batch: ((), batch),
    "nested": lambda batch: (([batch["y"]],), {}),
}


@pytest.mark.parametrize("how", PASSED)
def test_a_batch_of_a_dataset_that_was_not_distributed_warns_once(strategy, size, how):
    def use():
        for batch in ms.data.Dataset.from_arrays({"x": np.arange(12), "y": np.ones(12)}).batch(4):
            args, kwargs = PASSED[how](batch)
            strategy.run(lambda *args, **kwargs: 1.0, args=args, kwargs=kwargs)

    texts = scope_warnings(use)
    assert len(texts) == (size > 1)
    for text in texts:
        assert "strategy.distribute_dataset(dataset)" in text


def test_batches_that_are_distributed_or_cut_do_not_warn(strategy, rank, size):
    dataset = ms.data.Dataset.from_arrays(np.arange(12.0)).batch(4)

    def use():
        for batch in strategy.distribute_dataset(dataset):
            strategy.run(np.sum, args=(batch,))
        for batch in dataset:
            strategy.run(np.sum, args=(batch[rank::size],))
        for example in ms.data.Dataset.from_arrays(np.ones((3, 2))):
            strategy.run(np.sum, args=(example,))

    assert scope_warnings(use) == []


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lr", "learning_rate"),
        ("eps", "epsilon"),
        ("betas", "beta_1 and beta_2"),
        ("clipnorm", "global_clipnorm"),
        ("param_groups", "learning_rate"),
    ],
)
@pytest.mark.parametrize("make", [SGD, Adam])
def test_attributes_of_other_libraries_cannot_be_set(make, name, remedy):
    optimizer = make()
    with pytest.raises(AttributeError, match=f"no attribute {name!r}.*Set {remedy}"):
        setattr(optimizer, name, 0.5)
    assert not hasattr(optimizer, name)


def test_optimizers_of_programs_may_have_such_attributes():
    class Own(SGD):
        def __init__(self, lr):
            super().__init__(lr)
            self.lr = lr

    assert Own(0.25).lr == 0.25


def test_ufunc_at_does_not_write_to_a_variable(strategy):
    with strategy.scope():
        variable = ms.Variable(np.zeros(3), name="w")
    with pytest.raises(TypeError, match="cannot be the output of a NumPy function"):
        np.add.at(variable, [0], 1.0)
    assert (variable.numpy() == 0).all()
    target = np.zeros(3)
    np.add.at(target, [0, 1, 1], variable.numpy() + 1)
    assert target.tolist() == [1, 2, 0]


TOO_LARGE = {
    "assign": (np.int32, lambda v: v.assign(np.array([2**40, 0], np.int64))),
    "assign_add": (np.int32, lambda v: v.assign_add(np.array([0, -(2**31) - 1], np.int64))),
    "narrower": (np.int8, lambda v: v.assign(np.array([127, -129], np.int16))),
    "scatter_add": (
        np.int16,
        lambda v: v.scatter_add(ms.IndexedSlices(np.array([40_000], np.int32), np.array([1]))),
    ),
}


@pytest.mark.parametrize("how", TOO_LARGE)
def test_integers_do_not_wrap_around_in_a_write(strategy, how):
    dtype, write = TOO_LARGE[how]
    with strategy.scope():
        variable = ms.Variable(np.ones(2, dtype), name="count")
    with pytest.raises(TypeError, match="'count'.*would wrap around"):
        write(variable)
    assert (variable.numpy() == 1).all()
    variable.assign(np.array([7, -7], np.int64))
    assert variable.numpy().tolist() == [7, -7]


def test_an_initial_value_does_not_wrap_around(strategy):
    with strategy.scope():
        with pytest.raises(ValueError, match="'count' of dtype int32.*would wrap around"):
            ms.Variable(np.array([2**31]), dtype=np.int32, name="count")
        assert ms.Variable(np.array([2**31 - 1]), dtype=np.int32).numpy() == [2**31 - 1]
