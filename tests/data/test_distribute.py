"""Distributed data sets through a strategy, on any number of ranks."""

import itertools
import json
from typing import NamedTuple

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, DataError
from mpistrat.values import PerReplica, localize


def slice_of(batch, rank, size):
    share = -(-len(batch) // size)
    return batch[rank * share : (rank + 1) * share]


def test_batches_are_split_in_rank_order(strategy, rank, size, numbered):
    dataset = ms.data.Dataset.from_hdf5(numbered(50, chunk=7)).shuffle(seed=0).batch(16)
    whole = [batch["label"] for batch in dataset]
    batches = strategy.experimental_distribute_dataset(dataset)
    assert batches.cardinality() == 4
    for element, batch in zip(batches, whole, strict=True):
        assert isinstance(element["image"], PerReplica)
        part = localize(element)
        assert part["label"].tolist() == slice_of(batch, rank, size).tolist()
        assert (part["image"] == part["label"][:, None]).all()


def test_run_and_reduce_weigh_a_short_batch_right(strategy):
    dataset = ms.data.Dataset.from_arrays(np.arange(7.0)).batch(4)
    means = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        per_replica = strategy.run(lambda x: 2 * x, args=(batch,))
        means.append(float(strategy.reduce("MEAN", per_replica, axis=0)))
    assert means == [3.0, 10.0]


def test_a_file_that_one_rank_misses_is_an_error_on_all(strategy, rank, size, numbered, tmp_path):
    path = numbered(10) if rank < size - 1 else tmp_path / "gone.h5"
    dataset = ms.data.Dataset.from_hdf5(path).batch(2)
    with pytest.raises(DataError, match="gone"):
        strategy.experimental_distribute_dataset(dataset)


def test_data_sets_that_differ_between_ranks(strategy, rank, size):
    if size == 1:
        pytest.skip("needs two ranks that differ")
    dataset = ms.data.Dataset.range(10 + rank).batch(1)
    with pytest.raises(DataError, match=r"rank 0 has 10 .* rank 1 has 11"):
        strategy.experimental_distribute_dataset(dataset)


def twice(x):
    return 2 * x


def thrice(x):
    return 3 * x


OFF = ms.data.AutoShardPolicy.OFF


@pytest.mark.parametrize(
    ("usual", "other", "difference"),
    [
        (lambda d: d.shuffle(0).batch(4), lambda d: d.shuffle(1).batch(4), "seed=0.*seed=1"),
        (lambda d: d.batch(4), lambda d: d.batch(6), "batch_size=4.*batch_size=6"),
        (lambda d: d.batch(5), lambda d: d.batch(5, True), "drop_remainder=False.*=True"),
        (
            lambda d: d.batch(4),
            lambda d: d.batch(4).with_options(auto_shard_policy=OFF),
            "DATA.* AutoShardPolicy.OFF",
        ),
        (lambda d: d.batch(4).map(twice), lambda d: d.batch(4).map(thrice), "twice.*thrice"),
        (lambda d: d.batch(4).take(3), lambda d: d.batch(4), "step 2.* no more steps"),
        (
            lambda d: d.batch(4),
            lambda d: ms.data.Dataset.from_arrays(np.arange(12)).batch(4),
            "range.* from_arrays",
        ),
        (lambda d: d.batch(4), lambda d: of_unknown_length(12).batch(4), "range.* from_generator"),
    ],
)
def test_one_rank_with_another_order(strategy, rank, size, usual, other, difference):
    if size == 1:
        pytest.skip("needs two ranks that differ")
    dataset = (other if rank == size - 1 else usual)(ms.data.Dataset.range(12))
    who = "rank 0" if size == 2 else f"ranks 0-{size - 2}"
    with pytest.raises(DataError, match=f"{who} ha.*{difference}") as caught:
        strategy.experimental_distribute_dataset(dataset)
    assert f"rank {size - 1} has" in str(caught.value)
    assert strategy.experimental_distribute_dataset(ms.data.Dataset.range(4).batch(2))


def test_one_rank_with_other_files(strategy, rank, size, numbered):
    if size == 1:
        pytest.skip("needs two ranks that differ")
    dataset = ms.data.Dataset.from_hdf5(numbered(30, chunk=5 + (rank == 1))).batch(4)
    with pytest.raises(DataError, match=r"data\.h5 with 30 rows in chunks of 5, rank 1 .* of 6"):
        strategy.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize("call", ["experimental_distribute_dataset", "distribute_from_function"])
def test_bad_arguments_on_one_rank(rank, size, call):
    strategy = ms.MPIStrategy(device="cpu")
    dataset = ms.data.Dataset.range(4).batch(2)
    is_bad = rank == size - 1
    expected = TypeError if is_bad else CollectiveMismatchError
    with pytest.raises(expected, match="Dataset|InputContext|refused"):
        if call == "experimental_distribute_dataset":
            strategy.experimental_distribute_dataset([1, 2] if is_bad else dataset)
        else:
            strategy.distribute_datasets_from_function(dataset if is_bad else lambda _: dataset)


def test_unbatched_data_are_refused(strategy):
    with pytest.raises(ValueError, match="not batched"):
        strategy.experimental_distribute_dataset(ms.data.Dataset.range(3))
    with pytest.raises(ValueError, match="not batched"):
        strategy.distribute_datasets_from_function(lambda context: ms.data.Dataset.range(3))


def of_known_length(n):
    return ms.data.Dataset.range(n)


def of_unknown_length(n):
    return ms.data.Dataset.from_generator(lambda: range(n), ms.data.ArraySpec((), np.int64))


@pytest.mark.parametrize("make", [of_known_length, of_unknown_length])
def test_ranks_that_run_out_early_get_empty_batches(strategy, rank, size, make):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return make(2 * rank).batch(context.get_per_replica_batch_size(2 * size))

    batches = strategy.distribute_datasets_from_function(dataset_fn)
    assert contexts == [ms.InputContext(size, rank, size)]
    assert batches.cardinality() == (size - 1 if make is of_known_length else -2)
    for _ in range(2):
        parts = [localize(element) for element in batches]
        assert len(parts) == size - 1
        assert [len(part) for part in parts] == [2] * rank + [0] * (size - 1 - rank)
        assert all(part.dtype == np.int64 for part in parts)


def test_the_position_of_data_sets_from_a_function(strategy, rank, size):
    def make():
        return strategy.distribute_datasets_from_function(
            lambda context: of_unknown_length(3 + rank).batch(1)
        )

    batches = make()
    iterator = iter(batches)
    for _ in range(2):
        next(iterator)
    state = batches.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(state.pop("order")) == 16
    assert state == {"pass": 0, "batch": 2, "num_replicas": size, "replica_batch_size": 1}
    again = make()
    again.load_state_dict(batches.state_dict())
    parts = [localize(element).tolist() for element in again]
    expected = [[number] for number in range(2, 3 + rank)]
    assert parts == expected + [[]] * (size - 1 - rank)


def test_an_error_in_the_function_of_one_rank_is_an_error_on_all(strategy, rank, size):
    def dataset_fn(context):
        if context.input_pipeline_id == size - 1:
            raise ValueError("no data here")
        return ms.data.Dataset.range(4).batch(2)

    with pytest.raises(ValueError, match="no data here"):
        strategy.distribute_datasets_from_function(dataset_fn)


def test_an_error_in_the_data_of_one_rank_reaches_the_others(strategy, rank, size):
    def count():
        yield 0
        if rank == size - 1:
            raise KeyError("no more")
        yield 1

    batches = strategy.distribute_datasets_from_function(
        lambda context: ms.data.Dataset.from_generator(
            count, ms.data.ArraySpec((), np.int64)
        ).batch(1)
    )
    with pytest.raises(KeyError if rank == size - 1 else CollectiveMismatchError, match="no more"):
        list(batches)


def fails_on(guilty):
    def generate():
        yield from range(3)
        if guilty:
            raise KeyError("no more")

    generated = ms.data.Dataset.from_generator(generate, ms.data.ArraySpec((), np.int64))

    def stumble(x):
        if guilty and len(x) and x[-1] >= 8:
            raise KeyError("no more")
        return x

    numbers = ms.data.Dataset.range(9).batch(3)
    return {
        "generator": generated.batch(2),
        "map": numbers.map(stumble),
        "prefetched map": numbers.map(stumble).prefetch(2),
    }


@pytest.mark.parametrize("case", fails_on(False))
@pytest.mark.parametrize("guilty", ["last", "all"])
def test_an_error_while_reading_closes_what_the_others_wait_in(strategy, rank, size, case, guilty):
    is_guilty = guilty == "all" or rank == size - 1
    dataset = fails_on(is_guilty)[case]
    if case != "generator":
        # Each rank iterates over everything, so that every rank meets what it stumbles over.
        dataset = dataset.with_options(auto_shard_policy=OFF)
    batches = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(KeyError if is_guilty else CollectiveMismatchError, match="no more"):
        for batch in batches:
            strategy.reduce("sum", batch, axis=0)
        strategy.reduce("sum", 1)
    if guilty == "all":
        assert strategy.reduce("sum", 1) == size


def bad_at(number):
    """Return data sets of 7 examples, of which the one with this number cannot be made."""

    def stumble(x):
        if np.any(np.asarray(x) == number):
            raise KeyError("bad one")
        return x

    class Source:
        def __len__(self):
            return 7

        def read(self, numbers):
            return stumble(numbers)

    class Rows:
        def __len__(self):
            return 7

        def __getitem__(self, n):
            if n == number:
                raise KeyError("bad one")
            return np.arange(3)

    data = ms.data.Dataset
    spec = ms.data.ArraySpec((), np.int64)
    mapped = data.range(7).map(stumble)
    return {
        "map": lambda size: mapped.batch(size),
        "map in threads": lambda size: data.range(7).map(stumble, num_parallel_calls=2).batch(size),
        "map of batches": lambda size: data.range(7).batch(size).map(stumble),
        "source": lambda size: data.from_source(Source()).batch(size),
        "elements": lambda size: data.from_source(Rows()).ragged_batch(size),
        "generator": lambda size: data.from_generator(lambda: map(stumble, range(7)), spec).batch(
            size
        ),
        "shuffle": lambda size: mapped.shuffle(0).batch(size),
        "zip": lambda size: data.zip((mapped, data.range(9))).batch(size),
        "concatenate": lambda size: mapped.concatenate(data.range(2)).batch(size),
        "window": lambda size: mapped.window(2).batch(size),
        "cache": lambda size: mapped.cache("1 MiB").batch(size),
        "unbatch": lambda size: mapped.batch(2).shuffle(0).unbatch().batch(size),
        "batches of batches": lambda size: mapped.batch(1).batch(size),
        "padded": lambda size: mapped.padded_batch(size),
        "prefetch": lambda size: mapped.batch(size).prefetch(2),
        "repeat": lambda size: mapped.repeat(2).batch(size),
        "select": lambda size: mapped.select(range(7)).batch(size),
        "enumerate": lambda size: mapped.enumerate().batch(size),
    }


@pytest.mark.thorough_product
@pytest.mark.parametrize("case", bad_at(0))
@pytest.mark.parametrize(("number", "batch_size"), [(1, 2), (6, 2), (6, 6), (4, 3)])
def test_an_error_in_a_batch_reaches_ranks_without_rows_of_it(
    strategy, rank, size, case, number, batch_size
):
    # No rank does a collective in the loop, and none may end it without an error.
    batches = strategy.experimental_distribute_dataset(bad_at(number)[case](batch_size))
    with pytest.raises((KeyError, CollectiveMismatchError, DataError), match="bad one"):
        for _ in batches:
            pass
    assert ms.MPIStrategy(device="cpu").reduce("sum", 1) == size


@pytest.mark.parametrize("guilty", [0, -1])
def test_an_error_reaches_ranks_whose_own_data_have_ended(strategy, rank, size, guilty):
    def dataset_fn(context):
        is_guilty = rank == guilty % size
        numbers = ms.data.Dataset.range(9 if is_guilty else 2)
        return numbers.map(lambda x: {x: x for x in range(8)}[int(x)]).batch(2)

    batches = strategy.distribute_datasets_from_function(dataset_fn)
    seen = []
    with pytest.raises((KeyError, CollectiveMismatchError), match="KeyError|8"):
        for batch in batches:
            seen.append(len(localize(batch)))
    assert seen == ([2] * 4 if rank == guilty % size else [2] + [0] * 4)
    assert ms.MPIStrategy(device="cpu").reduce("sum", 1) == size


def test_ranks_without_an_example_to_map(strategy, rank, size):
    def dataset_fn(context):
        numbers = ms.data.Dataset.range(3 if rank == size - 1 else 0)
        return numbers.map(lambda x: {"a": (x, np.full(2, x, np.float32))}).batch(2)

    batches = strategy.distribute_datasets_from_function(dataset_fn)
    assert batches.element_spec["a"][1] == ms.data.ArraySpec((None, 2), np.float32)
    parts = [localize(element)["a"] for element in batches]
    assert len(parts) == 2
    assert [y.dtype for _, y in parts] == [np.float32] * 2
    assert [len(y) for _, y in parts] == ([2, 1] if rank == size - 1 else [0, 0])


def test_elements_of_another_kind_on_one_rank(strategy, rank, size):
    arrays = [np.zeros((3, 2)), np.zeros((3, 4))]  # other lengths are welcome
    same = strategy.distribute_datasets_from_function(
        lambda context: ms.data.Dataset.from_arrays(arrays[rank % 2]).batch(2)
    )
    assert [localize(part).shape[1] for part in same] == [2 + 2 * (rank % 2)] * 2
    if size == 1:
        return
    for other in ({"x": np.zeros(3)}, np.zeros((3, 1), np.float32), np.zeros((3, 1, 1))):
        nest = other if rank == size - 1 else np.zeros((3, 1))
        with pytest.raises(DataError, match=f"rank 0 has .*float64.*rank {size - 1} "):
            strategy.distribute_datasets_from_function(
                lambda context, nest=nest: ms.data.Dataset.from_arrays(nest).batch(1)
            )


def test_no_rank_has_an_example_to_map(strategy):
    empty = ms.data.Dataset.range(0).map(twice).batch(2)
    batches = strategy.distribute_datasets_from_function(lambda context: empty)
    assert list(batches) == []
    with pytest.raises(DataError, match="empty"):
        _ = batches.element_spec


def test_structures_that_cannot_be_sent(strategy, rank, size):
    class Local(NamedTuple):
        x: int

    def dataset_fn(context):
        return ms.data.Dataset.range(rank).map(Local).batch(1)

    if size == 1:
        assert list(strategy.distribute_datasets_from_function(dataset_fn)) == []
        return
    with pytest.raises(DataError, match="Local.* Let map return dicts"):
        strategy.distribute_datasets_from_function(dataset_fn)


@pytest.mark.parametrize("policy", ["function", OFF])
def test_an_empty_generator_repeated_ends(strategy, policy):
    dataset = of_unknown_length(0).repeat().batch(2)
    if policy == "function":
        batches = strategy.distribute_datasets_from_function(lambda context: dataset)
    else:
        batches = strategy.experimental_distribute_dataset(
            dataset.with_options(auto_shard_policy=policy)
        )
    assert list(itertools.islice(batches, 5)) == []


def test_an_endless_rank_keeps_those_with_an_empty_generator(strategy, rank, size):
    def dataset_fn(context):
        return of_unknown_length(3 if rank == size - 1 else 0).repeat().batch(2)

    batches = strategy.distribute_datasets_from_function(dataset_fn)
    assert batches.cardinality() == -1
    parts = [localize(element).tolist() for element in itertools.islice(batches, 3)]
    assert parts == ([[0, 1], [2, 0], [1, 2]] if rank == size - 1 else [[]] * 3)


def test_a_script_without_mpi_saves_its_position(mpi_tmp_path):
    # Beside strategies of other tests all ranks save together.
    dataset = ms.data.Dataset.range(10).shuffle(0).batch(3)
    expected = [[batch.tolist() for batch in dataset] for _ in range(2)]

    def make():
        dataset = ms.data.Dataset.range(10).shuffle(0).batch(3)
        return ms.get_strategy().experimental_distribute_dataset(dataset)

    batches = make()
    iterator = iter(batches)
    assert iterator.get_next().tolist() == expected[0][0]
    path = mpi_tmp_path / "run.h5"
    ms.Checkpoint(batches=batches).write(path)
    again = make()
    ms.Checkpoint(batches=again).restore(path).assert_consumed()
    assert again.state_dict() == batches.state_dict()
    assert [batch.tolist() for batch in again] == expected[0][1:]
    assert [batch.tolist() for batch in again] == expected[1]


def test_a_position_saved_without_mpi_goes_on_with_it(strategy):
    alone = ms.data.Dataset.range(10).shuffle(0).batch(3)
    next(iter(alone))
    batches = strategy.experimental_distribute_dataset(
        ms.data.Dataset.range(10).shuffle(0).batch(3)
    )
    batches.load_state_dict(alone.state_dict())
    assert len(list(batches)) == 3
