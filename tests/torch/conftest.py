"""Tests of the room `torch`: skipped as a whole where PyTorch is not installed."""

import gc
import importlib
import importlib.util
import os

import pytest

from tests.helpers import outside_mpiexec

collect_ignore = outside_mpiexec("test_one_process.py", "test_safetensors.py")
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


def world_group(backend):
    """Yield the world group of torch, and destroy it. **Collective**."""
    dist = importlib.import_module("torch.distributed")
    before = dict(os.environ)
    group = importlib.import_module("mpistrat.torch").init(backend=backend)
    # Programs that other tests launch must not take the variables of this one for theirs.
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    yield group
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world():
    """The world group of torch, for the tests of one file. **Collective**."""
    yield from world_group("mpistrat")


@pytest.fixture(scope="module")
def gloo(world):
    """All ranks of the world over gloo. **Collective**."""
    dist = importlib.import_module("torch.distributed")
    yield dist.new_group(backend="gloo")
    # Models are in circles. One that drops the group later would have gloo join its threads while
    # Python's lock is held, for which these may wait.
    gc.collect()
    dist.barrier()
