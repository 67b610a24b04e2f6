"""Tests of Keras on several ranks: skipped where Keras 3.16 or newer is not installed.

Each program of Keras, PyTorch and MPI takes 5 s to start, so a program has many checks.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest


def missing():
    """Return why Keras cannot be tested here, ``None`` if it can."""
    if find_spec("torch") is None:
        return "needs PyTorch"
    for package in ("keras-nightly", "keras"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        numbers = [int(each) for each in found.split(".")[:2]]
        return None if numbers >= [3, 16] else f"needs Keras 3.16 or newer, and this is {found}"
    return "needs Keras 3.16 or newer"


def pytest_collection_modifyitems(config, items):
    reason = missing()
    of_keras = [item for item in items if "tests/keras/" in item.path.as_posix()]
    for item in of_keras if reason is not None else ():
        item.add_marker(pytest.mark.skip(reason=reason))
