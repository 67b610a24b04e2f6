"""ClusterCoordinator: what it runs, in which order, and what it raises."""

import functools
import logging
import math
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.coordinator import dispatcher as dispatcher_module
from mpistrat.errors import CancelledError, ContextError


def nothing():
    pass


def worker_index(pause_s=0.0):
    time.sleep(pause_s)
    return ms.coordinator.experimental_get_current_worker_index()


def echo(*args, **kwargs):
    return args, kwargs


def fail(text, pause_s=0.0):
    time.sleep(pause_s)
    raise KeyError(text)


def slow(number):
    time.sleep(0.02)
    return number


def add_one(counter):
    counter.assign_add(1, read_value=False)


def read_add_assign(counter):
    counter.assign(counter.value() + 1, read_value=False)


def one_more(counter):
    return int(counter.assign_add(1))


def call_coordinator(strategy):
    ms.coordinator.ClusterCoordinator(strategy)


def outcome(value):
    try:
        value.fetch()
    except CancelledError:
        assert "cancelled" in repr(value)
        return "cancelled"
    except KeyError:
        return "failed"
    return "kept"


class Trainer:
    def step(self, number):
        return number + 1

    @classmethod
    def of_class(cls, number):
        return number + 2

    @staticmethod
    def static(number):
        return number + 3


TRAINER = Trainer()


def counter():
    return (ms.Variable(np.int64(0), name="counter"),)


def test_there_is_one_coordinator(job):
    def body(coordinator):
        assert ms.coordinator.ClusterCoordinator(coordinator.strategy) is coordinator
        assert repr(coordinator).startswith("<ClusterCoordinator of <ParameterServerStrategy")
        with pytest.raises(ValueError, match="takes a ParameterServerStrategy"):
            ms.coordinator.ClusterCoordinator(ms.OneDeviceStrategy())
        failing = coordinator.schedule(call_coordinator, (coordinator.strategy,))
        with pytest.raises(ContextError, match="is for the chief"):
            failing.fetch()
        with pytest.raises(ContextError):
            coordinator.join()

    job(body)


def test_a_coordinator_is_for_the_chief(rank, size):
    strategy = ms.ParameterServerStrategy()
    if rank:
        with pytest.raises(ContextError, match="is for the chief"):
            ms.coordinator.ClusterCoordinator(strategy)
        strategy.serve()
    else:
        with pytest.raises(ContextError, match="ClusterCoordinator"):
            strategy.serve()
        strategy.close()


@pytest.mark.parametrize(
    "function",
    [lambda: 1, functools.partial(echo, 1), Trainer().step, 3],
    ids=["lambda", "partial", "method", "number"],
)
def test_functions_without_a_name(job, function):
    def local():
        pass

    def body(coordinator):
        for each in (function, local):
            with pytest.raises(TypeError, match="module level|takes a function"):
                coordinator.schedule(each)
        with pytest.raises(TypeError, match="module level"):
            coordinator.create_per_worker_dataset(local)

    job(body)


def test_functions_with_a_name(job):
    def body(coordinator):
        values = [
            coordinator.schedule(each, (1,))
            for each in (TRAINER.step, Trainer.of_class, Trainer.static, math.sqrt)
        ]
        assert coordinator.fetch(values) == [2, 3, 4, 1.0]

    job(body)


def test_arguments_and_results(job):
    def body(coordinator):
        big, text = np.arange(30_000.0), "x" * 100_000
        value = coordinator.schedule(echo, (big, None, [1, (2,)]), {"key": text})
        big[:] = 0  # what travels was copied
        (array, none, nest), kwargs = value.fetch()
        assert (array == np.arange(30_000.0)).all()
        assert array.flags.writeable
        assert (none, nest, kwargs) == (None, [1, (2,)], {"key": text})
        assert value.fetch() is value.get()
        assert coordinator.schedule(nothing).fetch() is None
        for wrong in (3, "ab", {1}):
            with pytest.raises(ValueError, match="args must be"):
                coordinator.schedule(echo, wrong)
        with pytest.raises(ValueError, match="kwargs must be"):
            coordinator.schedule(echo, (), [1])
        with pytest.raises(ValueError, match="RemoteValue cannot be an argument"):
            coordinator.schedule(echo, ([value],))
        with pytest.raises(TypeError, match="pickle"):
            coordinator.schedule(echo, (lambda: 1,))
        with pytest.raises(TypeError, match="is for the chief"):
            coordinator.schedule(echo, (coordinator,))
        coordinator.join()

    job(body)


def test_fetch_of_nests(job):
    def body(coordinator):
        values = {"a": [coordinator.schedule(slow, (n,)) for n in range(3)], "b": (None, "text", 7)}
        assert coordinator.fetch(values) == {"a": [0, 1, 2], "b": (None, "text", 7)}
        assert coordinator.fetch(None) is None
        array = np.ones(3)
        assert coordinator.fetch(array) is array

    job(body)


def test_variables_travel_by_number(job):
    def body(coordinator, variable):
        value = coordinator.schedule(echo, ({"deep": [variable]},))
        (nest,), _ = value.fetch()
        assert nest["deep"][0] is variable
        assert coordinator.fetch(coordinator.schedule(echo, (coordinator.strategy,)))[0] == (
            coordinator.strategy,
        )

    job(body, counter)


def test_join_and_done(job):
    def body(coordinator):
        coordinator.join()
        assert coordinator.done() is True
        for _ in range(3):
            values = [coordinator.schedule(slow, (number,)) for number in range(4)]
            coordinator.join()
            assert coordinator.done() is True
            assert coordinator.fetch(values) == [0, 1, 2, 3]

    job(body)


def test_done_says_when_there_is_work(job, size):
    def body(coordinator):
        coordinator.schedule(worker_index, (0.2,))
        assert coordinator.done() is (size == 1)
        coordinator.join()

    job(body)


def test_every_worker_works(job, size, num_ps):
    def body(coordinator):
        num_workers = max(1, size - 1 - num_ps)
        values = [coordinator.schedule(worker_index, (0.01,)) for _ in range(8 * num_workers)]
        assert set(coordinator.fetch(values)) == set(range(num_workers))
        with pytest.raises(RuntimeError, match="only inside of closures"):
            ms.coordinator.experimental_get_current_worker_index()

    job(body)


@pytest.mark.parametrize("raiser", ["join", "done", "schedule"])
def test_an_error_is_raised_once(job, raiser):
    def body(coordinator):
        failing = coordinator.schedule(fail, ("one",))
        with pytest.raises(KeyError, match="one"):
            failing.fetch()
        with pytest.raises(KeyError, match="one") as caught:
            if raiser == "schedule":
                coordinator.schedule(nothing)
            else:
                getattr(coordinator, raiser)()
        (note,) = caught.value.__notes__
        assert note.startswith("worker ")
        assert "at test_coordinator.py:" in note
        coordinator.join()
        with pytest.raises(KeyError, match="one"):
            failing.fetch()
        assert coordinator.schedule(slow, (3,)).fetch() == 3
        assert coordinator.done()

    job(body)


def test_an_error_cancels_what_waits(job, size):
    if size == 1:
        pytest.skip("one rank alone runs closures when they are scheduled")

    def body(coordinator):
        values = [coordinator.schedule(slow, (0,))]
        values += [coordinator.schedule(fail, ("bad", 0.08))]
        values += [coordinator.schedule(slow, (number,)) for number in range(26)]
        with pytest.raises(KeyError, match="bad"):
            coordinator.join()
        ends = [outcome(value) for value in values]
        kept, cancelled = ends.count("kept"), ends.count("cancelled")
        assert kept + cancelled + 1 == len(values)
        assert cancelled > 10
        assert coordinator.done()

    job(body)


def test_a_second_error_is_logged(job, size, num_ps, caplog):
    if size - 1 - num_ps < 2:
        pytest.skip("needs two workers")

    def body(coordinator):
        with caplog.at_level(logging.WARNING, "mpistrat"):
            coordinator.schedule(fail, ("first", 0.05))
            coordinator.schedule(fail, ("second", 0.15))
            with pytest.raises(KeyError, match="first"):
                coordinator.join()
        assert "has failed too: KeyError" in caplog.text
        coordinator.join()

    job(body)


def test_writes_are_exact(job):
    def body(coordinator, variable):
        for _ in range(60):
            coordinator.schedule(add_one, (variable,))
        numbers = [coordinator.schedule(one_more, (variable,)) for _ in range(40)]
        coordinator.join()
        assert variable.numpy() == 100
        assert len(set(coordinator.fetch(numbers))) == 40

    job(body, counter)


def test_three_steps_are_a_race(job):
    def body(coordinator, variable):
        for _ in range(60):
            coordinator.schedule(read_add_assign, (variable,))
        coordinator.join()
        assert 1 <= variable.numpy() <= 60

    job(body, counter)


def twins():
    first, second = (ms.Variable(np.zeros(3), name="twin") for _ in range(2))
    return first, second, ms.optimizers.Adam(0.5)


def pull_apart(first, second, optimizer):
    optimizer.apply_gradients([(np.ones(3), first), (-np.ones(3), second)])
    first.assign_sub(np.ones(3), read_value=False)


def test_variables_of_one_name_are_two(job, tmp_path):
    def body(coordinator, first, second, optimizer):
        saved = ms.Checkpoint(first=first, second=second, optimizer=optimizer)
        coordinator.schedule(pull_apart, (first, second, optimizer)).fetch()
        np.testing.assert_allclose(first.numpy(), -1.5)
        np.testing.assert_allclose(second.numpy(), 0.5)
        path = saved.write(tmp_path / "twins.h5")
        coordinator.schedule(pull_apart, (first, second, optimizer)).fetch()
        saved.restore(path).assert_consumed()
        np.testing.assert_allclose(first.numpy(), -1.5)
        np.testing.assert_allclose(second.numpy(), 0.5)
        for slot, sign in zip(optimizer._rule.kernel.slots, (-1, 1), strict=True):
            values = optimizer.slot(first, slot), optimizer.slot(second, slot)
            assert values[0].numpy()[0] == sign * values[1].numpy()[0] != 0

    job(body, twins)


def test_schedule_blocks_while_many_wait(job, monkeypatch):
    assert dispatcher_module._MAX_WAITING == 262_144
    monkeypatch.setattr(dispatcher_module, "_MAX_WAITING", 5)

    def body(coordinator):
        values = [coordinator.schedule(slow, (number,)) for number in range(20)]
        assert len(coordinator._dispatcher._queue) <= 5
        assert coordinator.fetch(values) == list(range(20))

    job(body)


def test_the_first_comes_first(job, size, num_ps):
    if size - 1 - num_ps != 1:
        pytest.skip("one worker has one order")

    def body(coordinator, variable):
        values = [coordinator.schedule(one_more, (variable,)) for _ in range(30)]
        assert coordinator.fetch(values) == list(range(1, 31))

    job(body, counter)


def test_values_that_nobody_waits_for_are_cancelled_by_close(size):
    strategy = ms.ParameterServerStrategy()
    if strategy.rank:
        strategy.serve()
        return
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    values = [coordinator.schedule(slow, (number,)) for number in range(20)]
    values[0].fetch()
    strategy.close()
    kept = [outcome(value) for value in values].count("kept")
    assert kept >= 1
    if size > 1:
        assert kept < 20
    with pytest.raises(RuntimeError, match="closed by close"):
        coordinator.schedule(nothing)
