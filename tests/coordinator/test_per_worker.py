"""Per-worker data sets: each worker has all of it, and walks its own iterators."""

import time

import pytest

import mpistrat as ms
from mpistrat.errors import ClosureInputError, OutOfRangeError


def make():
    return ms.data.Dataset.range(6).batch(2)


def make_distributed():
    return ms.get_strategy().experimental_distribute_dataset(make())


def make_from_function():
    def dataset_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        assert context.num_replicas_in_sync == 1
        return ms.data.Dataset.range(6).batch(context.get_per_replica_batch_size(2))

    return ms.get_strategy().distribute_datasets_from_function(dataset_fn)


def make_long():
    return ms.data.Dataset.range(60).batch(2)


def make_from_index():
    index = ms.coordinator.experimental_get_current_worker_index()
    return [index] * 3


def make_variable():
    ms.Variable(1.0, name="late")


def fail():
    raise LookupError("no data here")


def take(iterator):
    return ms.coordinator.experimental_get_current_worker_index(), next(iterator)


def take_slowly(iterator):
    time.sleep(0.005)
    return take(iterator)


def get(iterator):
    return iterator.get_next().tolist()


def take_all(iterator):
    return [batch.tolist() for batch in iterator]


def iterate(dataset):
    return [batch.tolist() for batch in dataset]


PASS = [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("function", [make, make_distributed, make_from_function])
def test_every_worker_has_all_of_it(job, function):
    def body(coordinator):
        dataset = coordinator.create_per_worker_dataset(function)
        for _ in range(2):  # each iterator starts anew
            values = [coordinator.schedule(take_all, (iter(dataset),)) for _ in range(3)]
            assert coordinator.fetch(values) == [PASS] * 3

    job(body)


def test_each_worker_walks_its_own(job, size, num_ps):
    def body(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(make_long))
        values = [coordinator.schedule(take_slowly, (iterator,)) for _ in range(30)]
        seen = {}
        for index, batch in coordinator.fetch(values):
            seen.setdefault(index, []).append(batch.tolist())
        assert seen.keys() == set(range(max(1, size - 1 - num_ps)))
        for batches in seen.values():
            assert batches == [[2 * n, 2 * n + 1] for n in range(len(batches))]

    job(body)


def test_any_iterable(job):
    def body(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(make_from_index))
        index, value = coordinator.schedule(take, (iterator,)).fetch()
        assert index == value

    job(body)


@pytest.mark.parametrize("function", [take, get])
def test_the_end(job, function):
    def body(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(make))
        coordinator.schedule(take_all, (iterator,)).fetch()
        with pytest.raises(OutOfRangeError):  # each worker ends after three
            while True:
                coordinator.schedule(function, (iterator,)).fetch()
        with pytest.raises(OutOfRangeError):
            coordinator.join()
        assert coordinator.done()

    job(body)


@pytest.mark.parametrize(("function", "cause"), [(fail, LookupError), (make_variable, ValueError)])
def test_a_function_that_fails(job, function, cause):
    def body(coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(function))
        value = coordinator.schedule(take, (iterator,))
        for call in (value.fetch, coordinator.join):
            with pytest.raises(ClosureInputError, match=function.__name__) as caught:
                call()
            assert isinstance(caught.value.__cause__, cause)

    job(body)


def test_the_chief_has_no_elements(job):
    def body(coordinator):
        dataset = coordinator.create_per_worker_dataset(make)
        iterator = iter(dataset)
        assert isinstance(iterator, ms.coordinator.PerWorkerValues)
        for call in (lambda: next(iterator), iterator.get_next):
            with pytest.raises(NotImplementedError, match="Pass the iterator to a closure"):
                call()
        assert "test_per_worker.make" in repr(dataset)

    job(body)


def test_a_distributed_data_set_is_not_iterated_directly(job):
    def body(coordinator):
        strategy = coordinator.strategy
        dataset = strategy.experimental_distribute_dataset(make())
        with pytest.raises(ValueError, match="create_per_worker_dataset"):
            next(iter(dataset))

    job(body)
