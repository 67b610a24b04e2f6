"""Elements that differ in shape: the same global batches as lists, at any number of ranks."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset, Ragged
from mpistrat.errors import CollectiveError, DataError
from tests.devices import assert_array_equal

NUM = 23


def row(number):
    """Return what the model knows: `number` as often as it says modulo 5."""
    return np.full(number % 5, number, np.int32)


def rows(kind):
    """Return a data set of rows of different lengths, each with its number and a text."""
    spec = {
        "row": ArraySpec((None,), np.int32),
        "n": ArraySpec((), np.int64),
        "text": ArraySpec((), "U"),
    }
    elements = [{"row": row(n), "n": n, "text": "x" * (n % 7)} for n in range(NUM)]
    if kind == "generator":
        return Dataset.from_generator(lambda: elements, spec)
    return Dataset.range(NUM).map(lambda n: elements[int(n)], num_parallel_calls=2)


def whole(strategy, value):
    """Return a value over all ranks: an array, or the rows of a `Ragged`."""
    (part,) = value.values
    if not isinstance(part, Ragged):
        return list(strategy.gather(value, axis=0))
    values = strategy.gather(ms.PerReplica(part.values), axis=0)
    lengths = strategy.gather(ms.PerReplica(part.row_lengths()), axis=0)
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


@pytest.mark.parametrize("kind", ["generator", "map"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_ragged_batches_are_those_of_a_list(strategy, kind, is_shuffled):
    dataset = rows(kind).shuffle(3, window=10) if is_shuffled else rows(kind)
    batches = strategy.experimental_distribute_dataset(dataset.ragged_batch(6))
    order = [int(element["n"]) for element in dataset]
    seen = []
    for batch in batches:
        numbers = whole(strategy, batch["n"])
        found = whole(strategy, batch["row"])
        assert [each.tolist() for each in found] == [row(n).tolist() for n in numbers]
        assert whole(strategy, batch["text"]) == ["x" * (n % 7) for n in numbers]
        seen.append([int(n) for n in numbers])
    assert seen == [order[first : first + 6] for first in range(0, NUM, 6)]


@pytest.mark.parametrize("kind", ["generator", "map"])
def test_padded_batches_are_those_of_a_list(strategy, kind):
    shapes = {"row": (6,), "n": (), "text": ()}
    values = {"row": -1, "n": None, "text": ""}
    batched = rows(kind).padded_batch(5, shapes, values)
    assert batched.element_spec["row"] == ArraySpec((None, 6), np.int32)
    numbers = []
    for batch in strategy.experimental_distribute_dataset(batched):
        found = np.stack(whole(strategy, batch["row"]))
        numbers += whole(strategy, batch["n"])
        for line, number in zip(found, numbers[-len(found) :], strict=True):
            expected = np.full(6, -1)
            expected[: number % 5] = number
            assert_array_equal(line, expected)
    assert numbers == list(range(NUM))


def test_lengths_without_a_shape_are_those_of_the_slice(strategy, rank, size):
    batches = strategy.experimental_distribute_dataset(rows("generator").padded_batch(NUM))
    (batch,) = batches
    (part,) = batch["row"].values
    (numbers,) = batch["n"].values
    assert part.shape == (len(numbers), max((n % 5 for n in numbers.tolist()), default=0))


@pytest.mark.parametrize("kind", ["generator", "map"])
def test_a_plain_batch_names_two_examples_and_the_ways_out(strategy, size, kind):
    # On one rank at least, whatever it has of the batch; the others hear of it.
    expected = DataError if size == 1 else (DataError, CollectiveError)
    with pytest.raises(expected, match="padded_batch") as caught:
        for batch in strategy.experimental_distribute_dataset(rows(kind).batch(4)):
            strategy.gather(batch["n"], axis=0)
    if isinstance(caught.value, DataError):
        assert "ragged_batch" in str(caught.value)
        assert "example" in str(caught.value)


def test_equal_shapes_within_each_batch_stack(strategy):
    lengths = [2, 2, 2, 4, 4, 4, 1]
    spec = ArraySpec((None,), np.int64)
    dataset = Dataset.from_generator(lambda: [np.full(n, n) for n in lengths], spec).batch(3)
    found = [
        strategy.gather(batch, axis=0).tolist()
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    assert found == [[[2] * 2] * 3, [[4] * 4] * 3, [[1]]]


def test_run_gets_a_ragged(strategy):
    batches = strategy.experimental_distribute_dataset(rows("generator").ragged_batch(NUM))
    for batch in batches:
        sums = strategy.run(lambda part: part.values.sum(), args=(batch["row"],))
        assert strategy.reduce("sum", sums, axis=None) == sum(row(n).sum() for n in range(NUM))
        again = strategy.run(lambda part: part, args=(batch["row"],))
        assert isinstance(again.values[0], Ragged)
        with pytest.raises(NotImplementedError, match="row_lengths"):
            strategy.gather(batch["row"], axis=0)


def test_gathered_text_is_as_wide_as_the_widest(strategy, rank, size):
    own = np.array([f"{rank}" * (rank + 1)])
    gathered = strategy.gather(ms.PerReplica(own), axis=0)
    assert gathered.tolist() == [f"{r}" * (r + 1) for r in range(size)]
    assert gathered.dtype == f"<U{size}"
    names = strategy.run(
        lambda: ms.get_replica_context().all_gather(np.array(["a" * rank, "b"]), axis=0)
    )
    assert names.values[0].tolist() == [t for r in range(size) for t in ("a" * r, "b")]


def test_unbatched_are_the_elements(strategy):
    dataset = rows("map").padded_batch(4).unbatch().ragged_batch(5)
    found = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        found += [each.tolist() for each in whole(strategy, batch["row"])]
    assert found == [row(n).tolist() for n in range(NUM)]


def test_positions_hold_at_any_number_of_ranks(strategy):
    def make():
        return rows("map").shuffle(5).ragged_batch(4)

    batches = strategy.experimental_distribute_dataset(make())
    alone = ms.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(make())
    for _ in zip(range(3), batches, strict=False):
        pass
    assert batches.state_dict()["batch"] == 3
    alone.load_state_dict(batches.state_dict())
    rest = [batch["n"].values[0].tolist() for batch in alone]
    again = strategy.experimental_distribute_dataset(make())
    again.load_state_dict(batches.state_dict())
    assert [[int(n) for n in whole(strategy, batch["n"])] for batch in again] == rest
