"""A program as a user writes it, checked by mypy and pyright, never run.

Each line with a comment that ignores an error must be refused: both programs complain where there
is nothing to ignore.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import mpistrat as ms

Floats = npt.NDArray[np.float32]
Anything = npt.NDArray[Any]
"""An array of any dtype: reductions may change it."""

strategy = ms.MPIStrategy(device="cpu")


# Values and strategies


def component(context: ms.ValueContext) -> Floats:
    return np.full(3, context.replica_id_in_sync_group, np.float32)


def step(x: Floats) -> Floats:
    return x * 2


def loss(x: Floats) -> float:
    return float(x.sum())


def write(x: Floats) -> None:
    del x


def both(x: Floats) -> tuple[Floats, float]:
    return x, 1.0


values = strategy.experimental_distribute_values_from_function(component)
assert_type(values, ms.PerReplica[Floats])
assert_type(values.values, tuple[Floats, ...])
assert_type(strategy.experimental_local_results(values), tuple[Floats, ...])
assert_type(strategy.run(step, args=(values,)), ms.PerReplica[Floats])
assert_type(strategy.run(loss, args=(values,)), ms.PerReplica[float])
assert_type(strategy.run(both, args=(values,)), Any)
strategy.run(lambda: np.float32(1))
strategy.run(write, args=(values,))

assert_type(strategy.reduce("SUM", values), Anything)
assert_type(strategy.reduce(ms.ReduceOp.MEAN, values, axis=0), Anything)
assert_type(strategy.reduce("mean", strategy.run(loss, args=(values,))), np.number[Any])
assert_type(strategy.reduce("max", 1.5), np.number[Any])
assert_type(strategy.reduce("min", {"loss": values}), Any)
assert_type(strategy.gather(values, axis=0), Anything)
assert_type((strategy.rank, strategy.size, strategy.local_rank), tuple[int, int, int])
assert_type(strategy.is_chief, bool)
assert_type(strategy.gather_objects({"rank": strategy.rank}), list[Any])
assert_type(strategy.broadcast_object(None, root=1), Any)
strategy.barrier()
ms.print("loss", 0.5, sep=": ", flush=False)
ms.print("loss", color="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
strategy.rank = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
with strategy.scope() as entered:
    assert_type(entered, ms.Strategy)

strategy.reduce("AVG", values)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
strategy.gather(values, axis="rows")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
larger = values + 1  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
number: ms.PerReplica[int] = values  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
strategy.run(step, options="fast")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
strategy.experimental_run(step, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ms.MirroredStrategy()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
strategy.extended.collectives  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
strategy.extended.variable_numbers  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

ms.CommunicationOptions(wire_dtype="bfloat16", timeout_seconds=5)
ms.CommunicationOptions(wire_dtype="float8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ms.CommunicationOptions(implementation="NCCL")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# Variables

with strategy.scope():
    weights = ms.Variable(np.zeros(3, np.float32), name="weights")
    made = ms.Variable(lambda: np.zeros(3), dtype="float64")
    total = ms.Variable(
        0.0,
        synchronization=ms.VariableSynchronization.ON_READ,
        aggregation=ms.VariableAggregation.SUM,
    )

assert_type(weights, ms.Variable)
assert_type(weights.value(), Anything)
assert_type(weights.numpy(), Anything)
assert_type(weights.assign(np.ones(3)), Anything | None)
assert_type(weights.shape, tuple[int, ...])
weights.assign_add(values)
weights.assign_sub(made)
weights.scatter_add(ms.IndexedSlices([1.0], [0]))
np.testing.assert_array_equal(weights, made)
doubled = weights * 2

weights.assign(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
weights.scatter_add(np.ones(3))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
weights.name = "other"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
weights.memory  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
ms.Variable(0.0, synchronization="ON_READ")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ms.Variable(0.0, aggregation=ms.ReduceOp.SUM)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

mirrored: ms.Mirrored[Anything] = strategy.extended.broadcast_to(np.ones(2), destinations=weights)
(copy,) = mirrored.values
mean_of_both = float((mirrored + 1).mean()) + float(mirrored)
is_two = mirrored == 2.0
np.testing.assert_array_equal(np.asarray(mirrored), np.asarray(values))
strategy.extended.reduce_to("SUM", values, destinations="cpu:0")
strategy.extended.reduce_to("SUM", values, destinations=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
strategy.extended.reduce_to("sun", values, destinations=weights)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# In replica context


def replica_step(x: Floats) -> Floats:
    replica = ms.get_replica_context()
    assert replica is not None
    assert_type(replica.replica_id_in_sync_group, int)
    assert_type(replica.all_reduce("SUM", x), Anything)
    assert_type(replica.all_reduce("MEAN", 1), np.number[Any])
    assert_type(replica.all_reduce("MAX", {"x": x}), dict[str, Floats])
    assert_type(replica.all_reduce("SUM", ms.IndexedSlices([1.0], [0])), ms.IndexedSlices)
    assert_type(replica.all_gather(x, axis=0), Anything)
    pending = replica.start_all_reduce("SUM", [x, x])
    assert_type(pending.wait(), list[Floats])
    assert_type(replica.all_gather_object(x), list[Any])
    replica.barrier()
    assert_type(ms.gradients.all_reduce_pullback("SUM", x, x, x), Anything)

    replica.all_reduce("AVG", x)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    replica.all_gather(x)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    replica.on_new_child  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return x


# Metrics, layers and checkpoints

mean = ms.metrics.Mean()
mean.update_state([1.0, 2.0], sample_weight=weights)
mean.update_state(values)
mean.update_state(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
assert_type(mean.result(), np.float64)
layer = ms.layers.BatchNorm(3)
y, saved = layer.forward(np.ones((2, 3), np.float32))
gradient, pairs = layer.backward(saved, y)
ms.optimizers.SGD(0.1).apply_gradients(pairs)
assert_type(ms.optimizers.AdamW(0.1, weight_decay=0.01), ms.optimizers.Adam)
try:
    strategy.reduce("SUM", 1)
except ms.errors.CollectiveTimeoutError as timeout:
    assert_type(timeout, ms.errors.CollectiveTimeoutError)
layer.backward(y, y)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

checkpoint = ms.Checkpoint(weights=weights, mean=mean)
assert_type(checkpoint.write("file.h5"), str)
checkpoint.restore("file.h5").assert_consumed()
dataset = ms.data.Dataset.range(8).batch(4)
for batch in strategy.experimental_distribute_dataset(dataset):
    strategy.run(step, args=(batch,))
dataset.pipeline  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
