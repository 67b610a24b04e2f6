"""`Trainer` of Hugging Face: checkpoints in HDF5 by which `train` resumes on any number of ranks.

Importing this module imports neither transformers nor PyTorch, and does not start MPI.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpistrat.transformers.checkpoint import HDF5Checkpoint

__all__ = ["HDF5Checkpoint"]


def __getattr__(name: str) -> Any:
    if name != "HDF5Checkpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.checkpoint").HDF5Checkpoint
