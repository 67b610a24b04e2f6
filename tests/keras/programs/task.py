"""What the programs share: Keras on PyTorch, data of digits, and small models."""

import os
import re

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpistrat as ms
import mpistrat.keras as mk

ROWS, BATCH = 96, 12
STEPS = ROWS // BATCH
"""Batches of a pass."""


def arrays(rows=ROWS):
    rng = np.random.default_rng(7)
    image = rng.random((rows, 8, 8, 1), dtype=np.float32)
    label = (image.sum((1, 2, 3)) * 3).astype(np.int64) % 10
    return image, label


def batches(rows=ROWS, batch=BATCH, seed=3, **options):
    dataset = ms.data.Dataset.from_arrays(arrays(rows))
    dataset = dataset if seed is None else dataset.shuffle(seed)
    return dataset.batch(batch, **options)


def raises(kind, text, call, *arguments, **options):
    """Check that a call raises an error of this kind with this text."""
    with pytest.raises(kind, match=re.escape(text)):
        call(*arguments, **options)


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def network(*, dropout=(), normalize=False, built=True):
    """Return a convolutional network with the same weights on every rank."""
    keras.utils.set_random_seed(5)
    layers = [keras.Input((8, 8, 1))] if built else []
    layers += [keras.layers.Conv2D(4, 3, activation="relu")]
    layers += [keras.layers.BatchNormalization()] if normalize else []
    layers += [keras.layers.Flatten(), *dropout, keras.layers.Dense(10)]
    return keras.Sequential(layers)


def compiled(model, optimizer="adam", **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def weights_of(model):
    return np.concatenate([each.ravel() for each in model.get_weights()])


def assert_same_on_all_ranks(value):
    found = [None] * rank_and_size()[1]
    if len(found) > 1:
        dist.all_gather_object(found, value)
        assert all(np.array_equal(each, found[0]) for each in found), found


class At(keras.callbacks.Callback):
    """Calls a function after one of the steps, counted from 1 on over all epochs."""

    def __init__(self, step, do):
        super().__init__()
        self.step, self.do, self.count = step, do, 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.count == self.step:
            self.do()


def run(*checks):
    """Run the checks, each with its name in front of what it raises."""
    for check in checks:
        try:
            check()
        except BaseException as error:
            error.add_note(f"in {check.__name__} on rank {rank_and_size()[0]}")
            raise
    print("is done", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


__all__ = [
    "BATCH",
    "ROWS",
    "STEPS",
    "At",
    "arrays",
    "assert_same_on_all_ranks",
    "batches",
    "compiled",
    "dist",
    "keras",
    "mk",
    "ms",
    "network",
    "np",
    "raises",
    "rank_and_size",
    "run",
    "torch",
    "weights_of",
]
