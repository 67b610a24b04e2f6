"""One training step of the digits network: through the whole package, and written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpistrat.bench.digits import (
    LEARNING_RATE,
    MOMENTUM,
    Batch,
    backward,
    cross_entropy,
    first_weights,
    forward,
)
from mpistrat.metrics import Accuracy, Mean
from mpistrat.optimizers import SGD
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import Strategy, get_replica_context
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HandwrittenLoop", "Loop", "PackageLoop"]


class Loop(Protocol):
    """A training loop, data aside: each step learns from the same batch."""

    def step(self) -> None:
        """Make one step. **Collective**."""

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn, equal on all ranks. Local."""


class PackageLoop:
    """The step of ``jobs/train_digits.py``: strategy, variables, optimizer and metrics.

    **Collective**.

    Parameters
    ----------
    strategy : Strategy
    batch : Batch
    """

    def __init__(self, strategy: Strategy, batch: Batch) -> None:
        self._strategy, self._batch = strategy, batch
        with strategy.scope():
            self._variables = [
                Variable(weight, name=f"weight{i}") for i, weight in enumerate(first_weights())
            ]
            self._optimizer = SGD(LEARNING_RATE, momentum=MOMENTUM)
            self._loss, self._accuracy = Mean(name="loss"), Accuracy(name="accuracy")

    def step(self) -> None:
        """Make one step. **Collective**."""
        self._strategy.run(self._train, args=(self._batch.image, self._batch.label))

    def _train(self, image: np.ndarray, label: np.ndarray) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        weights = self.weights()
        logits, tape = forward(weights, image)
        losses, error = cross_entropy(logits, label)
        global_batch_size = int(replica.all_reduce(ReduceOp.SUM, len(label)))
        gradients = backward(weights, tape, error / global_batch_size)
        self._optimizer.apply_gradients(zip(gradients, self._variables, strict=True))
        self._loss.update_state(losses)
        self._accuracy.update_state(label, logits.argmax(axis=1))

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn. Local."""
        return [variable.value() for variable in self._variables]


class HandwrittenLoop:
    """The same on mpi4py and NumPy, with one ``Allreduce`` for each array, and no checks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    batch : Batch
    """

    def __init__(self, comm: MPI.Intracomm, batch: Batch) -> None:
        self._comm, self._batch = comm, batch
        self._weights = first_weights()
        self._velocities = [np.zeros_like(weight) for weight in self._weights]
        self._sums = [np.empty_like(weight) for weight in self._weights]
        self._global_batch_size = np.zeros(1, np.int64)
        self.loss_sum, self.num_examples, self.num_correct = 0.0, 0, 0

    def step(self) -> None:
        """Make one step. **Collective**."""
        label = self._batch.label
        logits, tape = forward(self._weights, self._batch.image)
        losses, error = cross_entropy(logits, label)
        self._comm.Allreduce(np.array([len(label)]), self._global_batch_size)
        gradients = backward(self._weights, tape, error / np.float32(self._global_batch_size[0]))
        for gradient, total in zip(gradients, self._sums, strict=True):
            self._comm.Allreduce(gradient, total)
        for weight, velocity, total in zip(
            self._weights, self._velocities, self._sums, strict=True
        ):
            velocity *= MOMENTUM
            total *= LEARNING_RATE
            velocity += total
            weight -= velocity
        self.loss_sum += float(losses.sum())
        self.num_examples += len(label)
        self.num_correct += int((logits.argmax(axis=1) == label).sum())

    def weights(self) -> list[np.ndarray]:
        """Return kernel and bias of each layer in turn. Local."""
        return self._weights
