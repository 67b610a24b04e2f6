"""`fit` on several ranks learns what one process learns from the global batches.

parallel.py reference FILE    on one process, which writes what it has learnt
parallel.py compare FILE      on several ranks
"""

import os
import sys

from task import (
    BATCH,
    ROWS,
    arrays,
    assert_same_on_all_ranks,
    batches,
    compiled,
    dist,
    keras,
    mk,
    network,
    np,
    raises,
    rank_and_size,
    torch,
    weights_of,
)

import mpistrat as ms


def rows_of_rank():
    """Return this rank's rows: of each global batch its part."""
    rank, size = rank_and_size()
    own = np.arange(ROWS).reshape(-1, size, BATCH // size)[:, rank].reshape(-1)
    return tuple(each[own] for each in arrays())


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        predicted = (self.ddp_model or self)(x)
        loss = self.compute_loss(y=y, y_pred=predicted)
        self.zero_grad()
        loss.backward()
        variables = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        self._loss_tracker.update_state(loss.detach(), sample_weight=len(x))
        return self.compute_metrics(x, y, predicted)


def decayed():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9)
    return keras.optimizers.AdamW(schedule, global_clipnorm=0.5)


def fitted(optimizer, *, own_step=False, policy=None, **options):
    """Return weights and history after `fit` on this rank's rows, with `validation_data`."""
    if policy is not None:
        keras.config.set_dtype_policy(policy)
    model = network(normalize=False)
    if own_step:
        model = OwnStep(model.layers)
        model.build((None, 8, 8, 1))
    compiled(model, optimizer)
    keras.config.set_dtype_policy("float32")
    own, size = rows_of_rank(), rank_and_size()[1]
    options = {"validation_data": own, **options}
    history = model.fit(
        *own, BATCH // size, 2, shuffle=False, verbose=0, validation_batch_size=4, **options
    )
    assert_same_on_all_ranks(weights_of(model))
    return {"weights": weights_of(model), **history.history}, model


def with_callbacks():
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=10, factor=0.5)
    found, model = fitted("sgd", callbacks=[stopping, plateau, mk.Replicas()])
    found |= {"stopped": stopping.stopped_epoch, "rate": float(model.optimizer.learning_rate)}
    return found


def tested():
    """Return what `evaluate`, `train_on_batch` and `predict` return."""
    _, model = fitted("sgd")
    own, size = rows_of_rank(), rank_and_size()[1]
    predicted = np.concatenate(gathered(model.predict(own[0], verbose=0)))
    found = {"evaluated": model.evaluate(*own, verbose=0)}
    part = BATCH // size
    found["on batch"] = [model.train_on_batch(*(each[:part] for each in own)) for _ in range(3)]
    return {**found, "predicted": np.sort(predicted.reshape(-1))}


def divided_by_keras():
    """Batch i of a PyDataset goes to rank i mod N."""
    image, label = arrays()

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            part = slice(index * 8, index * 8 + 8)
            return image[part], label[part]

    count = rank_and_size()[1]
    if count == 1:  # the batches that 2 or 3 ranks take together
        found = {}
        for ranks in (2, 3):
            joined = compiled(network(), "sgd")
            joined.fit(image, label, 8 * ranks, 1, shuffle=False, verbose=0)
            found[f"weights of {ranks}"] = weights_of(joined)
        return found
    keras.distribution.distribution().auto_shard_dataset = True
    model = compiled(network(), "sgd")
    model.fit(Data(), epochs=1, shuffle=False, verbose=0)
    keras.distribution.distribution().auto_shard_dataset = False
    return {f"weights of {count}": weights_of(model)}


def from_files():
    """`mk.HDF5Dataset`, with all that a tutorial has."""
    train, test = mk.HDF5Dataset(batches()), mk.HDF5Dataset(batches(41, 10, seed=None))
    model = compiled(network(), keras.optimizers.Adam(0.01))
    history = model.fit(
        train, epochs=2, validation_data=test, verbose=0, callbacks=[mk.Replicas()]
    ).history
    return {"weights": weights_of(model), **history, "evaluated": model.evaluate(test, verbose=0)}


def gathered(value):
    found = [None] * rank_and_size()[1]
    if len(found) == 1:
        return [value]
    dist.all_gather_object(found, value)
    return found


SGD = keras.optimizers.SGD
CASES = {
    "momentum": lambda: fitted(SGD(0.05, momentum=0.9))[0],
    "decayed": lambda: fitted(decayed())[0],
    "accumulated": lambda: fitted(SGD(0.05, gradient_accumulation_steps=2))[0],
    "bfloat16": lambda: fitted("sgd", policy="mixed_bfloat16")[0],
    "float16": lambda: fitted("sgd", policy="mixed_float16")[0],
    "own step": lambda: fitted("sgd", own_step=True)[0],
    "callbacks": with_callbacks,
    "tested": tested,
    "divided by Keras": divided_by_keras,
    "from files": from_files,
}


def model_parallel():
    """A layer is divided among the ranks."""
    size = rank_and_size()[1]
    names = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, size), ("batch", "model"), names)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, "model")
    before = keras.distribution.distribution()
    divided = keras.distribution.ModelParallel(layout_map=layouts, auto_shard_dataset=False)
    keras.distribution.set_distribution(divided)
    try:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4 * size)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(1).random((8, 4), dtype=np.float32)
        y = np.ones((8, 4 * size), np.float32)
        first = model.evaluate(x, y, verbose=0)
        model.fit(x, y, 8, 3, verbose=0)
        assert model.evaluate(x, y, verbose=0) < first
        kernel = model.layers[0].kernel.value
        assert kernel.to_local().shape == (4, 4)
        path = os.path.abspath("divided.h5")
        ms.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        whole = kernel.full_tensor().detach().numpy()
        model.layers[0].kernel.assign(np.zeros_like(whole))
        ms.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_consumed()
        assert np.array_equal(model.layers[0].kernel.value.full_tensor().detach(), whole)
        raises(NotImplementedError, "ModelParallel", model.fit, x, y, callbacks=[mk.Replicas()])
        data = ms.data.Dataset.from_arrays((x, y)).batch(8)
        if size > 1:
            shards = mk.HDF5Dataset(data)
            raises(ValueError, "has 1 data shards", model.fit, shards, verbose=0)
    finally:
        keras.distribution.set_distribution(before)


def main(command, path):
    if command == "reference":
        found = {
            f"{case}: {name}": value
            for case, learn in CASES.items()
            for name, value in learn().items()
        }
        np.savez(path, **found)
        return
    mk.init()
    assert keras.distribution.distribution().auto_shard_dataset is False
    with np.load(path) as stored:
        expected = dict(stored)
    for case, learn in CASES.items():
        half = case in ("bfloat16", "float16")
        for name, value in learn().items():
            key = f"{case}: {name}"
            tolerance = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 2e-5, "atol": 2e-6}
            np.testing.assert_allclose(value, expected.pop(key), **tolerance, err_msg=key)
    (other,) = expected
    assert other.startswith("divided by Keras: weights of")
    model_parallel()
    print("is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
