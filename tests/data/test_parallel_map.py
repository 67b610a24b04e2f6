"""Maps in threads: the order of one thread, a bound on what waits, errors that name the example."""

import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import AUTOTUNE, Dataset
from tests.devices import assert_array_equal


def map_threads():
    return [thread for thread in threading.enumerate() if thread.name == "mpistrat-map"]


def slow(x):
    time.sleep(0.001 * (int(np.max(x, initial=0)) % 3))
    return x + 1


@pytest.mark.parametrize("calls", [1, 2, 5, AUTOTUNE])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_order_is_that_of_one_thread(strategy, calls, batch_first):
    def make(calls):
        data = Dataset.range(29).shuffle(1)
        if batch_first:
            return data.batch(4).map(slow, num_parallel_calls=calls).map(lambda x: 2 * x)
        return data.map(slow, num_parallel_calls=calls).map(lambda x: 2 * x).batch(4)

    def gathered(dataset):
        batches = strategy.experimental_distribute_dataset(dataset)
        return [strategy.gather(batch, axis=0).tolist() for batch in batches]

    assert gathered(make(calls)) == gathered(make(None))
    assert not map_threads()


def test_maps_of_batches_of_batches_and_of_views():
    data = Dataset.range(24).map(slow, num_parallel_calls=3)
    twice = data.batch(2).map(slow, num_parallel_calls=2).batch(3).map(slow, num_parallel_calls=2)
    assert_array_equal(np.concatenate(list(twice)).ravel(), np.arange(24) + 3)
    zipped = Dataset.zip((data, Dataset.range(24))).batch(5)
    for mapped, plain in zipped:
        assert_array_equal(mapped, plain + 1)
    assert not map_threads()


def test_calls_run_at_the_same_time():
    together = threading.Barrier(3, timeout=20)

    def meet(x):
        together.wait()
        return x

    assert len(list(Dataset.range(9).map(meet, num_parallel_calls=3))) == 9


@pytest.mark.parametrize("is_batch", [False, True])
def test_few_results_wait(is_batch):
    begun = []

    def note(x):
        begun.append(int(np.max(x)))
        return x

    data = Dataset.range(100)
    data = data.batch(1) if is_batch else data
    iterator = iter(data.map(note, num_parallel_calls=3))
    next(iterator)
    time.sleep(0.1)
    # One was handed out, and twice three are made or wait.
    assert 4 <= len(begun) <= 7
    iterator.close()
    assert not map_threads()
    assert len(begun) <= 7


@pytest.mark.parametrize("calls", [None, 2])
def test_an_error_names_its_example_and_cancels_the_rest(calls):
    begun = []

    def fail_at_17(x):
        begun.append(int(x))
        if x == 17:
            raise KeyError("broken")
        return x

    data = Dataset.range(100).shuffle(2).map(fail_at_17, num_parallel_calls=calls)
    order = [int(x) for x in Dataset.range(100).shuffle(2)]
    with pytest.raises(KeyError, match="broken") as caught:
        list(data)
    assert "example 17 " in " ".join(caught.value.__notes__)
    assert len(begun) <= order.index(17) + 1 + 4
    assert not map_threads()


def test_errors_of_a_batch_name_its_first_example():
    def fail(batch):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        list(Dataset.range(9).skip(2).batch(4).map(fail, num_parallel_calls=2))
    assert "begins with example 0" in " ".join(caught.value.__notes__)


def test_random_numbers_are_those_of_one_thread():
    def noise(x):
        return ms.data.example_rng().random()

    one, many = (
        [float(x) for x in Dataset.range(40).map(noise, seed=3, num_parallel_calls=calls)]
        for calls in (None, 4)
    )
    assert one == many
    assert len(set(one)) == 40


def test_a_dropped_iterator_ends_its_threads():
    iterator = iter(Dataset.range(100).repeat().map(slow, num_parallel_calls=2).prefetch(2))
    next(iterator)
    assert map_threads()
    del iterator
    end = time.monotonic() + 5
    while map_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not map_threads()


@pytest.mark.parametrize("calls", [0, -2, 1.5, True])
def test_bad_numbers_of_calls(calls):
    with pytest.raises((TypeError, ValueError), match="num_parallel_calls"):
        Dataset.range(3).map(abs, num_parallel_calls=calls)
