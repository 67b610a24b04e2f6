"""Steps that the replicas of a rank take together, in one meeting."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.optimizers.agreed_step import AgreedStep
from mpistrat.replicas.replica_threads import ReplicaThreads
from tests.replica_groups import NUM_REPLICAS, replica_id

SHAPES = [(3, 2), (5,), (), (130, 40)]


@pytest.fixture(params=NUM_REPLICAS)
def replicas(request):
    comm = MPI.COMM_WORLD.Dup()
    return ms.MPIStrategy(comm, device="cpu", num_replicas=request.param)


def gradient_of(replica, step, shape, dtype=np.float32):
    rng = np.random.default_rng((replica, step, *shape))
    return rng.normal(size=shape).astype(dtype)


class Twins:
    """Variables of a strategy and plain ones, each with an optimizer."""

    def __init__(self, strategy, dtype=np.float32, learning_rate=0.1):
        self.strategy, self.dtype = strategy, dtype
        with strategy.scope():
            self.variables = [ms.Variable(np.ones(shape, dtype)) for shape in SHAPES]
            self.optimizer = ms.optimizers.SGD(learning_rate, momentum=0.9)
        self.plain = [ms.Variable(np.ones(shape, dtype)) for shape in SHAPES]
        self.alone = ms.optimizers.SGD(learning_rate, momentum=0.9)

    def step(self, number, change=lambda replica, gradient: gradient):
        """Take a step with gradients that `change` may return in another form."""

        def fn():
            gradients = [gradient_of(replica_id(), number, each, self.dtype) for each in SHAPES]
            changed = [change(replica_id(), each) for each in gradients]
            self.optimizer.apply_gradients(zip(changed, self.variables, strict=True))

        self.strategy.run(fn)
        sums = [self.sum_of(number, each) for each in SHAPES]
        self.alone.apply_gradients(zip(sums, self.plain, strict=True))

    def sum_of(self, number, shape):
        num = self.strategy.num_replicas_in_sync
        rows = [gradient_of(each, number, shape, self.dtype) for each in range(num)]
        wide = np.float32 if self.dtype == np.float16 else self.dtype
        return ms.testing.reduction_tree(np.stack(rows).astype(wide)).astype(self.dtype)

    def check(self, num_steps):
        assert int(self.optimizer.iterations) == num_steps
        for variable, plain in zip(self.variables, self.plain, strict=True):
            assert variable.numpy().tobytes() == plain.numpy().tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_repeated_steps_have_the_bits_of_one_optimizer(replicas, dtype):
    twins = Twins(replicas, np.dtype(dtype).type)
    for number in range(4):
        twins.step(number)
        twins.check(number + 1)


def in_another_form(gradient):
    """Return the same numbers, not side by side or in another dtype."""
    if gradient.ndim < 2:
        return gradient.astype(np.float64)
    return np.repeat(gradient, 2, axis=1)[:, ::2]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_some_replicas_may_bring_gradients_that_were_not_prepared_for(replicas, period):
    twins = Twins(replicas)

    def change(replica, gradient):
        return in_another_form(gradient) if replica % period == 0 else gradient

    for number in range(2):
        twins.step(number)
    for number in range(2, 5):
        twins.step(number, change if number != 3 else lambda replica, gradient: gradient)
        twins.check(number + 1)


def test_parameters_set_between_steps(replicas):
    twins = Twins(replicas)
    for number in range(5):
        if number > 1:
            for each in (twins.optimizer, twins.alone):
                each.momentum, each.learning_rate = 0.1 * number, 0.2 / number
        twins.step(number)
        twins.check(number + 1)


@pytest.mark.fast
def test_a_repeated_step_is_one_meeting(replicas, monkeypatch):
    twins = Twins(replicas)
    for number in range(2):
        twins.step(number)
    acts, act = [], ReplicaThreads._act

    def noted(meeting):
        acts.append(meeting)
        act(meeting)

    monkeypatch.setattr(ReplicaThreads, "_act", noted)
    twins.step(2)
    # A replica that has its rank alone meets nobody.
    assert len(acts) == (len(replicas.extended.local_replica_ids) > 1)
    replicas.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
    replicas.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
    acts.clear()
    replicas.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
    assert len(acts) == (len(replicas.extended.local_replica_ids) > 1)
    twins.check(3)


def test_a_rate_that_raises_is_refused_by_all(replicas):
    fails = []

    def rate(step):
        if fails:
            raise OSError("no rate")
        return 0.1

    twins = Twins(replicas, learning_rate=rate)
    twins.step(0)
    twins.step(1)
    fails.append(True)
    with pytest.raises(OSError, match="no rate"):
        twins.step(2)
    fails.clear()
    twins.step(2)
    twins.check(3)


def test_an_update_that_raises_does_so_in_every_replica(replicas, monkeypatch):
    twins = Twins(replicas)
    twins.step(0)
    twins.step(1)
    caught, take = [], AgreedStep.take

    def fails(step):
        raise MemoryError("no room")

    def fn():
        gradients = [gradient_of(replica_id(), 2, each) for each in SHAPES]
        try:
            twins.optimizer.apply_gradients(zip(gradients, twins.variables, strict=True))
        except MemoryError:
            caught.append(replica_id())

    monkeypatch.setattr(AgreedStep, "take", fails)
    replicas.run(fn)
    assert caught == list(replicas.extended.local_replica_ids)
    monkeypatch.setattr(AgreedStep, "take", take)
    twins.step(2)
    twins.check(3)


def test_replicas_that_repeat_different_steps(replicas):
    twins = Twins(replicas)
    last = replicas.num_replicas_in_sync - 1
    with replicas.scope():
        other = ms.Variable(np.ones(2, np.float32), name="other")

    def fn(pairs_of):
        twins.optimizer.apply_gradients(pairs_of(replica_id()))

    known = [
        lambda _: [(np.ones(2, np.float32), other)],
        lambda _: [(np.ones((), np.float32), twins.variables[2])],
    ]
    for pairs_of in known * 3:
        replicas.run(fn, (pairs_of,))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="SGD.apply_gradients") as caught:
        replicas.run(fn, (lambda replica: known[replica == last](replica),))
    # Where it has its rank alone, the rank is named.
    size = MPI.COMM_WORLD.size
    alone = (last + 1) // size == 1  # the last ranks have the smallest shares
    assert (f"rank {size - 1}" if alone else f"replica {last}") in str(caught.value)
    assert "other" in str(caught.value)
