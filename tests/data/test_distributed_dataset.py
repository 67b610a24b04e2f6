"""How batches are divided, and the position of a distributed data set."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, AutoShardPolicy, Dataset
from mpistrat.errors import DataError, OutOfRangeError
from mpistrat.options import InputContext, InputOptions, InputReplicationMode
from mpistrat.values import PerReplica, localize


def parts_of(distributed):
    """Return the batches of one rank, as lists."""
    return [localize(element).tolist() for element in distributed]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 7))
def test_parts_are_the_slices_of_the_contract(all_ranks, num_examples, batch_size, size):
    dataset = Dataset.range(num_examples).shuffle(0).batch(batch_size)
    whole = [batch.tolist() for batch in dataset]
    for rank, distributed in enumerate(all_ranks(dataset, size)):
        expected = []
        for batch in whole:
            share = -(-len(batch) // size)
            expected.append(batch[rank * share : (rank + 1) * share])
        assert parts_of(distributed) == expected


def test_elements_are_nests_of_per_replica_values(all_ranks):
    dataset = Dataset.from_arrays({"x": np.zeros((5, 2), np.float32), "y": (np.zeros(5),)}).batch(4)
    for distributed in all_ranks(dataset, 3):
        assert distributed.cardinality() == 2
        assert distributed.element_spec == {
            "x": ArraySpec((None, 2), np.float32),
            "y": (ArraySpec((None,), np.float64),),
        }
        for element in distributed:
            assert isinstance(element["x"], PerReplica)
            assert isinstance(element["y"][0], PerReplica)


def test_a_rank_with_nothing_left_gets_empty_arrays_of_the_right_kind(all_ranks, numbered):
    from_file = Dataset.from_hdf5(numbered(9, chunk=2), "image")
    generated = Dataset.from_generator(
        lambda: (np.zeros(3) for _ in range(9)), ArraySpec((None,), np.float32)
    )
    mapped = Dataset.range(9).map(lambda x: np.full(3, x, np.float32))
    for dataset in (from_file, generated, mapped):
        last = list(all_ranks(dataset.batch(8), 4)[3])
        (part,) = last[1].values
        assert part.shape == (0, 3)
        assert part.dtype == np.float32


def test_a_map_after_batch_gets_the_slice_of_the_rank(all_ranks):
    lengths = []
    dataset = Dataset.range(10).batch(8).map(lambda x: (lengths.append(len(x)), x)[1])
    distributed = all_ranks(dataset, 4)[3]
    lengths.clear()
    list(distributed)
    assert lengths == [2, 0]


def test_get_next(all_ranks):
    (distributed,) = all_ranks(Dataset.range(3).batch(2), 1)
    iterator = iter(distributed)
    assert localize(iterator.get_next()).tolist() == [0, 1]
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert localize(optional.get_value()).tolist() == [2]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="epoch has ended"):
            iterator.get_next()
        ended = iterator.get_next_as_optional()
        assert not ended.has_value()
        with pytest.raises(OutOfRangeError, match="has_value"):
            ended.get_value()


def test_passes_are_counted_also_those_broken_off(all_ranks):
    dataset = Dataset.range(12).shuffle(7).batch(5)
    passes = [[batch.tolist() for batch in dataset] for _ in range(3)]
    (distributed,) = all_ranks(Dataset.range(12).shuffle(7).batch(5), 1)
    assert parts_of(distributed) == passes[0]
    next(iter(distributed))
    assert parts_of(distributed) == passes[2]


def test_position(all_ranks):
    (distributed,) = all_ranks(Dataset.range(12).batch(5).prefetch(2), 1)

    def position():
        state = distributed.state_dict()
        assert json.loads(json.dumps(state)) == state
        return state["pass"], state["batch"]

    assert position() == (0, 0)
    iterator = iter(distributed)
    assert position() == (0, 0)
    for handed_out in (1, 2, 3):
        next(iterator)
        assert position() == (0, handed_out)
    assert next(iterator, None) is None
    assert position() == (1, 0)
    older = iter(distributed)
    newer = iter(distributed)
    assert position() == (2, 0)
    next(newer)
    next(older)
    assert position() == (2, 1)


@pytest.mark.parametrize(("size", "other_size"), [(1, 1), (3, 2), (2, 4)])
def test_a_restored_position_gives_each_remaining_example_once(
    all_ranks, numbered, size, other_size
):
    path = numbered(300, chunk=7)

    def make():
        return Dataset.from_hdf5(path, "label").shuffle(1).batch(32)

    def joined(all_parts):
        return [list(itertools.chain(*parts)) for parts in zip(*all_parts, strict=True)]

    whole = all_ranks(make(), 1)[0]
    expected = [parts_of(whole), parts_of(whole)]
    before = all_ranks(make(), size)
    taken = []
    for distributed in before:
        iterator = iter(distributed)
        taken.append([localize(next(iterator)).tolist() for _ in range(4)])
    assert joined(taken) == expected[0][:4]
    (state,) = {json.dumps(distributed.state_dict()) for distributed in before}
    after = all_ranks(make(), other_size)
    for distributed in after:
        distributed.load_state_dict(json.loads(state))
        assert distributed.state_dict() == json.loads(state)
    assert joined([parts_of(distributed) for distributed in after]) == expected[0][4:]
    assert joined([parts_of(distributed) for distributed in after]) == expected[1]


def test_restoring_the_end_of_a_pass(all_ranks):
    dataset = Dataset.range(4).batch(2)
    (distributed,) = all_ranks(dataset, 1)
    distributed.load_state_dict(distributed.state_dict() | {"pass": 1, "batch": 2})
    assert parts_of(distributed) == []
    assert distributed.state_dict()["pass"] == 2
    assert parts_of(distributed) == [[0, 1], [2, 3]]


def test_positions_that_do_not_fit(all_ranks):
    (distributed,) = all_ranks(Dataset.range(4).batch(2), 1)
    with pytest.raises(ValueError, match="batch"):
        distributed.load_state_dict({"pass": 0})
    with pytest.raises(TypeError, match="pass"):
        distributed.load_state_dict({"pass": "x", "batch": 0})
    with pytest.raises(ValueError, match="at least 0"):
        distributed.load_state_dict({"pass": 0, "batch": -1})
    with pytest.raises(ValueError, match="global_batch_size was 3"):
        distributed.load_state_dict({"pass": 0, "batch": 1, "global_batch_size": 3})
    with pytest.raises(TypeError, match="dict"):
        distributed.load_state_dict(None)
    state = distributed.state_dict()
    with pytest.raises(ValueError, match="have changed"):
        distributed.load_state_dict(state | {"batch": 3})
    distributed.load_state_dict({"pass": 2, "batch": 0, "global_batch_size": 3})
    assert distributed.state_dict() == state | {"pass": 2}


def position_in_a_pass(distributed):
    next(iter(distributed))
    return distributed.state_dict()


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (lambda d: d.shuffle(1).batch(2), True),
        (lambda d: d.map(abs).shuffle(1).prefetch(2).batch(2).map(abs), True),
        (lambda d: d.shuffle(2).batch(2), False),
        (lambda d: d.shuffle(1, window=3).batch(2), False),
        (lambda d: d.shuffle(1, reshuffle_each_iteration=False).batch(2), False),
        (lambda d: d.batch(2), False),
        (lambda d: d.batch(2).shuffle(1), False),
        (lambda d: d.take(8).shuffle(1).batch(2), False),
        (lambda d: d.shuffle(1).batch(2).repeat(2), False),
    ],
)
def test_a_position_within_a_pass_is_refused_by_another_order(all_ranks, other, is_same):
    state = position_in_a_pass(all_ranks(Dataset.range(9).shuffle(1).batch(2), 2)[0])
    for distributed in all_ranks(other(Dataset.range(9)), 3):
        if is_same:
            distributed.load_state_dict(state)
        else:
            with pytest.raises(ValueError, match="of a different dataset"):
                distributed.load_state_dict(state)
        distributed.load_state_dict(state | {"batch": 0})


def test_a_position_within_a_pass_is_refused_by_other_files(all_ranks, numbered, tmp_path):
    def over(*args, **kwargs):
        dataset = Dataset.from_hdf5(numbered(*args, **kwargs), ("image", "label"))
        return all_ranks(dataset.shuffle(0).batch(4), 1)[0]

    state = position_in_a_pass(over(30, chunk=5))
    for other in (over(31, chunk=5), over(30, chunk=6), over(30, chunk=5, name="other.h5")):
        with pytest.raises(ValueError, match="of a different dataset"):
            other.load_state_dict(state)
    (tmp_path / "moved").mkdir()
    over(30, chunk=5, name="moved/data.h5").load_state_dict(state)


def test_policy_off_gives_every_rank_everything(all_ranks):
    dataset = Dataset.range(10).batch(8).with_options(auto_shard_policy=AutoShardPolicy.OFF)
    for distributed in all_ranks(dataset, 3):
        assert distributed.cardinality() == 4
        assert parts_of(distributed) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_policy_file_gives_each_rank_files_of_its_own(all_ranks, numbered):
    paths = [numbered(n, name=f"{i}.h5", first=10 * i) for i, n in enumerate([4, 5, 1])]
    dataset = Dataset.from_hdf5(paths, "label").batch(4)
    by_file = dataset.with_options(auto_shard_policy=AutoShardPolicy.FILE)
    first, second = all_ranks(by_file, 2)
    assert first.cardinality() == second.cardinality() == 3
    assert parts_of(first) == [[0, 1], [2, 3], [20]]
    assert parts_of(second) == [[10, 11], [12, 13], [14]]
    *_, third = all_ranks(by_file, 3)
    assert parts_of(third) == [[20], [], []]
    with pytest.raises(ValueError, match="3 for 4 ranks"):
        all_ranks(by_file, 4)
    with pytest.raises(ValueError, match="from_hdf5"):
        all_ranks(Dataset.range(9).batch(3).with_options(auto_shard_policy=AutoShardPolicy.FILE), 2)


def test_policy_file_with_a_map_and_an_empty_file(all_ranks, numbered):
    paths = [numbered(n, name=f"{i}.h5") for i, n in enumerate([3, 0])]
    dataset = Dataset.from_hdf5(paths, ("label", "image")).map(lambda y, x: {"y": y, "x": x + 1.5})
    by_file = dataset.batch(4).with_options(auto_shard_policy=AutoShardPolicy.FILE)
    _, empty = all_ranks(by_file, 2)
    assert empty.element_spec["x"] == ArraySpec((None, 3), np.float32)
    for element in empty:
        assert localize(element)["x"].shape == (0, 3)
        assert localize(element)["x"].dtype == np.float32


def test_map_results_have_one_dtype_on_all_ranks(all_ranks):
    dataset = Dataset.range(8).map(lambda x: 2.5 if x < 2 else 1).batch(8)
    for distributed in all_ranks(dataset, 4):
        (part,) = [localize(element) for element in distributed]
        assert part.dtype == np.float64


def test_positions_of_policy_file_hold_for_one_number_of_ranks(all_ranks, numbered):
    paths = [numbered(6, name=f"{i}.h5", first=10 * i) for i in range(3)]
    dataset = Dataset.from_hdf5(paths, "label").batch(6)
    by_file = dataset.with_options(auto_shard_policy=AutoShardPolicy.FILE)
    distributed = all_ranks(by_file, 3)[1]
    next(iter(distributed))
    state = distributed.state_dict()
    again = all_ranks(by_file, 3)[1]
    again.load_state_dict(state)
    assert parts_of(again) == [[12, 13], [14, 15]]
    with pytest.raises(ValueError, match="num_replicas"):
        all_ranks(by_file, 2)[1].load_state_dict(state)


def test_what_cannot_be_distributed(all_ranks, tmp_path):
    with pytest.raises(ValueError, match="not batched"):
        all_ranks(Dataset.range(3), 1)
    with pytest.raises(TypeError, match="Dataset"):
        all_ranks([1, 2], 1)
    with pytest.raises(TypeError, match="InputOptions"):
        all_ranks(Dataset.range(3).batch(1), 1, options="fast")
    with pytest.raises(DataError, match=r"gone\.h5"):
        all_ranks(Dataset.from_hdf5(tmp_path / "gone.h5").batch(2), 2)
    per_replica = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    with pytest.raises(NotImplementedError, match="distribute_datasets_from_function"):
        all_ranks(Dataset.range(3).batch(1), 1, options=per_replica)


def test_input_context():
    context = InputContext(4, 1, 4)
    assert context.get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match=r"10 is not divisible .* 4"):
        context.get_per_replica_batch_size(10)
    assert InputContext() == InputContext(1, 0, 1)
