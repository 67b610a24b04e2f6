"""Steps on a device, repeated, with fast paths and without them: the same bits."""

import functools

import numpy as np
import pytest

import mpistrat as ms
from tests.fast_paths import OFF, all_opened
from tests.optimizers.test_fast_paths import OPTIMIZERS, Model, assert_same, states

SHAPES = {
    "float32": {"w": ((40, 30), "f4"), "b": ((30,), "f4"), "scalar": ((), "f4")},
    "one": {"w": ((70, 50), "f4")},
    "mixed": {
        "w": ((40, 30), "f4"),
        "half": ((9,), "f2"),
        "wide": ((5, 2), "f8"),
        "c": ((3,), "c8"),
    },
    "two": {"w": ((40, 30), "f4"), "wide": ((5, 2), "f8"), "c": ((3,), "c16"), "d": ((4,), "c8")},
    "empty": {"w": ((0, 3), "f4"), "b": ((3,), "f4")},
    "many": {f"w{i}": ((1 + i % 7, 3), "f4") for i in range(130)},
}


def on_gpus(comm, device, **more):
    return ms.MPIStrategy(comm, device="gpu", **more)


@pytest.fixture(scope="module", params=["ranks", "replicas", "deterministic"])
def strategies(request):
    """A strategy that takes every fast path, and one that takes none."""
    more = {
        "ranks": {},
        "replicas": {"num_replicas": 5},
        "deterministic": {"communication_options": ms.CommunicationOptions(deterministic=True)},
    }[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPISTRAT_SHARE_GPUS", "on")
        with all_opened(["memory", OFF], make=on_gpus, **more) as opened:
            yield opened


def on_device(number, name, gradient):
    import cupy

    return cupy.asarray(gradient)


def take(model, number):
    model.step(number, on_device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shapes", ["float32", "mixed", "two", "empty"])
def test_the_same_step_again(strategies, shapes, optimizer):
    assert_same(states(strategies, take, SHAPES[shapes], optimizer))


@pytest.mark.parametrize("shapes", ["one", "many"])
def test_one_array_and_several_groups(strategies, shapes):
    assert_same(states(strategies, take, SHAPES[shapes], "clipped"))


@pytest.mark.parametrize("shapes", ["float32", "one", "two", "many"])
def test_a_later_step_is_a_prepared_one(gpus, shapes):
    model = Model(gpus, SHAPES[shapes], "clipped")
    for number in range(3):
        take(model, number)
        (known,) = model.optimizer._prepared.values()
        assert bool(known.updates) == (number > 0)
    assert all(known.updates.values())
    assert known._sums is not None


def test_gradients_of_another_form_between(strategies):
    import cupy

    def changed(form, number, name, gradient):
        chosen = form if name == "w" else "alike"
        if chosen == "sliced":
            return ms.IndexedSlices(cupy.asarray(gradient[:3]), cupy.asarray([1, 0, 1]))
        if chosen == "turned":
            return cupy.asarray(np.ascontiguousarray(gradient.T)).T
        if chosen == "on host":
            return gradient
        return cupy.asarray(gradient.astype(np.float64) if chosen == "wide" else gradient)

    def take_all(model, number):
        for form in ("wide", "sliced", "on host", "turned", "alike"):
            model.step(number, functools.partial(changed, form))
            take(model, number)

    assert_same(states(strategies, take_all, SHAPES["float32"], "adam"))


def test_variables_and_parameters_that_change_between(strategies):
    def take_changed(model, number):
        model.optimizer.learning_rate = 0.1 / (number + 1)
        model.optimizer.weight_decay = 0.01 if number % 2 else None
        for each in model.variables.values():
            each.assign(each.numpy() * 2)
        take(model, number)
        if number % 2:
            model.optimizer.slot(model.variables["b"], "momentum").assign(np.ones(30, "f4"))
            model.optimizer.iterations.assign(number)

    assert_same(states(strategies, take_changed, SHAPES["float32"], "momentum"))


def test_gradients_that_are_memory_of_the_weights(strategies):
    def take_weights(model, number):
        first, second = (model.variables[name] for name in ("w", "v"))
        pairs = [(second.value(), first), (first.value(), second)]
        model.strategy.run(model.optimizer.apply_gradients, args=(pairs,))

    shapes = {"w": ((20, 30), "f4"), "v": ((20, 30), "f4")}
    assert_same(states(strategies, take_weights, shapes, "momentum"))


def test_another_stream_is_current(strategies):
    import cupy

    def take_elsewhere(model, number):
        take(model, number)
        cupy.cuda.runtime.deviceSynchronize()
        with cupy.cuda.Stream():
            take(model, number)
            cupy.cuda.runtime.deviceSynchronize()

    assert_same(states(strategies, take_elsewhere, SHAPES["float32"], "adam"))


def test_two_optimizers_with_variables_of_the_same_names(strategies):
    """Their reductions share a buffer, which each step leaves before the next one."""

    def take_both(model, number):
        if number == 0:
            model.twin = Model(model.strategy, model.shapes, "adam")
        take(model, number)
        model.twin.step(number + 7, on_device)
        found = [each.numpy() for each in model.twin.variables.values()]
        assert all(np.isfinite(each).all() for each in found)

    assert_same(states(strategies, take_both, SHAPES["float32"], "adam"))
