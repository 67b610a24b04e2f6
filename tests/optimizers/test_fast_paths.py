"""Steps of every optimizer, repeated, by each fast path and without them: the same bits."""

import itertools

import numpy as np
import pytest

import mpistrat as ms
from tests.fast_paths import OFF, all_opened, thorough_but
from tests.helpers import as_bytes

STEPS = 4
"""The first step looks at everything and makes the slots, the second one may be prepared."""
ADAM, SGD = ms.optimizers.Adam, ms.optimizers.SGD
OPTIMIZERS = {
    "sgd": lambda **more: SGD(0.1),
    "momentum": lambda **more: SGD(0.1, momentum=0.9, **more),
    "nesterov": lambda **more: SGD(0.1, 0.9, nesterov=True, weight_decay=0.01, **more),
    "adam": lambda **more: ADAM(0.1, **more),
    "adamw": lambda **more: ms.optimizers.AdamW(0.1, weight_decay=0.1, **more),
    "clipped": lambda **more: ADAM(0.1, global_clipnorm=0.5, **more),
    "scaled": lambda **more: ADAM(0.1, loss_scale=ms.optimizers.LossScale(8.0, 2), **more),
    "scheduled": lambda **more: SGD(lambda step: 0.1 / (step + 1), 0.5, **more),
}
SHAPES = {
    "float32": {"w": ((40, 30), "f4"), "b": ((30,), "f4"), "scalar": ((), "f4")},
    "large": {"w": ((700, 500), "f4"), "b": ((7,), "f4")},
    "mixed": {
        "w": ((40, 30), "f4"),
        "half": ((9,), "f2"),
        "wide": ((5, 2), "f8"),
        "c": ((3,), "c8"),
    },
    "empty": {"w": ((0, 3), "f4"), "b": ((3,), "f4")},
}
STRATEGIES = {
    "ranks": {},
    "replicas": {"num_replicas": 5},
    "in order": {"communication_options": ms.CommunicationOptions(deterministic=True)},
}


@pytest.fixture(scope="module", params=thorough_but(STRATEGIES, ["ranks", "replicas"]))
def strategies(request):
    """A strategy that takes every fast path, and one that takes none."""
    with all_opened(["memory", OFF], **STRATEGIES[request.param]) as opened:
        yield opened


def numbers(seed, shape, dtype):
    rng = np.random.default_rng([*seed, *shape])
    found = rng.normal(size=shape)
    return np.asarray(found + 1j * rng.normal(size=shape) if dtype[0] == "c" else found).astype(
        dtype
    )


class Model:
    """Variables of a strategy and their optimizer."""

    def __init__(self, strategy, shapes, optimizer, **more):
        self.strategy, self.shapes = strategy, shapes
        with strategy.scope():
            self.variables = {
                name: ms.Variable(numbers([0], *each), name=name) for name, each in shapes.items()
            }
            self.optimizer = OPTIMIZERS[optimizer](**more)

    def step(self, number, change=lambda number, name, gradient: gradient):
        def step():
            replica = ms.get_replica_context().replica_id_in_sync_group
            loss_scale = self.optimizer.loss_scale
            scale = 1 if loss_scale is None else loss_scale.value
            found = {
                name: numbers([number + 1, replica], *self.shapes[name]) for name in self.variables
            }
            pairs = [
                (change(number, name, (each * scale).astype(each.dtype)), self.variables[name])
                for name, each in found.items()
            ]
            self.optimizer.apply_gradients(pairs)

        self.strategy.run(step)

    def state(self):
        names = self.optimizer._rule.kernel.slots
        pairs = itertools.product(self.variables.values(), names)
        slots = [self.optimizer.slot(each, name).numpy() for each, name in pairs]
        values = [each.numpy() for each in self.variables.values()]
        return [as_bytes(each) for each in [*values, *slots, self.optimizer.iterations.numpy()]]


def states(strategies, take, *arguments, **more):
    """Return by way the state after each of the steps that ``take(model, number)`` takes."""
    found = {}
    for way, strategy in strategies.items():
        model = Model(strategy, *arguments, **more)
        found[way] = []
        for number in range(STEPS):
            take(model, number)
            found[way].append(model.state())
            strategy.extended.assert_replicas_agree(list(model.variables.values()))
    return found


def assert_same(found):
    for way, each in found.items():
        assert each == found[OFF], way


QUICK = ("momentum", "adam")


@pytest.mark.parametrize("optimizer", thorough_but(OPTIMIZERS, QUICK))
@pytest.mark.parametrize("shapes", thorough_but(SHAPES, ["float32", "mixed"]))
@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_the_same_step_again(strategies, shapes, optimizer, is_sharded):
    if is_sharded and optimizer == "sgd":
        pytest.skip("it has no slots")
    found = states(strategies, Model.step, SHAPES[shapes], optimizer, sharded_slots=is_sharded)
    assert_same(found)


def test_sharded_slots_have_the_bits_of_whole_ones(strategies):
    for optimizer in QUICK:
        whole = states(strategies, Model.step, SHAPES["float32"], optimizer)
        parts = states(strategies, Model.step, SHAPES["float32"], optimizer, sharded_slots=True)
        assert whole == parts


def in_another_form(number, name, gradient):
    """Return what a prepared step does not fit, at some of the steps."""
    if number == 2 and name == "w":
        return ms.IndexedSlices(gradient[:3], np.array([1, 0, 1]))
    return gradient.astype(np.float64) if number == 1 else gradient


def test_gradients_of_another_form_between(strategies):
    def take(model, number):
        model.step(number, in_another_form)

    assert_same(states(strategies, take, SHAPES["float32"], "adam"))


def test_parameters_that_change_between(strategies):
    def take(model, number):
        model.optimizer.learning_rate = 0.1 / (number + 1)
        model.optimizer.momentum = 0.1 * number + 0.1
        model.optimizer.weight_decay = 0.01 if number % 2 else None
        model.step(number)

    assert_same(states(strategies, take, SHAPES["float32"], "momentum"))


def test_variables_that_change_between(strategies):
    def take(model, number):
        for each in model.variables.values():
            each.assign(each.numpy() * 2)
        model.step(number)
        if number % 2:
            model.optimizer.slot(model.variables["b"], "momentum").assign(np.ones(30, "f4"))
            model.optimizer.iterations.assign(number)

    assert_same(states(strategies, take, SHAPES["float32"], "momentum"))


def test_some_of_the_variables_in_turn(strategies):
    """Each set of variables has its own prepared step."""

    def take(model, number):
        everything = model.variables
        for chosen in (["w"], ["b", "w"], ["scalar", "b"], ["w"], ["b", "w"]):
            model.variables = {name: everything[name] for name in chosen}
            model.step(number)
        model.variables = everything

    assert_same(states(strategies, take, SHAPES["float32"], "adam"))


def test_gradients_that_are_memory_of_the_weights(strategies):
    def take(model, number):
        first, second = (model.variables[name] for name in ("w", "v"))
        pairs = [(second.value(), first), (first.value(), second)]
        model.strategy.run(model.optimizer.apply_gradients, args=(pairs,))

    shapes = {"w": ((20, 30), "f4"), "v": ((20, 30), "f4")}
    assert_same(states(strategies, take, shapes, "momentum"))


def test_accumulated_gradients(strategies):
    found = {}
    for way, strategy in strategies.items():
        with strategy.scope():
            weight = ms.Variable(np.ones((8, 4), np.float32))
            accumulator = ms.optimizers.GradientAccumulator([weight])
            optimizer = SGD(0.1, momentum=0.9)

        def step(number, accumulator=accumulator, weight=weight, optimizer=optimizer):
            replica = ms.get_replica_context().replica_id_in_sync_group
            accumulator.add([(numbers([number, replica], (8, 4), "f4"), weight)])
            if number % 2:
                accumulator.apply(optimizer)

        found[way] = []
        for number in range(2 * STEPS):
            strategy.run(step, args=(number,))
            found[way].append(as_bytes(weight.numpy()))
    assert_same(found)


@pytest.mark.parametrize("options", [{}, {"num_replicas": 6}], ids=["ranks", "replicas"])
def test_ranks_on_and_off_the_fast_path_agree(options, rank, size):
    strategy = ms.MPIStrategy(device="cpu", **options)
    with strategy.scope():
        weight = ms.Variable(np.zeros(4, np.float32))
        optimizer = SGD(lambda step: 0.5 / (step + 1))
    plain, strided = np.ones(4, np.float32), np.ones(8, np.float32)[::2]
    taken = iter(range(100))

    def step():
        # Every rank, and with several replicas every replica, is off it at a different step.
        gradient = strided if (next(taken) + rank) % 3 == 0 else plain
        optimizer.apply_gradients([(gradient, weight)])

    for _ in range(9):
        strategy.run(step)
    rates = sum(0.5 / (step + 1) for step in range(9))
    np.testing.assert_allclose(weight.numpy(), -rates * strategy.num_replicas_in_sync, rtol=1e-6)
    strategy.close()


@pytest.mark.parametrize("options", [{}, {"num_replicas": 6}], ids=["ranks", "replicas"])
def test_a_rate_that_differs_on_the_fast_path(options, rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    strategy = ms.MPIStrategy(device="cpu", **options)
    with strategy.scope():
        weight = ms.Variable(np.zeros(4, np.float32))
        optimizer = SGD(lambda step: 0.5 if step < 3 else 0.25 + rank)
    gradient = np.ones(4, np.float32)
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="with the learning rate 0.25"):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))
