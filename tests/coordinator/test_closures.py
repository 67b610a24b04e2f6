"""Closures that do what they should not, and how their functions are found."""

import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.coordinator import closures
from mpistrat.errors import ContextError


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Holder(Exception):
    def __init__(self, text, what=None):
        super().__init__(text, what)


def raise_odd():
    raise Odd("one", "two")


def raise_with_function():
    raise Holder("holds", lambda: 1)


def leave(code):
    sys.exit(code)


def give_function():
    return lambda: 1


def make_variable():
    return ms.Variable(1.0, name="late")


def fork(folder):
    child = os.fork()
    if child == 0:
        with open(os.path.join(folder, "child"), "w") as file:
            file.write("was here")
        return "from the child"
    os.waitpid(child, 0)
    return "from the worker"


def schedule_again(coordinator):
    coordinator.schedule(make_variable)


def in_replica():
    strategy = ms.get_strategy()

    def step():
        replica = ms.get_replica_context()
        total = replica.all_reduce("sum", np.float64(2.0))
        return float(total) + replica.num_replicas_in_sync + replica.replica_id_in_sync_group

    return strategy.run(step)


def big(number):
    return np.full(1 << 20, number)


def first():
    return 1


class Deaf:
    def __reduce__(self):
        return fail_to_load, ()


def fail_to_load():
    raise LookupError("not here")


def give_deaf():
    return Deaf()


def deep():
    return deep()


def nested():
    nest = []
    for _ in range(100_000):
        nest = [nest]
    return nest


def add_up(array):
    return float(array.sum())


def fork_and_fail():
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        raise ValueError("in the child")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_errors_that_cannot_travel(job):
    def body(coordinator):
        for function, words in ((raise_odd, "Odd: one and two"), (raise_with_function, "Holder")):
            value = coordinator.schedule(function)
            with pytest.raises(RuntimeError, match=words) as caught:
                value.fetch()
            assert "Traceback" in str(caught.value)
            with pytest.raises(RuntimeError, match=words):
                coordinator.join()

    job(body)


@pytest.mark.parametrize(
    ("function", "args", "kind", "words"),
    [
        (leave, (3,), RuntimeError, "SystemExit: 3"),
        (give_function, (), TypeError, "result of a closure, of type function"),
        (make_variable, (), ValueError, "cannot be created after serve"),
        (deep, (), RecursionError, "maximum recursion depth"),
        (nested, (), TypeError, "result of a closure, of type list"),
        (first, (1,), TypeError, "takes 0 positional arguments"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_closures_that_do_what_they_should_not(job, function, args, kind, words):
    def body(coordinator):
        value = coordinator.schedule(function, args)
        with pytest.raises(kind, match=words):
            coordinator.join()
        with pytest.raises(kind, match=words) as caught:
            value.fetch()
        assert "at test_closures.py:" in caught.value.__notes__[-1]
        assert coordinator.schedule(first).fetch() == 1

    job(body)


def test_a_fork_is_no_worker(job, tmp_path, size):
    if size == 1:
        pytest.skip("a fork of pytest")

    def body(coordinator):
        values = [coordinator.schedule(fork, (os.fspath(tmp_path),)) for _ in range(2)]
        assert coordinator.fetch(values) == ["from the worker"] * 2
        assert (tmp_path / "child").read_text() == "was here"

    job(body)


def test_a_fork_that_fails_is_no_worker(job, size):
    if size == 1:
        pytest.skip("a fork of pytest")

    def body(coordinator):
        assert coordinator.schedule(fork_and_fail).fetch() == 1

    job(body)


def test_results_and_arguments_that_cannot_travel(job):
    def body(coordinator):
        value = coordinator.schedule(give_deaf)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"give_deaf #0 cannot be unpickled.*not here"):
                value.fetch()
        for each in ((n for n in ()), threading.Lock(), sys):
            with pytest.raises(TypeError, match="cannot pickle") as caught:
                coordinator.schedule(add_up, ([each],))
            assert "argument of add_up" in caught.value.__notes__[0]
        with pytest.raises(TypeError, match="argument of add_up cannot be pickled"):
            coordinator.schedule(add_up, (lambda: 1,))
        coordinator.join()

    job(body)


@pytest.mark.thorough
def test_huge_arguments_and_results(job):
    def body(coordinator):
        array = np.ones(200 << 17)  # 200 MiB
        assert coordinator.schedule(add_up, (array,)).fetch() == array.size
        value = coordinator.schedule(np.ones, (array.size,)).fetch()
        assert (value == array).all()

    job(body)


def test_run_inside_of_a_closure(job):
    job(lambda coordinator: check_replica(coordinator))


def check_replica(coordinator):
    assert coordinator.schedule(in_replica).fetch() == 3.0


def test_large_results(job):
    def body(coordinator):
        values = [coordinator.schedule(big, (number,)) for number in range(4)]
        for number, value in enumerate(values):
            assert (value.fetch() == number).all()

    job(body)


def test_no_schedule_inside_of_a_closure(size):
    if size > 1:
        pytest.skip("elsewhere there is no coordinator to ask")
    strategy = ms.ParameterServerStrategy()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    closures._found.clear()
    global ALONE
    ALONE = coordinator
    coordinator.schedule(ask_again)
    with pytest.raises(ContextError, match="inside of a closure"):
        coordinator.join()
    strategy.close()


ALONE = None


def ask_again():
    ALONE.schedule(first)


def test_the_code_must_be_the_same():
    name = closures.name_of_function("schedule", first)
    other = closures.name_of_function("schedule", big)
    assert closures.find_function("\0".join(name)) is first
    with pytest.raises(RuntimeError, match="differs from the chief's"):
        closures.find_function("\0".join((name.module, name.path, other.digest)))
    with pytest.raises(RuntimeError, match="has no function"):
        closures.find_function("\0".join((name.module, "missing", "")))
    with pytest.raises(RuntimeError, match="has no function"):
        closures.find_function("no_such_module\0missing\0")


NESTS = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(NESTS, st.integers(0, 5000))
def test_objects_travel_whole(nest, length):
    array = np.arange(length, dtype=np.float32)
    data, buffers = closures.split_object((nest, array), lambda thing: None)
    assert len(buffers) == (array.nbytes >= 512)
    again, copied = closures.join_object(data, buffers, lambda token: token)
    assert again == nest
    assert (copied == array).all()
    assert not np.shares_memory(copied, array)
