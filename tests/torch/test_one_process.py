"""HDF5Dataset in one process without a group: fields of all forms, views of them, positions."""

import itertools
import json

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import mpistrat as ms  # noqa: E402
import mpistrat.torch as mst  # noqa: E402
from mpistrat import nests  # noqa: E402

Dataset, Field = ms.data.Dataset, ms.data.Field
NUM = 23
FIELDS = {
    "group": "data/demo_*/x",
    "label": Field("data/demo_*", attribute="label"),
    "bytes": "bytes",
    "text": "text",
    "name": "name",
    "energy": "events/energy",
    "trial": Field("trials", axis=-1),
}


@pytest.fixture
def path(tmp_path):
    """A file in whose every field the number of the example can be seen."""
    assert not dist.is_initialized()
    path = tmp_path / "all.h5"
    events = np.zeros(NUM, [("energy", "f4"), ("other", "i8")])
    events["energy"] = np.arange(NUM) / 2
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("bytes", (NUM,), h5py.vlen_dtype(np.uint8))
        for number in range(NUM):
            file[f"data/demo_{number}/x"] = np.full((number % 4, 2), number, np.float32)
            file[f"data/demo_{number}"].attrs["label"] = number
            rows[number] = np.full(number % 3, number)
        file["text"] = ["é" * (number % 5) for number in range(NUM)]
        file["name"] = np.array([f"{number}" for number in range(NUM)], "S2")
        file["events"] = events
        file["trials"] = np.arange(3 * NUM).reshape(3, NUM)
    return path


def ragged(path):
    return Dataset.from_hdf5(path, FIELDS).shuffle(4).ragged_batch(5)


def check(batch):
    """Assert that all fields are of the examples that the labels say, and return these."""
    numbers = batch["label"].tolist()
    for name, length in (("group", 4), ("bytes", 3)):
        tensor = batch[name]
        assert tensor.layout == torch.jagged
        found = torch.repeat_interleave(batch["label"], tensor.offsets().diff())
        assert tensor.offsets().tolist() == [0, *np.cumsum([n % length for n in numbers]).tolist()]
        values = tensor.values() if name == "bytes" else tensor.values()[:, 1]
        assert values.tolist() == found.tolist()
    assert batch["group"].dtype == torch.float32
    assert batch["bytes"].dtype == torch.uint8
    assert isinstance(batch["text"], np.ndarray)
    assert batch["text"].tolist() == ["é" * (n % 5) for n in numbers]
    assert batch["text"].dtype == f"<U{max(1, *(n % 5 for n in numbers))}"
    assert batch["name"].tolist() == [str(n).encode() for n in numbers]
    assert batch["energy"].tolist() == [n / 2 for n in numbers]
    assert batch["trial"].tolist() == [[n, NUM + n, 2 * NUM + n] for n in numbers]
    return numbers


@pytest.mark.parametrize(
    "wrap", [lambda dataset: dataset, lambda d: DataLoader(d, batch_size=None)]
)
def test_fields_of_all_forms(path, wrap):
    dataset = mst.HDF5Dataset(ragged(path))
    assert dataset.strategy is None
    assert dataset.num_batches == 5
    expected = [batch["label"].tolist() for batch in ragged(path)]
    loader = wrap(dataset)
    first, second = ([check(batch) for batch in loader] for _ in range(2))
    assert first == expected
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(NUM))
    assert first != second


def test_padded_batches_are_plain_tensors(path):
    fields = ("data/demo_*/x", "bytes", FIELDS["label"])
    batches = Dataset.from_hdf5(path, fields).padded_batch(6, ((None, 2), (4,), ()), (-1.0, 0, 0))
    for group, data, label in mst.HDF5Dataset(batches):
        lengths = label % 4
        assert group.shape == (len(label), int(lengths.max()), 2)
        assert ((group >= 0).sum(1)[:, 0] == lengths).all()
        assert data.shape == (len(label), 4)
        assert (data.sum(1) == label * (label % 3)).all()


VIEWS = {
    "cache": lambda d: d.map(lambda n: 2 * n, num_parallel_calls=2).cache("1 MiB").shuffle(1),
    "zip": lambda d: Dataset.zip((d.shuffle(1), d)),
    "concatenate": lambda d: d.concatenate(d.shuffle(2)),
    "filter": lambda d: d.shuffle(3).filter(lambda n: n % 3 > 0),
    "select": lambda d: d.select([5, -1, 5, 0, 7, 8, 9, 2]).shuffle(3),
    "window": lambda d: d.window(4, stride=2).shuffle(3),
    "sample": lambda d: d.sample(np.arange(NUM), seed=1),
    "mixture": lambda d: Dataset.sample_from_datasets([d, d.shuffle(1)], seed=3),
    "enumerate": lambda d: d.shuffle(1).enumerate(3),
    "ignore_errors": lambda d: d.shuffle(1).ignore_errors(),
}


def lists(nest):
    return nests.map_nest(lambda leaf: leaf.tolist(), nest)


@pytest.mark.parametrize("name", VIEWS)
def test_positions_of_views(path, name):
    def make():
        return mst.HDF5Dataset(VIEWS[name](Dataset.from_hdf5(path, FIELDS["label"])).batch(3))

    dataset = make()
    first, second = ([lists(batch) for batch in dataset] for _ in range(2))
    plain = VIEWS[name](Dataset.from_hdf5(path, FIELDS["label"])).batch(3)
    assert first == [lists(batch) for batch in plain]
    dataset.set_epoch(1)
    seen = list(itertools.islice(dataset, 2))
    assert all(isinstance(leaf, torch.Tensor) for leaf in nests.flatten(seen)[0])
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state["batch"] == 2
    other = make()
    other.load_state_dict(state)
    assert [lists(batch) for batch in seen] + [lists(batch) for batch in other] == second


def test_a_position_within_ragged_batches(path, tmp_path):
    dataset = mst.HDF5Dataset(ragged(path))
    whole = [check(batch) for batch in dataset]
    dataset.set_epoch(0)
    assert [check(batch) for batch in itertools.islice(dataset, 3)] == whole[:3]
    ms.Checkpoint(batches=dataset).write(tmp_path / "position.h5")
    other = mst.HDF5Dataset(ragged(path))
    ms.Checkpoint(batches=other).restore(tmp_path / "position.h5").assert_consumed()
    assert [check(batch) for batch in other] == whole[3:]
