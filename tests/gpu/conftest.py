"""Strategies whose replicas compute on GPUs. Without a GPU these tests are skipped.

They pass on a machine with one GPU, which the ranks share, and with the stand-in for CuPy:
``PYTHONPATH=tests/standin FAKE_CUPY_GPUS=2``.
"""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cuda_api import count_gpus

_ANYWHERE = ("test_real_cupy.py", "test_stopped_ranks.py")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU and cupy")
    for item in items:
        if "tests/gpu/" in str(item.path) and item.path.name not in _ANYWHERE:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skip)


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARE_GPUS", "on")
    strategy = ms.MPIStrategy(device="gpu")
    yield strategy
    strategy.close()


@pytest.fixture
def hosts():
    strategy = ms.MPIStrategy(device="cpu")
    yield strategy
    strategy.close()


@pytest.fixture
def to_device(gpus):
    xp = gpus.extended.xp
    return lambda array: xp.asarray(np.asarray(array))
