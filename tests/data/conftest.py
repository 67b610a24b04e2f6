"""HDF5 files to read, and ranks of a group that need not exist."""

import contextlib
from dataclasses import dataclass

import h5py
import numpy as np
import pytest

from mpistrat.arrays import Device
from mpistrat.data.distribute import distribute
from mpistrat.layout import Layout
from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec(
    "test_combinations.py",
    "test_compositions.py",
    "test_dataset.py",
    "test_distributed_dataset.py",
    "test_numbering.py",
    "test_order.py",
    "test_pipeline.py",
    "test_random.py",
    "test_user_source.py",
)


@dataclass(frozen=True)
class Group:
    """What splitting needs to know of a rank: it communicates only to compare data sets."""

    rank: int
    size: int
    is_elastic = False

    def as_unit(self, what, function):
        return function()

    def agree(self, *details):
        """Agree with nobody."""

    @property
    def layout(self):
        return Layout(self.size, self.rank)

    def all_or_none(self, kind, name=None):
        return contextlib.nullcontext()

    def call(self, kind, name=None):
        return contextlib.nullcontext(self)

    def exchange(self, value):
        return [value] * self.size

    def on_all(self, work, kind):
        return [work()] * self.size

    def on_root(self, work, kind):
        return work()

    def broadcast_json(self, value, root=0, kind="broadcast_json"):
        return value

    def gather_json(self, value, kind="gather_json"):
        return [value] * self.size


@pytest.fixture
def all_ranks():
    """Return a function that distributes a data set over `size` ranks, a result for each."""

    def distribute_to_all(dataset, size, options=None):
        device = Device("cpu")
        return [distribute(dataset, options, Group(rank, size), device) for rank in range(size)]

    return distribute_to_all


@pytest.fixture
def streamed(monkeypatch):
    """Small files are read like large ones: no field of them is cached."""
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)


@pytest.fixture
def numbered(tmp_path):
    """Return a function that writes n examples whose image and label tell their number."""

    def write(n, chunk=None, name="data.h5", first=0, **options):
        label = np.arange(first, first + n)
        chunks = (min(chunk, n), 3) if chunk and n else None
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            image = np.repeat(label[:, None], 3, axis=1).astype(np.float32)
            file.create_dataset("image", data=image, chunks=chunks, **options)
            file.create_dataset("label", data=label)
        return path

    return write
