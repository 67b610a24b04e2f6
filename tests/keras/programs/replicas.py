"""`mk.Replicas` and `mk.on_root`, and checkpoints of Keras's objects."""

import doctest
import os

import h5py
from task import (
    arrays,
    assert_same_on_all_ranks,
    compiled,
    dist,
    keras,
    mk,
    ms,
    network,
    np,
    raises,
    rank_and_size,
    run,
    torch,
    weights_of,
)

from mpistrat.keras.training import mixed, seed_of_rank

mk.init()
RANK, SIZE = rank_and_size()
FOLDER = os.path.abspath("files")


def gathered(value):
    found = [None] * SIZE
    dist.all_gather_object(found, value)
    return found


def own_rows(rows=24):
    image, label = arrays(rows)
    return image[RANK::SIZE], label[RANK::SIZE]


class Masks(keras.layers.Layer):
    """Keeps which of many ones two dropouts have kept."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.seen = first, second, []

    def call(self, x, training=False):
        if training:
            ones = torch.ones(64)
            self.seen.append([(d(ones, training=True) > 0).tolist() for d in self.inner()])
        return x

    def inner(self):
        return self.first, self.second


def masks_of(callbacks, steps=3, seed=5):
    layer = Masks(keras.layers.Dropout(0.5), keras.layers.Dropout(0.5, seed=11))
    model = compiled(network(dropout=[layer]))
    keras.utils.set_random_seed(seed)
    layer.seen.clear()
    model.fit(*own_rows(8 * steps), 8 // SIZE, 1, shuffle=False, verbose=0, callbacks=callbacks)
    assert_same_on_all_ranks(torch.get_rng_state().numpy())  # loaders may use it between steps
    return layer.seen[-steps:]


def check_masks_differ_between_ranks_and_steps_and_are_the_same_in_each_run():
    masks = masks_of([mk.Replicas()])
    flat = [tuple(mask) for step in masks for mask in step]
    of_ranks = [mask for rank in gathered(flat) for mask in rank]
    assert len(set(of_ranks)) == len(of_ranks)
    assert masks_of([mk.Replicas(), mk.Replicas()]) == masks
    assert masks_of([mk.Replicas()], seed=6)[0][0] != masks[0][0]
    plain = gathered(masks_of([])[0][1])
    assert plain[0] == plain[-1]  # why Replicas is there


def check_seeds_mix_all_bits():
    near = [seed_of_rank(seed, rank) for seed in range(200) for rank in range(1, 9)]
    assert len(set(near)) == len(near)
    assert min(np.diff(np.sort(near))) > 0
    assert all(-(2**31) <= seed < 2**31 for seed in near)
    differing = np.array([bin(mixed(1, k) ^ mixed(1, k + 1)).count("1") for k in range(500)])
    assert 30 < differing.mean() < 34
    assert differing.min() > 10


def check_moving_statistics_are_means():
    def statistics(model):
        layer = model.layers[1]
        return np.concatenate([layer.moving_mean.numpy(), layer.moving_variance.numpy()])

    alone = compiled(network(normalize=True), "sgd")
    alone.fit(*own_rows(), 4, 1, shuffle=False, verbose=0)
    of_ranks = gathered(statistics(alone))
    model = compiled(network(normalize=True), "sgd")
    seen = []
    note = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: seen.append(statistics(model)))
    validation = (*own_rows(),)
    callbacks = [mk.Replicas(), note]
    options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
    model.fit(*own_rows(), 4, 1, validation_data=validation, **options)
    np.testing.assert_allclose(seen[0], np.mean(of_ranks, 0), rtol=1e-5)
    assert_same_on_all_ranks(weights_of(model))
    # Outside of `fit` too; and a frozen network stays the same to the bit.
    model.layers[1].moving_mean.assign(np.full(4, RANK, np.float32))
    kernel = model.layers[0].kernel.numpy()
    model.layers[0].trainable = False
    model.evaluate(*own_rows(), verbose=0, callbacks=[mk.Replicas()])
    assert np.array_equal(model.layers[1].moving_mean, np.full(4, (SIZE - 1) / 2, np.float32))
    assert np.array_equal(model.layers[0].kernel, kernel)


def check_different_numbers_of_batches_are_named():
    if SIZE == 1:
        return
    rows = 4 * (3 - (RANK == SIZE - 1))
    x, y = (each[:rows] for each in arrays())
    others = "rank 0 has 3" if SIZE == 2 else f"ranks 0-{SIZE - 2} have 3"
    said = f"The ranks have different numbers of batches: {others}, rank {SIZE - 1} has 2."
    model = compiled(network())
    before = weights_of(model)
    options = {"verbose": 0, "callbacks": [mk.Replicas()]}
    raises(ms.errors.DataError, said, model.fit, x, y, 4, **options)
    raises(ms.errors.DataError, said, model.evaluate, x, y, 4, **options)
    same = [each[:8] for each in arrays()]
    uneven = {"validation_data": (x, y), "validation_batch_size": 4}
    assert np.array_equal(weights_of(model), before)
    raises(ms.errors.DataError, said, model.fit, *same, 4, **uneven, **options)

    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index):
            return x[:4], y[:4]

    steps = {"steps": 3 - (RANK == SIZE - 1)}
    raises(ms.errors.DataError, said, model.evaluate, Endless(), **steps, **options)
    assert_same_on_all_ranks(weights_of(model))


def check_on_root():
    path = os.path.join(FOLDER, "log.csv")
    os.makedirs(FOLDER, exist_ok=True)
    csv = mk.on_root(keras.callbacks.CSVLogger(path))
    assert csv.filename == path
    best = mk.on_root(keras.callbacks.ModelCheckpoint(os.path.join(FOLDER, "best.keras")))
    model = compiled(network())
    model.fit(*own_rows(), 4, 2, verbose=0, callbacks=[csv, best])
    dist.barrier()
    with open(path) as file:
        assert [line.split(",")[0] for line in file] == ["epoch", "0", "1"]
    saved = keras.models.load_model(os.path.join(FOLDER, "best.keras"))
    assert np.array_equal(weights_of(saved), weights_of(model))
    refused = (
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.SwapEMAWeights(),
        keras.callbacks.BackupAndRestore("backup"),
        keras.callbacks.TerminateOnNaN(),
        mk.Replicas(),
        mk.HDF5Checkpoint("files/x"),
    )
    for each in refused:
        raises(ValueError, f"on_root cannot take {type(each).__name__}", mk.on_root, each)
    raises(TypeError, "expected a keras.callbacks.Callback", mk.on_root, print)
    with np.testing.assert_raises(TypeError):
        mk.HDF5Checkpoint("files/x", data=own_rows())
    for freq in ("batch", 0):
        raises(ValueError, "save_freq", mk.HDF5Checkpoint, "files/x", save_freq=freq)
    raises(TypeError, "callbacks must hold", mk.HDF5Checkpoint, "files/x", callbacks=[1])


def check_files_follow_the_structure():
    os.makedirs(FOLDER, exist_ok=True)
    path = os.path.join(FOLDER, "model.h5")
    network(), network()  # so that Keras's running numbers differ from those below
    model = compiled(network(normalize=True), keras.optimizers.AdamW(1e-3))
    model.fit(*own_rows(), 4, 1, verbose=0, callbacks=[mk.Replicas()])
    ms.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    with h5py.File(path) as file:
        found = set()
        file["variables"].visit(found.add)
        kernel = file["variables/model/layers/dense/vars/0"][()]
    assert np.array_equal(kernel, model.layers[-1].kernel)
    assert {"model/layers/batch_normalization/vars/3", "optimizer/vars/0"} <= found
    assert not any("optimizer" in each for each in found if each.startswith("model/"))
    other = compiled(network(normalize=True), keras.optimizers.AdamW(1e-3))
    other.optimizer.built = False  # as before the first `fit`
    other.optimizer = keras.optimizers.AdamW(1e-3)
    other.layers[-1].kernel.assign(other.layers[-1].kernel * 0)
    status = ms.Checkpoint(optimizer=other.optimizer, model=other).restore(path)
    status.assert_consumed()
    assert np.array_equal(weights_of(other), weights_of(model))
    for ours, theirs in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        assert np.array_equal(ours, theirs), ours.path
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations) > 0

    wider = compiled(keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(5, 3)]))
    mismatch = ms.errors.CheckpointMismatchError
    restore = ms.Checkpoint(model=wider).restore
    key, stored, own = "model/layers/conv2d/vars/0", "(3, 3, 1, 4)", "(3, 3, 1, 5)"
    raises(mismatch, key, restore, path)
    raises(
        mismatch, f"float32 of shape {stored} in the file, float32 of shape {own}", restore, path
    )
    before = weights_of(wider)
    raises(mismatch, "model/layers/dense/vars/0", restore, path)
    assert np.array_equal(before, weights_of(wider))
    unbuilt = ms.Checkpoint(model=keras.Sequential([keras.layers.Dense(2)]))
    raises(ValueError, "Begin it with keras.Input(shape)", unbuilt.write, path)
    alone = ms.Checkpoint(optimizer=keras.optimizers.SGD())
    raises(ValueError, "Pass the checkpoint the compiled model too", alone.write, path)
    dist.barrier()


def check_subclasses_and_variables_are_saved():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = {"a": [keras.layers.Dense(2), keras.layers.Dense(2)]}
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
            self.wrapped = torch.nn.Linear(2, 2)

        def call(self, x):
            for block in self.blocks["a"]:
                x = block(x)
            return self.wrapped(x) * self.scale

    def made():
        keras.utils.set_random_seed(1)
        model = Own()
        model(np.ones((1, 3), np.float32))
        return model

    model, counter = made(), keras.Variable(3.0)
    model.scale.assign(2.0)
    path = os.path.join(FOLDER, "own.h5")
    ms.Checkpoint(model=model, counter=counter).write(path)
    other, back = made(), keras.Variable(0.0)
    other.blocks["a"][1].kernel.assign(np.zeros((2, 2)))
    ms.Checkpoint(model=other, counter=back).restore(path).assert_consumed()
    assert float(other.scale) == 2
    assert float(back) == 3
    assert np.array_equal(other.blocks["a"][1].kernel, model.blocks["a"][1].kernel)
    dist.barrier()


def check_drift_is_reported():
    if SIZE == 1:
        return
    model = compiled(network())
    model.layers[-1].bias.assign(np.full(10, RANK, np.float32))
    write = ms.Checkpoint(model=model).write
    path = os.path.join(FOLDER, "drift.h5")
    raises(ms.errors.ReplicaDriftError, "model/layers/dense/vars/1", write, path, drift="raise")
    dist.barrier()


def check_a_rank_that_leaves_a_wrapped_callback_is_named():
    """`on_root` must not let rank 0 stop alone."""

    class Stopping(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    model = compiled(network())
    fit = {"verbose": 0, "callbacks": [mk.on_root(Stopping())]}
    if RANK == 0:
        raises(RuntimeError, "Stopping has stopped the training", model.fit, *own_rows(), 4, **fit)
    else:
        model.fit(*own_rows(), 4, **fit)


def check_the_examples_of_the_docstrings_run():
    if RANK == 0:
        os.makedirs("data", exist_ok=True)
        with h5py.File("data/digits.h5", "w") as file:
            file["train/image"] = np.zeros((128, 8, 8), np.uint8)
            file["train/label"] = np.zeros(128, np.uint8)
    dist.barrier()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    names = {"np": np, "ms": ms, "mk": mk, "keras": keras}
    for name in ("HDF5Dataset", "HDF5Checkpoint", "Replicas", "on_root"):
        (test,) = doctest.DocTestFinder(recurse=False).find(getattr(mk, name), globs=names)
        runner.run(test)
        dist.barrier()
    assert runner.tries > 15
    assert not runner.failures


def check_uneven_rows_end_a_fit_without_replicas():
    """The last of the checks, because it breaks the group."""
    if SIZE > 1:
        rows = 4 * (3 - (RANK == SIZE - 1))
        x, y = (each[:rows] for each in arrays())
        model = compiled(network())
        raises(
            RuntimeError, "The ranks made different collective calls", model.fit, x, y, 4, verbose=0
        )


if __name__ == "__main__":
    run(*(each for name, each in list(globals().items()) if name.startswith("check_")))
