"""`mk.HDF5Dataset` in `fit`, `evaluate` and `predict`: order, positions, refusals."""

import itertools

from task import (
    BATCH,
    ROWS,
    STEPS,
    arrays,
    batches,
    compiled,
    keras,
    mk,
    ms,
    network,
    np,
    raises,
    run,
    torch,
)

mk.init()
strategy = ms.MPIStrategy()
RANK, SIZE = strategy.rank, strategy.size


class Noting(keras.Sequential):
    """Notes the first pixels of the images that it is trained or evaluated on."""

    def train_step(self, data):
        self.seen.append(data[0][:, 0, 0, 0].tolist())
        return super().train_step(data)

    def test_step(self, data):
        self.seen.append(data[0][:, 0, 0, 0].tolist())
        return super().test_step(data)


def noting(built):
    model = Noting(network(built=built).layers)
    model.seen = []
    if built:
        model.build((None, 8, 8, 1))
    return compiled(model)


def expected(dataset, passes):
    """Return the first pixels of this rank's parts, as the strategy distributes them."""
    distributed = strategy.experimental_distribute_dataset(dataset)
    found = []
    for _ in range(passes):
        for image, _ in distributed:
            found.append(image.values[0][:, 0, 0, 0].tolist())
    return found


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def position(data):
    state = data.state_dict()
    return state["pass"], state["batch"]


def check_epochs_are_passes_in_order():
    for built in (True, False):
        for shuffle in (True, False):
            data, model = mk.HDF5Dataset(batches()), noting(built)
            assert len(data) == data.num_batches == STEPS
            model.fit(data, epochs=2, shuffle=shuffle, verbose=0)
            assert position(data) == (2, 0), position(data)
            model.fit(data, epochs=1, shuffle=shuffle, verbose=0)
            assert model.seen == expected(batches(), 3), (built, shuffle)
            assert position(data) == (3, 0)


def check_a_position_is_resumed():
    for built in (True, False):
        data, model = mk.HDF5Dataset(batches()), noting(built)
        data.load_state_dict({**data.state_dict(), "pass": 1, "batch": 3})
        assert len(data) == STEPS - 3
        model.fit(data, epochs=2, verbose=0)
        assert model.seen == expected(batches(), 3)[STEPS + 3 :]
        assert position(data) == (3, 0)
        assert len(data) == STEPS
        data.load_state_dict({**data.state_dict(), "pass": 4, "batch": STEPS})
        assert len(data) == STEPS
        assert position(data) == (5, 0)
        data.set_epoch(7)
        assert position(data) == (7, 0)


def check_steps_per_epoch_continue():
    for dataset in (batches(), batches().repeat()):
        for built in (True, False):
            data, model = mk.HDF5Dataset(dataset), noting(built)
            model.fit(data, epochs=2, steps_per_epoch=STEPS // 2, verbose=0)
            assert model.seen == expected(dataset.take(STEPS), 1), built
    raises(TypeError, "is endless", len, mk.HDF5Dataset(batches().repeat()))


def check_an_epoch_that_is_left_early_counts():
    data, model = mk.HDF5Dataset(batches()), noting(True)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    model.fit(data, epochs=3, verbose=0, callbacks=[Stop()])
    assert position(data) == (0, 2)
    model.fit(data, epochs=1, verbose=0)
    first, second = expected(batches(), 2)[:2], expected(batches(), 2)[STEPS:]
    assert model.seen == first + second
    assert position(data) == (2, 0)


def check_every_row_counts_once():
    """The last batch has 1 row: at most one rank gets it."""
    rows = 2 * BATCH + 1
    image, label = arrays(rows)
    reference = compiled(network())
    whole = reference(torch.as_tensor(image)).detach().numpy()
    log_p = whole - np.log(np.exp(whole).sum(1, keepdims=True))
    right = (whole.argmax(1) == label).mean(), -log_p[np.arange(rows), label].mean()
    data, model = mk.HDF5Dataset(batches(rows, seed=None)), noting(True)
    for _ in range(2):
        model.seen.clear()
        loss, accuracy = model.evaluate(data, verbose=0)
        np.testing.assert_allclose([accuracy, loss], right, rtol=1e-5)
        seen = flat(strategy.gather_objects(flat(model.seen)))
        assert sorted(seen) == sorted(image[:, 0, 0, 0].tolist())
    predicted = model.predict(data, verbose=0)
    rows_of_ranks = [len(each) for each in strategy.gather_objects(predicted)]
    assert sum(rows_of_ranks) == rows
    # The same as validation data, a part of them too, always from the beginning.
    train, fitted = mk.HDF5Dataset(batches()), noting(True)
    history = fitted.fit(train, epochs=2, validation_data=data, verbose=0).history
    assert position(train) == (2, 0)
    after = fitted.evaluate(data, verbose=0)
    np.testing.assert_allclose(history["val_loss"][-1], after[0], rtol=1e-6)
    fitted.seen.clear()
    for _ in range(2):
        fitted.evaluate(data, steps=1, verbose=0)
    assert len(fitted.seen) == 2
    assert fitted.seen[0] == fitted.seen[1]
    if SIZE > 1:
        lost = mk.HDF5Dataset(batches(SIZE - 1, seed=None))
        raises(ms.errors.DataError, f"leaves rank {SIZE - 1} of {SIZE}", model.evaluate, lost)


def check_fields():
    image, label = arrays()
    weight = np.linspace(0, 1, ROWS, dtype=np.float32)
    three = ms.data.Dataset.from_arrays((image, label, weight)).batch(BATCH)
    x, y, w = mk.HDF5Dataset(three)[0]
    assert (x.shape[1:], y.shape[1:], w.dtype) == ((8, 8, 1), (), torch.float32)
    (only,) = mk.HDF5Dataset(ms.data.Dataset.from_arrays(image).batch(BATCH))[0]
    assert only.shape == x.shape
    named = ms.data.Dataset.from_arrays({"a": image, "b": label}).batch(BATCH)
    assert list(mk.HDF5Dataset(named)[0]) == ["a", "b"]
    direct = mk.HDF5Dataset(three)
    assert len(list(direct)) == STEPS
    next(iter(direct))  # which leaves a pass early
    assert len(list(direct)) == STEPS
    assert position(direct) == (3, 0)
    four = ms.data.Dataset.from_arrays((image, label, weight, weight)).batch(BATCH)
    raises(ValueError, "has 4 fields", lambda: mk.HDF5Dataset(four)[0])


def check_mistakes():
    model = noting(True)
    before = model.get_weights()
    short = mk.HDF5Dataset(batches(ROWS + 5))
    raises(ValueError, f"Use batch({BATCH}, drop_remainder=True)", model.fit, short, verbose=0)
    repeated = mk.HDF5Dataset(batches(ROWS + 5).repeat())
    raises(ValueError, "drop_remainder", model.fit, repeated, steps_per_epoch=2, verbose=0)
    model.fit(mk.HDF5Dataset(batches(ROWS + 5, drop_remainder=True)), epochs=0, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), before))
    data = mk.HDF5Dataset(batches())
    raises(ValueError, "needs workers=1", setattr, data, "workers", 2)
    raises(ValueError, "may not communicate", setattr, data, "use_multiprocessing", True)
    raises(ValueError, "needs workers=1", mk.HDF5Dataset, batches(), workers=0)
    raises(ValueError, "being trained on", model.fit, data, validation_data=data, verbose=0)
    raises(TypeError, "", mk.HDF5Dataset, arrays())
    raises(ValueError, "batch", mk.HDF5Dataset, ms.data.Dataset.from_arrays(arrays()))
    stream = ms.data.Dataset.from_generator(lambda: iter(range(8)), ms.data.ArraySpec((), "int64"))
    raises(ValueError, "is unknown", mk.HDF5Dataset, stream.batch(4))
    if SIZE > 1:
        few = mk.HDF5Dataset(batches(ROWS, SIZE - 1 if SIZE == 2 else 4))
        raises(ValueError, f"leaves rank {SIZE - 1}", model.fit, few, verbose=0)
        policy = ms.data.AutoShardPolicy.OFF
        off = batches().with_options(auto_shard_policy=policy)
        raises(ValueError, "Leave out with_options", mk.HDF5Dataset, off)
        found = keras.distribution.distribution()
        found.auto_shard_dataset = True
        raises(ValueError, "auto_shard_dataset=True", model.fit, data, verbose=0)
        found.auto_shard_dataset = False
        uneven = mk.HDF5Dataset(batches(7 * 10, 7, drop_remainder=True))
        with np.testing.suppress_warnings() as seen:
            noted = seen.record(UserWarning, "A global batch of 7 does not divide evenly")
            model.fit(uneven, epochs=2, verbose=0)
        assert len(noted) == 1


def check_an_evaluation_of_unknown_length_cannot_be_uneven():
    """The last of the checks, because it breaks the group."""

    def some_batches():
        for _ in range(3 - (RANK == SIZE - 1)):
            yield arrays(4)

    model = compiled(network())
    evaluate = {"verbose": 0, "callbacks": [mk.Replicas()]}
    if SIZE > 1:
        raises(Exception, "The ranks ", model.evaluate, some_batches(), **evaluate)
    else:
        model.evaluate(some_batches(), **evaluate)


if __name__ == "__main__":
    run(*(each for name, each in list(globals().items()) if name.startswith("check_")))
