"""Training of an elastic strategy, which ends with a digest of all that came out."""

import hashlib
import os
import sys
import time

import numpy as np
from mpi4py import MPI  # noqa: F401  starts MPI, which outlives no loss before

import mpistrat as ms
from mpistrat import hdf5
from mpistrat.checkpoint.async_save import Snapshot
from mpistrat.elastic.job import ElasticJob

print("started", flush=True)
ELASTIC = "elastic" in sys.argv
VICTIM, WHERE, COUNT = os.environ.get("VICTIM", "-1,,0").split(",")
VICTIM = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)) == int(VICTIM)


def dies(where, function):
    """Return `function` with the death of this rank, in the call `COUNT`, `where` it is named."""
    calls = [0]

    def with_death(*arguments):
        calls[0] += 1
        if VICTIM and where == WHERE and calls[0] == int(COUNT):
            os.kill(os.getpid(), 9)
        result = function(*arguments)
        if VICTIM and f"after {where}" == WHERE and calls[0] == int(COUNT):
            os.kill(os.getpid(), 9)
        return result

    return with_death


ElasticJob._agree = dies("agree", ElasticJob._agree)
ElasticJob._without_lost = dies("shrink", ElasticJob._without_lost)
if "slow" in sys.argv:
    fast = Snapshot.write
    Snapshot.write = lambda *arguments: (time.sleep(0.5), fast(*arguments))
Snapshot.write = dies("write", Snapshot.write)
hdf5.replace_file = dies("rename", hdf5.replace_file)

strategy = ms.MPIStrategy(num_replicas=12, elastic=ELASTIC)
rng = np.random.default_rng(1)
with strategy.scope():
    hidden = ms.Variable((rng.standard_normal((64, 16)) / 8).astype(np.float32), name="hidden")
    head = ms.Variable((rng.standard_normal((16, 10)) / 4).astype(np.float32))
    adam = ms.optimizers.Adam(learning_rate=1e-3)
    loss, accuracy = ms.metrics.Mean(name="loss"), ms.metrics.Accuracy(name="accuracy")


def step(image, label):
    replica = ms.get_replica_context()
    x = image.reshape(-1, 64).astype(np.float32) / 16
    h = np.tanh(x @ hidden.value())
    keep = (replica.rng(7, int(adam.iterations.value())).random(h.shape) < 0.8) / np.float32(0.8)
    logits = (h * keep) @ head.value()
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    truth = (label[:, None] == np.arange(10)).astype(np.float32)
    error = (p - truth) / int(replica.all_reduce("sum", len(label)))
    back = (error @ head.value().T) * keep * (1 - h * h)
    adam.apply_gradients([(x.T @ back, hidden), ((h * keep).T @ error, head)])
    losses = -np.log((p * truth).sum(axis=1) + 1e-9)
    loss.update_state(losses)
    accuracy.update_state(label, logits.argmax(axis=1))
    return losses.sum()


data = ms.data.Dataset.from_hdf5("data/digits.h5", ("train/image", "train/label"))
data = data.shuffle(seed=0).batch(100)


def of_replica(context):
    def own(*batch):
        size = -(-len(batch[0]) // context.num_input_pipelines)
        start = size * context.input_pipeline_id
        return tuple(each[start : start + size] for each in batch)

    return data.map(own)


if "function" in sys.argv:
    batches = strategy.distribute_datasets_from_function(of_replica)
else:
    batches = strategy.experimental_distribute_dataset(data)
checkpoint = ms.Checkpoint(
    hidden=hidden, head=head, adam=adam, loss=loss, accuracy=accuracy, batches=batches
)
manager = ms.CheckpointManager(
    checkpoint, "runs/elastic", max_to_keep=2, asynchronous="asynchronous" in sys.argv
)
manager.restore_or_initialize()
digest = hashlib.sha256()
for _ in range(2):
    for batch in batches:
        total = strategy.run(step, args=batch)
        digest.update(strategy.reduce("sum", total).tobytes())
    digest.update(np.float64([loss.result(), accuracy.result()]).tobytes())
    print("saved", os.path.basename(manager.save(step=int(adam.iterations.numpy()))), flush=True)
    loss.reset_state()
    accuracy.reset_state()
for each in (hidden, head, adam.iterations, adam.slot(head, "second_moment")):
    digest.update(each.numpy().tobytes())
print("digest", digest.hexdigest(), flush=True)
if "waits" in sys.argv:
    manager.wait()
    print("kept", *map(os.path.basename, manager.checkpoints), flush=True)
if "closes" in sys.argv:
    if VICTIM:
        os.kill(os.getpid(), 9)
    strategy.close()
elif WHERE == "end" and VICTIM:
    os.kill(os.getpid(), 9)
print("done", flush=True)
