"""PyTorch over MPI: a backend of torch.distributed.

Importing this registers the backend ``mpistrat`` and the rendezvous ``mpi://``. It does not start
MPI.
"""

import importlib
from typing import TYPE_CHECKING, Any

import mpistrat_torch_autoload
from mpistrat.torch.datasets import HDF5Dataset
from mpistrat.torch.launching import Options, init, set_environment, strategy
from mpistrat.torch.module_drift import assert_replicas_agree
from mpistrat.torch.safetensors import export_safetensors, import_safetensors

if TYPE_CHECKING:
    from mpistrat.torch.dcp import HDF5Writer
    from mpistrat.torch.dcp_reader import HDF5Reader

__all__ = [
    "HDF5Dataset",
    "HDF5Reader",
    "HDF5Writer",
    "Options",
    "assert_replicas_agree",
    "export_safetensors",
    "import_safetensors",
    "init",
    "set_environment",
    "strategy",
]

mpistrat_torch_autoload.autoload()

# They need torch.distributed.checkpoint, whose import takes as long as all other imports here.
_LAZY = {"HDF5Reader": "mpistrat.torch.dcp_reader", "HDF5Writer": "mpistrat.torch.dcp"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
