"""``python -m mpistrat.doctor.hdf5_probe``: load h5py, and print what it is built of.

In a process of its own, because h5py built against another MPI library than mpi4py may end it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys

from mpistrat.cuda_awareness.evidence import loaded_files
from mpistrat.doctor.facts import mpi_libraries
from mpistrat.hdf5 import h5py

__all__ = ["main"]


def main() -> int:
    """Print the facts as JSON, and return an exit code. Local."""
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module(
            "mpi4py.MPI"
        )  # its library first; a variable keeps it from starting
    of_mpi4py = mpi_libraries(loaded_files())
    module = h5py()
    facts = {
        "h5py": module.version.version,
        "hdf5": module.version.hdf5_version,
        "is_parallel": bool(module.get_config().mpi),
        "of_mpi4py": of_mpi4py,
        "of_h5py": [each for each in mpi_libraries(loaded_files()) if each not in of_mpi4py],
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
