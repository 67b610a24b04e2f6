"""Elements prepared ahead, in a thread that ends with its iterator."""

import threading
import time

import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset
from tests.devices import assert_array_equal


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "mpistrat-prefetch"]


def test_prefetch_changes_nothing_but_the_time():
    dataset = Dataset.range(100).shuffle(0).batch(7)
    ahead = dataset.prefetch(3)
    for plain, prefetched in zip(dataset, ahead, strict=True):
        assert_array_equal(plain, prefetched)
    assert not prefetch_threads()


def test_prefetch_prepares_as_many_as_asked():
    made = set()

    def note(x):
        made.add(int(x))
        return x

    iterator = iter(Dataset.range(100).map(note).batch(1).prefetch(3))
    assert next(iterator) == 0
    end = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    # One element was handed out, three wait, and the thread holds another.
    assert 4 <= len(made) <= 5
    iterator.close()
    assert not prefetch_threads()


def test_an_error_comes_in_its_place():
    def fail():
        yield 1
        raise RuntimeError("broken source")

    iterator = iter(Dataset.from_generator(fail, ArraySpec((), np.int64)).prefetch(2))
    assert next(iterator) == 1
    with pytest.raises(RuntimeError, match="broken source"):
        next(iterator)
    assert not prefetch_threads()


def test_a_forgotten_iterator_ends_its_thread():
    iterator = iter(Dataset.range(100).repeat().prefetch(2))
    next(iterator)
    assert prefetch_threads()
    del iterator
    assert not prefetch_threads()
