"""State that is equal on all ranks, that differs, and that is declared to differ."""

import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.system.text import rank_list
from tests.devices import array_equal

pytestmark = pytest.mark.mpi


class History:
    """An object with arrays and JSON values in its state."""

    def __init__(self, rows=()):
        self.rows = list(rows)
        self.array = np.arange(len(self.rows), dtype=np.float32)

    def state_dict(self):
        return {"rows": self.rows, "array": self.array, "nested": [{"copy": self.array * 2}]}

    def load_state_dict(self, state):
        self.rows, self.array = list(state["rows"]), state["array"]
        assert array_equal(state["nested"][0]["copy"], self.array * 2)


def needs_two(size):
    if size == 1:
        pytest.skip("one rank never differs")


@pytest.fixture
def weight(strategy):
    with strategy.scope():
        return ms.Variable(np.ones(3, np.float32))


@pytest.fixture
def path(mpi_tmp_path):
    return os.fspath(mpi_tmp_path / "run.h5")


def test_equal_state_is_saved_once(weight, path, size):
    saved = {
        "generator": np.random.default_rng(0),
        "history": History([1, 2]),
        "plain": ms.Variable(np.int64(4)),
    }
    ms.Checkpoint(weight=weight, **saved).write(path)
    with h5py.File(path) as file:
        assert file["variables/history/array"].shape == (2,)
        assert file["variables/plain"][()] == 4


@pytest.mark.parametrize("kind", ["generator", "history", "array", "plain"])
@pytest.mark.parametrize("way", ["write", "parallel", "asynchronous"])
def test_state_that_differs_is_refused_by_name(weight, strategy, path, rank, size, kind, way):
    needs_two(size)
    own = {
        "generator": np.random.default_rng(rank),
        "history": History([rank]),
        "array": History([1] * (1 + rank)),
        "plain": ms.Variable(np.int64(rank)),
    }[kind]
    ms.Checkpoint(weight=weight).write(path)
    before = os.stat(path).st_ino
    checkpoint = ms.Checkpoint(weight=weight, same=np.random.default_rng(0), **{kind: own})
    with pytest.raises(ms.errors.CheckpointError, match="PerReplicaState") as caught:
        if way == "asynchronous":
            folder = os.path.dirname(path)
            ms.CheckpointManager(checkpoint, folder, asynchronous=True).save()
        else:
            checkpoint.write(path, parallel=way == "parallel")
    text = str(caught.value)
    assert f"  {kind}: differs between rank 0 and {rank_list(range(1, size))}" in text
    assert "same" not in text
    assert os.stat(path).st_ino == before
    assert strategy.reduce("sum", 1) == size


def test_the_order_of_keys_is_no_difference(weight, path, rank):
    class Keys(History):
        def state_dict(self):
            return dict(sorted({"a": 1, "b": 2}.items(), reverse=bool(rank % 2)))

        def load_state_dict(self, state):
            assert state == {"a": 1, "b": 2}

    checkpoint = ms.Checkpoint(weight=weight, keys=Keys())
    checkpoint.write(path)
    checkpoint.restore(path).assert_consumed()


@pytest.mark.parametrize("way", ["write", "parallel", "asynchronous"])
def test_each_replica_gets_its_state_back(weight, mpi_tmp_path, rank, way):
    def make():
        return {
            "generator": np.random.default_rng(rank),
            "history": History(range(rank)),
            "plain": ms.Variable(np.full(2 + rank, rank)),
        }

    def checkpoint(objects):
        wrapped = {name: ms.PerReplicaState(each) for name, each in objects.items()}
        return ms.Checkpoint(weight=weight, **wrapped)

    saved = make()
    first = saved["generator"].random(3)
    manager = ms.CheckpointManager(
        checkpoint(saved),
        mpi_tmp_path,
        parallel=way == "parallel",
        asynchronous=way == "asynchronous",
    )
    path = manager.save()
    manager.wait()
    expected = saved["generator"].random(3)
    restored = {**make(), "history": History(range(rank))}
    restored["plain"].assign(np.zeros(2 + rank, np.int64))
    checkpoint(restored).restore(path).assert_consumed()
    assert array_equal(restored["generator"].random(3), expected)
    assert not array_equal(first, expected)
    assert restored["history"].rows == list(range(rank))
    assert restored["plain"].numpy().tolist() == [rank] * (2 + rank)


def test_an_object_that_comes_later_gets_its_replicas_state(weight, path, rank):
    generator = np.random.default_rng(rank)
    ms.Checkpoint(weight=weight, generator=ms.PerReplicaState(generator)).write(path)
    late = ms.Checkpoint(weight=weight)
    late.restore(path)
    other = np.random.default_rng(99)
    late.generator = ms.PerReplicaState(other)
    assert other.random() == generator.random()


def write_for_replicas(path, num_replicas):
    """Write the file that a job of `num_replicas` leaves, whose histories are 0, 1, 2, ..."""
    states = [History([each]).state_dict() for each in range(num_replicas)]

    class AllReplicas:
        def state_dict(self):
            return {"replicas": states}

        def load_state_dict(self, state):
            raise AssertionError

    ms.Checkpoint(history=AllReplicas(), weight=ms.Variable(np.ones(3, np.float32))).write(path)


def test_another_number_of_replicas_is_refused_without_reshard(weight, strategy, path, rank, size):
    if rank == 0:
        write_for_replicas(path, size + 1)
    strategy.reduce("sum", 0)
    history = History([-1])
    checkpoint = ms.Checkpoint(weight=weight, history=ms.PerReplicaState(history))
    with pytest.raises(
        ms.errors.CheckpointMismatchError, match=f"{size + 1} replicas, but there are {size}"
    ):
        checkpoint.restore(path)
    assert history.rows == [-1]


@pytest.mark.parametrize("more", [1, -1])
def test_reshard_makes_states_for_todays_replicas(weight, strategy, path, rank, size, more):
    found = max(size + more, 1)
    if rank == 0:
        write_for_replicas(path, found)
    strategy.reduce("sum", 0)

    def deal(states, num_replicas):
        rows = [row for state in states for row in state["rows"]]
        return [History(rows[each::num_replicas]).state_dict() for each in range(num_replicas)]

    history = History([])
    ms.Checkpoint(weight=weight, history=ms.PerReplicaState(history, reshard=deal)).restore(path)
    assert history.rows == list(range(found))[rank::size]


class Columns:
    """An object whose arrays are this replica's columns of a table."""

    def __init__(self, table, part, of):
        self.part = np.array_split(table, of, axis=1)[part].copy()

    def state_dict(self):
        return {"part": self.part}

    def load_state_dict(self, state):
        self.part = state["part"]


def test_reshard_may_divide_arrays_along_any_axis(weight, strategy, path, rank, size):
    table = np.arange(48.0).reshape(2, 24)

    class AllReplicas:
        def state_dict(self):
            parts = [Columns(table, each, size + 1).state_dict() for each in range(size + 1)]
            return {"replicas": parts}

        def load_state_dict(self, state):
            pass

    if rank == 0:
        parts = ms.Checkpoint(columns=AllReplicas(), weight=ms.Variable(np.ones(3, np.float32)))
        parts.write(path)
    strategy.reduce("sum", 0)

    def join_and_cut(states, num_replicas):
        joined = np.concatenate([each["part"] for each in states], axis=1)
        return [Columns(joined, each, num_replicas).state_dict() for each in range(num_replicas)]

    columns = Columns(np.zeros_like(table), rank, size)
    wrapped = ms.PerReplicaState(columns, reshard=join_and_cut)
    ms.Checkpoint(weight=weight, columns=wrapped).restore(path).assert_consumed()
    assert array_equal(columns.part, Columns(table, rank, size).part)


def test_a_reshard_of_another_length_is_refused(weight, strategy, path, rank, size):
    if rank == 0:
        write_for_replicas(path, size + 1)
    strategy.reduce("sum", 0)
    wrapped = ms.PerReplicaState(History([]), reshard=lambda states, num_replicas: states)
    with pytest.raises(ms.errors.CheckpointMismatchError, match="reshard returned"):
        ms.Checkpoint(weight=weight, history=wrapped).restore(path)


def test_state_of_all_replicas_as_one_is_refused(weight, path):
    ms.Checkpoint(weight=weight, history=History([1])).write(path)
    wrapped = ms.PerReplicaState(History([]))
    with pytest.raises(ms.errors.CheckpointMismatchError, match="without PerReplicaState"):
        ms.Checkpoint(weight=weight, history=wrapped).restore(path)


def test_state_that_one_rank_cannot_give_is_an_error_on_all(weight, strategy, path, rank, size):
    class Odd(History):
        def state_dict(self):
            return {"set": {1, 2}} if rank == size - 1 else {"set": [1, 2]}

    checkpoint = ms.Checkpoint(weight=weight, odd=ms.PerReplicaState(Odd()))
    with pytest.raises(TypeError, match="'odd' holds a set"):
        checkpoint.write(path)
    assert strategy.reduce("sum", 1) == size


@pytest.mark.parametrize("bad", [3, np.ones(2), None, np.random.Generator, {"a": History()}])
def test_what_has_no_state_is_refused(bad):
    with pytest.raises(TypeError, match="PerReplicaState needs"):
        ms.PerReplicaState(bad)


def test_variables_of_a_strategy_are_refused(weight):
    with pytest.raises(TypeError, match="belongs to a strategy"):
        ms.PerReplicaState(weight)
    with pytest.raises(TypeError, match="reshard must be"):
        ms.PerReplicaState(History(), reshard=3)


def test_rng_is_a_function_of_key_and_replica(strategy, rank, size):
    def draw(*key):
        return ms.get_replica_context().rng(*key).random(4)

    own = strategy.run(draw, args=(7, 3)).values[0]
    sequence = np.random.SeedSequence((7, 3), spawn_key=(2**32 - 2, rank))
    assert array_equal(own, np.random.Generator(np.random.PCG64(sequence)).random(4))
    assert array_equal(own, strategy.run(draw, args=(7, 3)).values[0])
    everyone = strategy.gather(own[None], 0)
    assert len(np.unique(everyone)) == 4 * size
    assert not array_equal(own, strategy.run(draw, args=(7, 4)).values[0])


@pytest.mark.parametrize(
    ("key", "error"),
    [((), ValueError), ((-1,), ValueError), ((1.5,), TypeError), (("a",), TypeError)],
)
def test_rng_takes_integers_that_are_not_negative(strategy, key, error):
    with pytest.raises(error):
        strategy.run(lambda: ms.get_replica_context().rng(*key))


def test_rng_works_in_the_default_strategy():
    sequence = np.random.SeedSequence((5,), spawn_key=(2**32 - 2, 0))
    expected = np.random.Generator(np.random.PCG64(sequence)).random()
    assert ms.get_replica_context().rng(5).random() == expected
