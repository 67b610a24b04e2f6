"""Keras over MPI: `model.fit` on several ranks, with data from HDF5 and checkpoints in HDF5.

Keras must run on PyTorch: set ``KERAS_BACKEND=torch``. Importing this module imports neither Keras
nor PyTorch, and does not start MPI.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mpistrat.keras.requirements import load_keras as _load_keras

if TYPE_CHECKING:
    from mpistrat.keras.checkpoint import HDF5Checkpoint
    from mpistrat.keras.datasets import HDF5Dataset
    from mpistrat.keras.replicas import Replicas
    from mpistrat.keras.root_callbacks import on_root
    from mpistrat.keras.starting import init

__all__ = ["HDF5Checkpoint", "HDF5Dataset", "Replicas", "init", "on_root"]

_LATER = {
    "HDF5Checkpoint": "checkpoint",
    "HDF5Dataset": "datasets",
    "Replicas": "replicas",
    "init": "starting",
    "on_root": "root_callbacks",
}
"""Names that need Keras, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Keras without the right backend looks for TensorFlow, whose absence says nothing of the cause.
    _load_keras()
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
