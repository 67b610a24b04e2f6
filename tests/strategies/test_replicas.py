"""Several replicas on a rank: what each part of the API does with them."""

import contextlib
import contextvars
import itertools
import threading

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_allclose
from tests.replica_groups import NUM_REPLICAS, replica_id
from tests.tree_reduction import expected_reduction, values_of

ON_READ = ms.VariableSynchronization.ON_READ
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN


@pytest.fixture(scope="module", params=NUM_REPLICAS)
def replicas(request):
    strategy = ms.MPIStrategy(device="cpu", num_replicas=request.param)
    yield strategy
    strategy.close()


def as_replicas(strategy):
    """Return a `PerReplica` of the numbers of the replicas."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: float(context.replica_id_in_sync_group)
    )


def test_shares_are_contiguous_and_the_first_may_have_one_more(replicas, num, ids, rank, size):
    quotient, remainder = divmod(num, size)
    start = rank * quotient + min(rank, remainder)
    assert ids == list(range(start, start + quotient + (rank < remainder)))
    assert num == replicas.num_replicas_in_sync
    assert f"of {num}" in repr(replicas)
    assert replicas.cluster_resolver.task_id == rank
    assert replicas.cluster_resolver.num_workers == size


def test_a_replica_sees_the_rank_that_runs_it(replicas, rank, size):
    def fn():
        resolver, extended = replicas.cluster_resolver, replicas.extended
        assert (replicas.rank, replicas.size) == (resolver.task_id, resolver.num_workers)
        assert (replicas.rank, replicas.size) == (rank, size)
        assert replicas.is_chief == (rank == 0) == extended.should_checkpoint
        assert extended.should_save_summary == (rank == 0)
        assert f"rank {rank} of {size}" in repr(replicas)
        assert len(extended.worker_devices) == size

    replicas.run(fn)


def test_replicas_take_turns_in_order_and_meet(replicas, num, ids):
    seen = []

    def fn():
        for phase in range(3):
            seen.append((phase, replica_id()))
            total = ms.get_replica_context().all_reduce("sum", replica_id())
            assert total == num * (num - 1) // 2

    replicas.run(fn)
    assert seen == [(phase, each) for phase in range(3) for each in ids]


def test_what_run_returns(replicas, ids):
    marker = object()

    def fn():
        number = replica_id()
        return {
            "array": np.full(2, number),
            "number": number,
            "none": None,
            "same": marker,
            "text": "".join(["a", "b"]),
            "other": object(),
            "some": None if number == ids[0] else marker,
        }

    result = replicas.run(fn)
    assert [each.tolist() for each in result["array"].values] == [[each] * 2 for each in ids]
    assert result["number"].values == tuple(ids)
    assert result["none"] is None
    assert result["same"] is marker
    assert result["text"] == "ab"
    assert isinstance(result["other"], ms.PerReplica) is (len(ids) > 1)
    assert isinstance(result["some"], ms.PerReplica) is (len(ids) > 1)
    assert replicas.run(lambda: None) is None
    assert isinstance(result["number"], ms.PerReplica)
    numbers = replicas.run(lambda: float(replica_id()))
    assert repr(numbers) == f"PerReplica({', '.join(repr(float(each)) for each in ids)})"


def test_other_structures_are_refused(replicas, ids):
    if len(ids) == 1:
        assert len(replicas.run(lambda: [replica_id()] * (replica_id() + 1))) == ids[0] + 1
        return
    with pytest.raises(ValueError, match="different structure"):
        replicas.run(lambda: [0] * (replica_id() + 1))


def test_local_results(replicas, ids):
    value = as_replicas(replicas)
    assert replicas.experimental_local_results(value) == tuple(map(float, ids))
    nests = replicas.experimental_local_results({"a": value, "b": 3})
    assert nests == tuple({"a": float(each), "b": 3} for each in ids)
    assert replicas.experimental_local_results(3) == (3,)


def test_components_that_do_not_fit_are_refused(replicas, ids):
    given = ms.PerReplica(np.ones(2))

    def refused():
        if len(ids) == 1:
            return contextlib.nullcontext()
        return pytest.raises(ValueError, match=rf"1 component.*, but this rank has {len(ids)} ")

    def fn():
        with refused():
            assert np.asarray(given).sum() == 2

    with refused():
        assert replicas.run(lambda x: x[0].sum(), args=([given],)).values == (2.0,)
    with refused():
        assert replicas.run(lambda x: x.sum(), kwargs={"x": given}).values == (2.0,)
    with refused():
        assert len(replicas.experimental_local_results([given])) == 1
    replicas.run(fn)
    other = ms.OneDeviceStrategy(num_replicas=len(ids) + 1)
    with pytest.raises(ValueError, match=rf"{len(ids) + 1} component.* has {len(ids)} "):
        replicas.run(lambda x: x, args=(as_replicas(other),))
    other.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.reduce("sum", np.ones(3)),
        lambda s: s.reduce("sum", {"a": 2.0}),
        lambda s: s.gather(np.ones(3), 0),
        lambda s: s.extended.reduce_to("sum", np.ones(3), "cpu:0"),
        lambda s: s.extended.batch_reduce_to("sum", [(np.ones(3), "cpu:0")]),
        lambda s: s.reduce("sum", [True]),
        lambda s: s.reduce("sum", ms.IndexedSlices(np.ones((1, 2)), [0])),
        lambda s: s.reduce("sum", pytest.importorskip("torch").ones(2)),
    ],
)
def test_a_plain_array_is_no_replicas_component(replicas, ask):
    with pytest.raises(ValueError, match="unclear which one it belongs to"):
        ask(replicas)


@pytest.mark.parametrize("exclusive", [False, True])
def test_the_gradient_of_a_scan_comes_from_the_later_replicas(replicas, num, exclusive):
    torch = pytest.importorskip("torch")

    def fn():
        x = torch.full((3,), 1.0 + replica_id(), requires_grad=True)
        total = ms.get_replica_context().scan("sum", x, exclusive=exclusive)
        (total * (replica_id() + 1)).sum().backward()
        return x.grad.numpy()

    for found, number in zip(
        replicas.run(fn).values, replicas.extended.local_replica_ids, strict=True
    ):
        assert found.tolist() == [sum(range(number + 1 + exclusive, num + 1))] * 3


def test_the_gradient_of_a_product_is_of_all_replicas(replicas, num):
    def fn():
        value = np.array([replica_id() + 1.0])
        total = ms.get_replica_context().all_reduce("prod", value)
        pulled = ms.gradients.all_reduce_pullback("prod", value, total, np.ones(1))
        assert_allclose(pulled, num * total / value)

    replicas.run(fn)


def test_merge_call(replicas, num, ids):
    calls, marker = [], object()
    with replicas.scope():
        on_read = ms.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def merge(strategy, number, thing, nest, flag, text, none, one, some):
        calls.append((number.values, thing, nest["x"].values, flag, text, none, one, some))
        assert ms.in_cross_replica_context()
        total = strategy.reduce("sum", number)
        mirrored = strategy.extended.reduce_to("max", number, "cpu:0")
        most = strategy.extended.broadcast_to(mirrored, "cpu:0")
        return total, number, np.zeros(()), most, "text", on_read

    def fn():
        on_read.assign(float(replica_id()))
        of_first = {"one": replica_id() == ids[0], "some": None if replica_id() == ids[0] else 1.0}
        total, number, array, most, text, component = ms.get_replica_context().merge_call(
            merge,
            (replica_id(), marker, {"x": np.full(2, replica_id())}),
            {"flag": True, "text": "".join(["a", "b"]), "none": None, **of_first},
        )
        assert component.shape == ()
        assert component == replica_id()
        array += replica_id()  # its own copy
        return total, number, array, most, text

    total, number, array, most, text = replicas.run(fn)
    others = len(ids) - 1
    assert calls[0][4:6] == ("ab", None)
    # Other objects are themselves where they are the same, as they are where there is one.
    for found, values in zip(
        calls[0][6:], [(True, *[False] * others), (None, *[1.0] * others)], strict=True
    ):
        assert (found.values if others else (found,)) == values
    assert len(calls) == 1
    assert calls[0][0] == tuple(ids)
    assert calls[0][1] is marker
    assert [each.tolist() for each in calls[0][2]] == [[each] * 2 for each in ids]
    assert calls[0][3] is True
    assert total.values == (num * (num - 1) // 2,) * len(ids)
    assert number.values == tuple(ids)
    assert [each.tolist() for each in array.values] == ids
    assert most.values == (num - 1,) * len(ids)
    assert text == "text"


def test_an_error_of_a_meeting_is_raised_in_each_replica(replicas, ids):
    caught = []

    def merge(strategy):
        raise KeyError("merge")

    def fn():
        with pytest.raises(KeyError, match="merge"):
            ms.get_replica_context().merge_call(merge)
        with pytest.raises(ValueError, match="axis"):
            ms.get_replica_context().all_gather(np.ones(2), 3)
        caught.append(replica_id())
        return ms.get_replica_context().all_reduce("sum", 1)

    assert replicas.run(fn).values[0] == replicas.num_replicas_in_sync
    assert caught == ids


def test_mirrored_variables(replicas, num, ids, rank):
    with replicas.scope():
        of_first = ms.Variable(lambda: float(rank + 3))
        variable = ms.Variable(np.zeros(2), aggregation=SUM, name="v")
        mean = ms.Variable(0.0, aggregation=MEAN)
        first = ms.Variable(0.0, aggregation=ms.VariableAggregation.ONLY_FIRST_REPLICA)
    assert of_first.numpy() == 3
    made = []
    replicas.run(lambda: made.append(ms.Variable(float(replica_id() + 3))))
    assert made[-1].numpy() == 3
    assert len(variable.values) == len(ids)
    assert not any(each.flags.writeable for each in variable.values)
    assert all(np.shares_memory(each, variable.values[0]) for each in variable.values)

    def fn():
        assert (
            variable.assign_add(np.full(2, replica_id() + 1)).tolist() == [num * (num + 1) / 2] * 2
        )
        mean.assign(float(replica_id()))
        first.assign_add(float(replica_id() + 3))
        rows = ms.IndexedSlices(np.ones(1), [replica_id() % 2])
        variable.scatter_add(rows, read_value=False)

    replicas.run(fn)
    even = (num + 1) // 2
    assert variable.numpy().tolist() == [num * (num + 1) / 2 + each for each in (even, num - even)]
    assert mean.numpy() == (num - 1) / 2
    assert first.numpy() == 3
    variable.assign([1, 2])
    assert variable.numpy().tolist() == [1, 2]
    with pytest.raises(ValueError, match="not a PerReplica"):
        mean.assign(as_replicas(replicas))
    replicas.extended.assert_replicas_agree([variable, mean])


def test_sync_on_read_variables(replicas, num, ids):
    with replicas.scope():
        total = ms.Variable(np.zeros(2), synchronization=ON_READ, aggregation=SUM)
        mean = ms.Variable(1.0, synchronization=ON_READ, aggregation=MEAN)
        count = ms.Variable(np.int64(0), synchronization=ON_READ, aggregation=SUM)

    def fn():
        total.assign_add(np.full(2, replica_id()))
        mean.assign(float(replica_id()))
        count.assign(replica_id())
        return total.value()[0], mean.read_value()

    values, _ = replicas.run(fn)
    assert values.values == tuple(ids)
    assert [float(each[0]) for each in total.values] == ids
    assert total.numpy().tolist() == [num * (num - 1) / 2] * 2
    assert mean.numpy() == (num - 1) / 2
    total.assign([num, 2 * num])
    assert [each.tolist() for each in total.values] == [[1, 2]] * len(ids)
    count.assign(num + 2)
    assert [int(each) for each in count.values] == [1 + (each < 2) for each in ids]
    assert count.numpy() == num + 2
    seen = replicas.extended.update(mean, lambda v: v.assign_add(1.0), group=False)
    assert len(seen) == len(ids)
    assert mean.numpy() == (num - 1) / 2 + 1
    seen = replicas.extended.update(mean, lambda v: v.assign_add(1.0))
    assert len(seen.values) == len(ids)
    assert replicas.reduce("mean", mean) == (num - 1) / 2 + 2
    count.assign(-num - 3)
    assert [int(each) for each in count.values] == [-2 + (each < num - 3) for each in ids]


def test_update_of_a_mirrored_variable_is_once_a_rank(replicas):
    with replicas.scope():
        variable = ms.Variable(1.0)
    calls = []

    def update(v, x):
        calls.append(1)
        return v.assign_add(x)

    total = replicas.extended.reduce_to("mean", as_replicas(replicas), variable)
    replicas.extended.update(variable, update, (total,))
    assert len(calls) == 1
    seen = replicas.extended.update(variable, lambda v: v.assign_add(0.0), group=False)
    assert isinstance(seen, tuple)
    assert len(seen) == 1
    assert variable.numpy() == 1 + (replicas.num_replicas_in_sync - 1) / 2


def test_a_variable_made_in_a_replica_function(replicas, num, ids):
    made = []

    def fn():
        variable = ms.Variable(
            lambda: float(replica_id() if not ms.in_cross_replica_context() else 5)
        )
        made.append(variable)
        return variable.value()

    values = replicas.run(fn)
    assert all(each is made[0] for each in made)
    assert values.values == (5.0,) * len(ids)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_optimizers_take_one_step_for_all(replicas, num, ids, kind):
    rows = [values_of(each, 7, "f4") for each in range(num)]
    with replicas.scope():
        variable = ms.Variable(np.zeros(7, np.float32))
        table = ms.Variable(np.zeros((3, 2), np.float32))
        optimizer = getattr(ms.optimizers, kind)(0.5, global_clipnorm=3.0)
    plain = ms.Variable(np.zeros(7, np.float32))
    plain_table = ms.Variable(np.zeros((3, 2), np.float32))
    alone = getattr(ms.optimizers, kind)(0.5, global_clipnorm=3.0)

    def fn():
        slices = ms.IndexedSlices(np.full((1, 2), replica_id(), np.float32), [replica_id() % 3])
        before = int(optimizer.iterations.numpy())
        optimizer.apply_gradients([(rows[replica_id()], variable), (slices, table)])
        assert int(optimizer.iterations.numpy()) == before + 1
        return before

    for step in range(3):
        assert replicas.run(fn).values == (step,) * len(ids)
        slices = ms.IndexedSlices(
            np.repeat(np.arange(num, dtype=np.float32), 2).reshape(-1, 2), np.arange(num) % 3
        )
        alone.apply_gradients([(expected_reduction("sum", rows), plain), (slices, plain_table)])
    assert variable.numpy().tobytes() == plain.numpy().tobytes()
    assert table.numpy().tobytes() == plain_table.numpy().tobytes()


@pytest.mark.parametrize("inside", [True, False])
def test_accumulated_gradients(replicas, num, inside):
    rows = [values_of(each, 5, "f4") for each in range(num)]
    with replicas.scope():
        variable = ms.Variable(np.zeros(5, np.float32))
        sgd = ms.optimizers.SGD(1.0)
        accumulator = ms.optimizers.GradientAccumulator([variable])

    def fn():
        for micro in range(3):
            accumulator.add([(rows[replica_id()] * np.float32(micro + 1), variable)])
            assert accumulator.num_added == micro + 1
        if inside:
            accumulator.apply(sgd)
            assert accumulator.num_added == 0

    def count():
        return accumulator.num_added

    replicas.run(fn)
    if not inside:
        accumulator.apply(sgd)
        assert accumulator.num_added == 0
        replicas.run(fn)
        accumulator.reset()
        assert set(replicas.experimental_local_results(replicas.run(count))) == {0}
    sums = [row * np.float32(1) + row * np.float32(2) + row * np.float32(3) for row in rows]
    assert variable.numpy().tobytes() == (0 - expected_reduction("sum", sums)).tobytes()
    assert sgd.iterations.numpy() == 1


class Rows:
    """An object whose state differs in length from replica to replica."""

    def __init__(self, number):
        self.rows = np.arange(number, dtype=np.float32)

    def state_dict(self):
        return {"length": len(self.rows), "rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]
        assert len(self.rows) == state["length"]


def states_of_replicas(strategy, seed):
    """Return a generator, an object and a plain variable for each replica, and their checkpoint."""
    made = strategy.experimental_distribute_values_from_function(
        lambda context: {
            "generator": np.random.default_rng([seed, context.replica_id_in_sync_group]),
            "rows": Rows(context.replica_id_in_sync_group),
            "plain": ms.Variable(np.full(1 + context.replica_id_in_sync_group, float(seed))),
        }
    )
    with strategy.scope():
        wrapped = {name: ms.PerReplicaState(each) for name, each in made.items()}
        return made, ms.Checkpoint(**wrapped)


@pytest.mark.parametrize("way", ["write", "parallel", "asynchronous"])
def test_state_of_each_replica_is_kept(replicas, num, ids, mpi_tmp_path, way):
    made, checkpoint = states_of_replicas(replicas, 1)
    replicas.run(lambda generator: generator.random(replica_id()), args=(made["generator"],))
    with replicas.scope():
        manager = ms.CheckpointManager(
            checkpoint,
            mpi_tmp_path,
            parallel=way == "parallel",
            asynchronous=way == "asynchronous",
        )
        path = manager.save()
        manager.wait()
    again, other = states_of_replicas(replicas, 2)
    alone = ms.OneDeviceStrategy("cpu:0", num_replicas=num)
    on_one, third = states_of_replicas(alone, 3)
    with replicas.scope():
        other.restore(path).assert_consumed()
    with alone.scope():  # another number of ranks
        third.restore(path).assert_consumed()

    def state(generator, rows, plain):
        return generator.random(), len(rows.rows), plain.numpy().sum()

    expected = [np.random.default_rng([1, each]).random(each + 1)[-1] for each in range(num)]
    for strategy, objects, which in ((replicas, again, ids), (alone, on_one, range(num))):
        drawn, lengths, sums = strategy.run(state, kwargs=objects)
        assert drawn.values == tuple(expected[each] for each in which)
        assert lengths.values == tuple(which)
        assert sums.values == tuple(each + 1.0 for each in which)


def test_state_of_one_object_for_several_replicas_is_refused(replicas, num, size, mpi_tmp_path):
    state = ms.PerReplicaState(np.random.default_rng(1))
    _, fits = states_of_replicas(replicas, 1)
    with replicas.scope():
        path = fits.write(mpi_tmp_path / "fits.h5")
        checkpoint = ms.Checkpoint(generator=state)
        if num == size:
            checkpoint.write(mpi_tmp_path / "state.h5")
            return
        with pytest.raises(ValueError, match=f"1 object.* of the {num} replicas"):
            checkpoint.write(mpi_tmp_path / "state.h5")
        with pytest.raises(ValueError, match=f"1 object.* of the {num} replicas"):
            checkpoint.restore(path)
        late = ms.Checkpoint()
        late.restore(path)
        with pytest.raises(ValueError, match=f"1 object.* of the {num} replicas"):
            late.generator = state


def test_batches_are_split_over_replicas(replicas, num, ids):
    dataset = ms.data.Dataset.range(31).batch(10)
    calls = []
    batches = replicas.experimental_distribute_dataset(dataset.map(lambda x: calls.append(0) or x))
    share = -(-10 // num)
    start = 0
    for batch in batches:
        length = min(10, 31 - start)
        part = -(-length // num)
        expected = [
            list(range(start + min(each * part, length), start + min((each + 1) * part, length)))
            for each in ids
        ]
        assert [each.tolist() for each in batch.values] == expected
        start += length
    assert start == 31
    assert share >= 1
    assert len(calls) - 1 == 4 * len(ids)  # once for the shapes
    # In the last batch most replicas have no row.
    sums, counts = replicas.run(lambda x: (x.sum(), len(x)), args=(batch,))
    assert replicas.reduce("sum", sums) == replicas.gather(batch, 0)[0] == 30
    assert replicas.reduce("sum", counts) == 1
    assert replicas.reduce("mean", batch, axis=0) == 30


@pytest.mark.parametrize("policy", ["OFF", "FILE"])
def test_other_ways_to_share_data(replicas, num, ids, policy, mpi_tmp_path, rank):
    if policy == "OFF":
        dataset = ms.data.Dataset.range(2 * num).batch(num)
        expected = [[0]] * len(ids)
    else:
        paths = [mpi_tmp_path / f"{each:02d}.h5" for each in range(num + 1)]
        if rank == 0:
            for number, path in enumerate(paths):
                with h5py.File(path, "w") as file:
                    file["x"] = np.full(2, number)
        replicas.barrier()
        dataset = ms.data.Dataset.from_hdf5(paths).batch(num)
        expected = [[each, each] + [num] * 2 * (each == 0) for each in ids]
    batches = replicas.experimental_distribute_dataset(
        dataset.with_options(auto_shard_policy=ms.data.AutoShardPolicy[policy])
    )
    first, *rest = batches
    leaf = first["x"] if policy == "FILE" else first
    if policy == "FILE":
        parts = [[[*each] for each in batch["x"].values] for batch in (first, *rest)]
        assert [[*itertools.chain(*each)] for each in zip(*parts, strict=True)] == expected
        return
    assert [each[:1].tolist() for each in leaf.values] == expected


def test_contexts_of_replicas(replicas, ids):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    seen = []

    def fn():
        seen.append(variable.get())
        variable.set(replica_id() + 100)
        ms.get_replica_context().barrier()
        assert variable.get() == replica_id() + 100
        in_thread = []
        thread = threading.Thread(target=lambda: in_thread.append(ms.has_strategy()))
        thread.start()
        thread.join()
        assert in_thread == [False]

    def divide():
        with pytest.raises(FloatingPointError):
            np.ones(1) / np.zeros(1)

    with np.errstate(divide="raise"):
        replicas.run(fn)
        replicas.run(divide)
    assert seen == [7] * len(ids)
    assert variable.get() == 7


def test_generators_and_threads_outlive_a_run(replicas, num, ids):
    totals, seen, threads = {}, [], []
    go_on = threading.Event()

    def added_up():
        total = 0
        while True:
            total += ms.get_replica_context().all_reduce("sum", replica_id())
            yield total

    def look():
        go_on.wait(30)
        seen.append((ms.has_strategy(), ms.get_replica_context().replica_id_in_sync_group))

    def fn():
        if replica_id() not in totals:
            totals[replica_id()] = added_up()
            threads.append(threading.Thread(target=look))
            threads[-1].start()
        return next(totals[replica_id()])

    for number in range(1, 4):
        assert replicas.run(fn).values == (number * num * (num - 1) // 2,) * len(ids)
    go_on.set()
    for thread in threads:
        thread.join()
    assert seen == [(False, 0)] * len(ids)
    numbers = iter(ids)  # one that all replicas of the rank take from, in turn
    assert replicas.run(lambda: next(numbers) == replica_id()).values == (True,) * len(ids)


@pytest.mark.parametrize("count", [1, 1000])
def test_one_replica_and_a_thousand(count, size):
    if count < size:
        pytest.skip("some ranks would have no replica")
    strategy = ms.MPIStrategy(device="cpu", num_replicas=count)
    rows = [values_of(each, 3, "f4") for each in range(count)]
    with strategy.scope():
        weight = ms.Variable(np.zeros(3, np.float32))
        sgd = ms.optimizers.SGD(1.0)

    def fn():
        sgd.apply_gradients([(rows[replica_id()], weight)])
        return ms.get_replica_context().all_reduce("max", replica_id())

    assert set(strategy.run(fn).values) == {count - 1}
    assert weight.numpy().tobytes() == (-expected_reduction("sum", rows)).tobytes()
    strategy.close()


def test_batch_norm(replicas, num):
    examples = np.random.default_rng(1).normal(size=(num, 3, 2)).astype(np.float32)
    with replicas.scope():
        norm = ms.layers.BatchNorm(2, synchronized=True)

    def fn():
        y, saved = norm.forward(examples[replica_id()])
        gradient, _ = norm.backward(saved, np.ones_like(y))
        assert gradient.shape == y.shape
        return y

    result = replicas.run(fn)
    flat = examples.reshape(-1, 2).astype(np.float64)
    expected = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-3)
    gathered = replicas.gather(result, 0)
    assert_allclose(gathered, expected, rtol=1e-4, atol=1e-5)
    assert_allclose(norm.moving_mean.numpy(), flat.mean(0) * 0.01, rtol=1e-4)
    y, _ = norm.forward(examples[0], training=False)
    assert y.shape == (3, 2)


def test_a_checkpoint_keeps_the_components(replicas, num, ids, mpi_tmp_path, rank):
    with replicas.scope():
        total = ms.Variable(np.zeros(3, np.float32), synchronization=ON_READ, aggregation=SUM)
    rows = [values_of(each, 3, "f4") for each in range(num)]
    replicas.run(lambda: total.assign(rows[replica_id()]))
    path = ms.Checkpoint(total=total).write(mpi_tmp_path / "state.h5")
    with h5py.File(path) as file:
        assert file["replicas/total"][()].tobytes() == np.stack(rows).tobytes()
        assert file.attrs["num_replicas"] == num
        assert len(file.attrs["arithmetic"]) == 16
    replicas.run(lambda: total.assign(np.zeros(3, np.float32)))
    ms.Checkpoint(total=total).restore(path).assert_consumed()
    assert [each.tobytes() for each in total.values] == [rows[each].tobytes() for each in ids]
    with ms.MPIStrategy(device="cpu", num_replicas=num + 1).scope():
        other = ms.Variable(np.zeros(3, np.float32), synchronization=ON_READ, aggregation=SUM)
    ms.Checkpoint(total=other).restore(path).assert_consumed()
    assert_allclose(other.numpy(), expected_reduction("sum", rows), rtol=1e-6)
    assert len({each.tobytes() for each in other.values}) == 1


def test_replicas_run_in_the_modes_of_pytorch_that_the_caller_has(replicas):
    torch = pytest.importorskip("torch")

    def modes():
        # With a component for each replica, even where they are equal.
        inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return [*inside, torch.is_autocast_enabled("cpu"), torch.ones(1).device.type == "meta"]

    def switched():
        with torch.set_grad_enabled(replica_id() % 2 == 0):
            ms.get_replica_context().barrier()
            return torch.is_grad_enabled()

    ids = replicas.extended.local_replica_ids
    for mode, expected in [
        (torch.no_grad(), [False, False, False, False]),
        (torch.inference_mode(), [False, True, False, False]),
        (torch.autocast("cpu", torch.bfloat16), [True, False, True, False]),
        (torch.device("meta"), [True, False, False, True]),
    ]:
        with mode:
            for found, each in zip(replicas.run(modes), expected, strict=True):
                assert found.values == (each,) * len(ids)
    assert replicas.run(switched).values == tuple(each % 2 == 0 for each in ids)
    replicas.run(lambda: torch.set_grad_enabled(False))
    assert torch.is_grad_enabled()
    assert replicas.run(modes)[0].values == (True,) * len(ids)


def test_replicas_meet_in_the_backward_pass(replicas, num):
    torch = pytest.importorskip("torch")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return ms.get_replica_context().all_reduce("sum", gradient)

    def fn():
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        x.register_hook(lambda gradient: ms.get_replica_context().all_reduce("mean", gradient))
        ((Doubled.apply(y) + x) * replica_id()).sum().backward()
        return x.grad.numpy(), y.grad.numpy()

    for of_x in replicas.run(fn)[0].values:
        assert of_x.tolist() == [(num - 1) / 2] * 3
    for of_y in replicas.run(fn)[1].values:
        assert of_y.tolist() == [num * (num - 1) / 2] * 3
