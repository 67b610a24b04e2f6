"""`ClusterCoordinator.map`, and the arguments in the errors of closures."""

import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.coordinator import dispatcher as dispatcher_module
from mpistrat.errors import CancelledError


class Odd:
    """An argument whose `repr` fails."""

    def __repr__(self):
        raise RuntimeError("no text")


class NotAgain(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


def half(number):
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def late(number):
    time.sleep(0.002 * number)
    return half(number)


def size_of(values):
    return int(np.asarray(values).size)


def odd_errors(number):
    if number == 1:
        raise NotAgain(1, 2)
    if number == 2:
        raise SystemExit(3)
    return (lambda: 1) if number == 3 else number


def fail(*args, **kwargs):
    raise KeyError("bad")


def fail_after(pause_s):
    time.sleep(pause_s)
    raise KeyError("bad")


def table():
    return (ms.Variable(np.zeros(3), name="table"),)


def elements():
    return [1, 2]


def note_of(value):
    with pytest.raises(KeyError) as caught:
        value.fetch()
    (note,) = caught.value.__notes__
    return note


def forget_error(coordinator):
    with pytest.raises(KeyError):
        coordinator.join()


@pytest.mark.parametrize("errors", ["raise", "return"])
def test_results_come_in_the_order_of_the_items(job, errors):
    def body(coordinator):
        assert coordinator.map(half, range(0, 60, 2), errors=errors) == list(range(30))
        assert coordinator.map(half, iter([4, 2]), errors) == [2, 1]
        assert coordinator.map(half, [], errors) == []
        arrays = [np.zeros(size) for size in (0, 1, 3000)]
        assert coordinator.map(size_of, arrays, errors=errors) == [0, 1, 3000]

    job(body)


@pytest.mark.parametrize("function", [half, late])
def test_errors_in_the_place_of_results(job, function):
    def body(coordinator):
        results = coordinator.map(function, range(20), errors="return")
        for number, result in enumerate(results):
            if number % 2:
                assert isinstance(result, ValueError)
                assert str(result) == f"{number} is odd"
                assert f"in {function.__name__}({number})" in result.__notes__[0]
            else:
                assert result == number // 2
        coordinator.join()  # nothing is left to be raised
        assert coordinator.done()

    job(body)


def test_the_first_error_is_raised_and_others_are_cancelled(job):
    def body(coordinator):
        with pytest.raises(ValueError, match="is odd"):
            coordinator.map(half, [2, 3, 4, 5, 6] + [8] * 50)
        coordinator.join()
        assert coordinator.map(half, [2]) == [1]

    job(body)


def test_errors_that_cannot_travel(job):
    def body(coordinator):
        items = [0, 1, 2, 3, 4, lambda: 1]
        results = coordinator.map(odd_errors, items, errors="return")
        assert (results[0], results[4]) == (0, 4)
        assert isinstance(results[1], RuntimeError)
        assert "NotAgain" in str(results[1])
        assert "SystemExit" in str(results[2])
        assert isinstance(results[3], TypeError)
        assert "cannot be pickled" in str(results[3])
        assert isinstance(results[5], TypeError)

    job(body)


def test_an_error_of_another_closure_cancels_no_call_of_map(job):
    def body(coordinator):
        failing = coordinator.schedule(fail, (1,))
        with pytest.raises(KeyError):
            failing.fetch()
        with pytest.raises(KeyError):  # as by schedule
            coordinator.map(half, [2], errors="return")
        independent = [coordinator._dispatcher.schedule_independent(late, n) for n in (8, 10, 12)]
        coordinator.schedule(fail)
        for closure, want in zip(independent, (4, 5, 6), strict=True):
            coordinator._dispatcher.wait_for(closure)
            assert coordinator._dispatcher.result_of(closure) == want
        forget_error(coordinator)

    job(body)


def test_bad_arguments(job):
    def body(coordinator):
        for wrong in ("ignore", None, True):
            with pytest.raises(ValueError, match='"raise" or "return"'):
                coordinator.map(half, [2], errors=wrong)
        for errors in ("raise", "return"):
            with pytest.raises(TypeError, match="module level"):
                coordinator.map(lambda number: number, [2], errors=errors)
        with pytest.raises(TypeError, match="pickled"):
            coordinator.map(half, [lambda: 1])
        coordinator.join()

    job(body)


def test_more_items_than_may_wait(job, monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_MAX_WAITING", 5)

    def body(coordinator):
        results = coordinator.map(half, range(40), errors="return")
        assert [each for each in results if isinstance(each, int)] == list(range(20))

    job(body)


def test_an_error_names_the_arguments(job):
    def body(coordinator, variable):
        cases = [
            ((), "fail()"),
            ((5, "text", None, 0.1), "fail(5, 'text', None, 0.1)"),
            (({"rate": 0.5, "layers": [1, 2]},), "fail({'layers': [1, 2], 'rate': 0.5})"),
            ((np.arange(3),), "fail(array([0, 1, 2]))"),
            ((np.zeros((40, 50), np.float32),), "fail(array float32 (40, 50))"),
            (([np.zeros(3000)],), "fail([array float64 (3000,)])"),
            ((variable, coordinator.strategy), "fail(variable 'table', strategy)"),
        ]
        for args, want in cases:
            assert note_of(coordinator.schedule(fail, args)).endswith(f", in {want}")
            forget_error(coordinator)
        note = note_of(coordinator.schedule(fail, (1,), {"rate": 2}))
        assert note.endswith(", in fail(1, rate=2)")
        forget_error(coordinator)
        assert "in fail(" in note_of(coordinator.schedule(fail, (Odd(),)))
        forget_error(coordinator)
        long = note_of(coordinator.schedule(fail, ("x" * 10_000, list(range(10_000)))))
        assert len(long) < 600
        forget_error(coordinator)
        iterator = iter(coordinator.create_per_worker_dataset(elements))
        assert "iterator of " in note_of(coordinator.schedule(fail, (iterator,)))
        forget_error(coordinator)

    job(body, table)


def test_a_cancelled_closure_says_what_to_do(job, size):
    if size == 1:
        pytest.skip("one rank alone runs closures when they are scheduled")

    def body(coordinator):
        coordinator.schedule(fail_after, (0.15,))
        values = []
        with pytest.raises(KeyError):  # of schedule, on a slow machine
            for _ in range(1000):
                values.append(coordinator.schedule(late, (10,)))
            coordinator.join()
        with pytest.raises(CancelledError, match="Schedule it again"):
            coordinator.fetch(values)

    job(body)
