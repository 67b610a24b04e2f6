"""Elements kept in memory: each made once on a node, the same at any number of ranks."""

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset
from mpistrat.data.hdf5 import chunk_cache
from mpistrat.errors import CollectiveError
from tests.devices import assert_array_equal

NUM = 37


def counted(calls):
    """Return a map that notes its calls, with results of different lengths."""

    def fn(x):
        calls.append(int(x))
        return {"row": np.full(int(x) % 4, x, np.float32), "x": x, "text": "t" * (int(x) % 6)}

    return fn


@pytest.mark.parametrize("calls_at_a_time", [None, 2])
def test_each_element_is_made_once_by_all_ranks(strategy, calls_at_a_time):
    calls = []
    data = Dataset.range(NUM).map(counted(calls), num_parallel_calls=calls_at_a_time)
    batches = strategy.experimental_distribute_dataset(data.cache().shuffle(1).ragged_batch(6))
    del calls[:]  # the spec took one
    orders = []
    for _ in range(3):
        order = []
        for batch in batches:
            part = batch["row"].values[0]
            own = batch["x"].values[0].tolist()
            assert part.to_list() == [[float(x)] * (x % 4) for x in own]
            assert batch["text"].values[0].tolist() == ["t" * (x % 6) for x in own]
            order += strategy.gather(batch["x"], axis=0).tolist()
        strategy.barrier()  # nobody begins a pass before the last element is kept
        orders.append(order)
    assert all(sorted(order) == list(range(NUM)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    everyone = [each for own in strategy.gather_objects(list(calls)) for each in own]
    assert sorted(everyone) == list(range(NUM))


@pytest.mark.parametrize("num", [4, 5, 12])
def test_replicas_of_a_rank_share_what_they_keep(num):
    strategy, alone = (
        ms.MPIStrategy(device="cpu", num_replicas=num),
        ms.OneDeviceStrategy("cpu:0", num_replicas=num),
    )
    data = Dataset.range(NUM).map(lambda x: {"x": x}).cache().shuffle(1).batch(num)
    plain = Dataset.range(NUM).shuffle(1).batch(num)
    of_all = [
        [strategy.gather(batch, 0).tolist() for batch in distributed]
        for distributed in (
            strategy.experimental_distribute_dataset(data.map(lambda x: x["x"])),
            strategy.experimental_distribute_dataset(plain),
        )
    ]
    assert of_all[0] == of_all[1]
    one = alone.experimental_distribute_dataset(data.map(lambda x: x["x"]))
    assert [alone.gather(batch, 0).tolist() for batch in one] == of_all[0]
    strategy.close()
    alone.close()


def test_order_steps_before_a_cache_stay(strategy):
    data = Dataset.range(NUM).skip(2).shuffle(4).map(lambda x: 10 * x).take(20)
    plain, cached = (
        strategy.experimental_distribute_dataset(each.batch(5)) for each in (data, data.cache())
    )
    for _ in range(2):
        for first, second in zip(plain, cached, strict=True):
            assert_array_equal(first.values[0], second.values[0])


def test_random_maps_before_a_cache_are_frozen(strategy):
    def noise(x):
        return ms.data.example_rng().integers(2**40)

    before = Dataset.range(NUM).map(noise, seed=3).cache().batch(NUM)
    after = Dataset.range(NUM).cache().map(noise, seed=3).batch(NUM)
    found = []
    for dataset in (before, after):
        batches = strategy.experimental_distribute_dataset(dataset)
        (first,), (second,) = (
            [strategy.gather(batch, axis=0).tolist() for batch in batches] for _ in range(2)
        )
        found.append((first, second))
    (frozen, again), (first, second) = found
    assert frozen == again == first != second


def test_repetitions_share_what_is_kept():
    calls = []
    data = Dataset.range(5).map(counted(calls)).cache().repeat(3)
    assert [int(each["x"]) for each in data] == list(range(5)) * 3
    assert sorted(calls) == [0, *range(5)]  # one for the spec


def test_generators_are_kept_too():
    calls = []
    spec = ArraySpec((), np.int64)
    data = Dataset.from_generator(lambda: range(6), spec).map(counted(calls)).cache()
    for _ in range(2):
        assert [int(each["x"]) for each in data] == list(range(6))
    assert len(calls) <= 7


def test_more_than_fits(strategy, size):
    known = Dataset.from_arrays(np.zeros((100, 10))).cache("4 KiB")
    with pytest.raises(MemoryError, match=r"100 elements .* 4.0 KiB"):
        strategy.experimental_distribute_dataset(known.batch(4))
    with pytest.raises(MemoryError, match="100 elements"):
        next(iter(known))
    unknown = Dataset.range(100).map(lambda x: np.zeros(10)).cache(4096)
    expected = MemoryError if size == 1 else (MemoryError, CollectiveError)
    with pytest.raises(expected, match="element|MemoryError"):
        for batch in strategy.experimental_distribute_dataset(unknown.batch(4)):
            strategy.gather(batch, axis=0)
    with pytest.raises(MemoryError, match="with element .* 4.0 KiB"):
        list(unknown)


def test_where_it_does_not_go():
    with pytest.raises(ValueError, match="Call cache before batch"):
        Dataset.range(4).batch(2).cache()
    with pytest.raises(ValueError, match="before sample"):
        list(Dataset.range(4).sample(np.ones(4)).cache())
    for memory in ("much", 0, "-1 GiB"):
        with pytest.raises(ValueError, match="4 GiB"):
            Dataset.range(4).cache(memory)
    with pytest.raises(TypeError):
        Dataset.range(4).cache(1.5)


def test_errors_of_an_element_are_not_kept():
    fails = [True]

    def sometimes(x):
        if x == 3 and fails:
            raise RuntimeError("not now")
        return x

    data = Dataset.range(5).map(sometimes).cache()
    with pytest.raises(RuntimeError, match="not now"):
        list(data)
    fails.clear()
    assert [int(x) for x in data] == list(range(5))


def test_what_only_reading_needs_is_given_back_once_all_is_kept(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["plain"] = np.arange(3_000_000).reshape(3000, 1000)
        file.create_dataset("x", data=file["plain"][()], chunks=(100, 1000), compression="lzf")
    for name in ("plain", "x"):
        source = ms.data.Dataset.from_hdf5(tmp_path / "data.h5", name)
        kept = source.cache("64 MiB").shuffle(0)
        for _ in range(2):
            rows = np.concatenate([batch[:, 0] for batch in kept.batch(64)])
            assert sorted(rows.tolist()) == list(range(0, 3_000_000, 1000))
            assert not source._pipeline.source._mappings
            assert not chunk_cache._buffers._idle
