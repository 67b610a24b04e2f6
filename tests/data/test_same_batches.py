"""Global batches are the same at any number of ranks, in any run and in any version."""

import hashlib
import json

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch

GOLDEN = {
    "files": "957746ae",
    "endless": "658d0127",
    "generator": "9485178e",
}
"""Digests of all batches. One that changes is another order: then raise `_ORDER_VERSION` in
`mpistrat.data.fingerprint`, because positions in checkpoints would lead elsewhere."""


def write_files(folder):
    """Write two files of different lengths and chunks; the label is the number of the example."""
    first = 0
    for name, length, chunk in (("a.h5", 500, 16), ("b.h5", 231, 7)):
        label = np.arange(first, first + length)
        with h5py.File(folder / name, "w") as file:
            image = np.repeat(label[:, None], 6, axis=1).astype(np.int16)
            file.create_dataset("in/image", data=image, chunks=(chunk, 6), compression="gzip")
            file.create_dataset("in/label", data=label, chunks=(4 * chunk,))
        first += length
    return str(folder / "*.h5")


def augmented(image, label):
    # Raw bits, which NumPy promises to keep.
    noise = np.int64(ms.data.example_rng().bit_generator.random_raw() % 1000)
    return {"image": image + label, "label": label, "noise": noise}


def data_set(kind, pattern):
    fields = ("in/image", "in/label")
    if kind == "generator":
        spec = (ms.data.ArraySpec((6,), np.int16), ms.data.ArraySpec((), np.int64))
        rows = ((np.full(6, n), n) for n in range(731))
        elements = list(rows)
        source = ms.data.Dataset.from_generator(lambda: elements, spec).shuffle(1, window=100)
    else:
        source = ms.data.Dataset.from_hdf5(pattern, fields).skip(3).shuffle(5)
    if kind == "endless":
        source = source.repeat()
    mapped = source.map(augmented, seed=2).batch(48).prefetch(2)
    return mapped.take(40) if kind == "endless" else mapped


def global_batches(strategy, batches):
    """Yield the global batches as lists of labels, with the digest of all that they hold."""
    for element in batches:
        whole = {key: strategy.gather(value, axis=0) for key, value in element.items()}
        assert (whole["image"] == 2 * whole["label"][:, None]).all()
        text = json.dumps([whole[key].tolist() for key in sorted(whole)])
        yield whole["label"].tolist(), hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("kind", GOLDEN)
def test_batches_are_those_of_every_run(strategy, rank, kind, mpi_tmp_path):
    if rank == 0:
        write_files(mpi_tmp_path)
    strategy.gather(np.zeros(1), axis=0)  # the files are there
    dataset = data_set(kind, str(mpi_tmp_path / "*.h5"))
    batches = strategy.experimental_distribute_dataset(dataset)
    found = list(global_batches(strategy, batches))
    labels = [label for batch, _ in found for label in batch]
    if kind == "endless":
        assert len(labels) == 40 * 48
        assert sorted(labels[:728]) == list(range(3, 731))
    else:
        assert sorted(labels) == list(range(0 if kind == "generator" else 3, 731))
    digest = hashlib.sha256("".join(each for _, each in found).encode()).hexdigest()
    assert digest[:8] == GOLDEN[kind]


PROGRAM = """
import json, sys
import mpistrat as ms
from tests.data.test_same_batches import data_set, global_batches

folder, action = sys.argv[1:]
strategy = ms.MPIStrategy(device="cpu")
found = {}
for kind in ("files", "endless", "generator"):
    batches = strategy.experimental_distribute_dataset(data_set(kind, folder + "/*.h5"))
    checkpoint = ms.Checkpoint(batches=batches)
    path = f"{folder}/{kind}.checkpoint"
    if action == "begin":
        numbered = zip(range(7), global_batches(strategy, batches))
        found[kind] = [digest for _, (_, digest) in numbered]
        checkpoint.write(path)
    else:
        checkpoint.restore(path).assert_consumed()
        found[kind] = [digest for _, digest in global_batches(strategy, batches)]
if strategy.cluster_resolver.task_id == 0:
    print(json.dumps(found))
"""


@pytest.mark.launches
def test_a_pass_begun_on_three_ranks_goes_on_on_two(tmp_path):
    pattern = write_files(tmp_path)
    parts = [
        launch.run(["-c", PROGRAM, tmp_path, action], ranks, limit_s=60)
        for action, ranks in (("begin", 3), ("go on", 2))
    ]
    begun, rest = (json.loads(done.stdout) for done in parts)
    alone = ms.OneDeviceStrategy("cpu:0")
    for kind in GOLDEN:
        batches = alone.experimental_distribute_dataset(data_set(kind, pattern))
        expected = [digest for _, digest in global_batches(alone, batches)]
        assert begun[kind] == expected[:7]
        assert rest[kind] == expected[7:]
