"""PyTorch over MPI: a backend of torch.distributed.

Importing this registers the backend ``mpistrat`` and the rendezvous ``mpi://``. It starts no MPI.
"""

import mpistrat_torch_autoload
from mpistrat.torch.datasets import HDF5Dataset
from mpistrat.torch.drift import assert_replicas_agree
from mpistrat.torch.launching import Options, init, set_environment, strategy
from mpistrat.torch.safetensors import export_safetensors, import_safetensors

__all__ = [
    "HDF5Dataset",
    "Options",
    "assert_replicas_agree",
    "export_safetensors",
    "import_safetensors",
    "init",
    "set_environment",
    "strategy",
]

mpistrat_torch_autoload.autoload()
