"""Which MPI libraries a process has loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = ["mpi_libraries"]

# Open MPI, MPICH, Intel MPI and MVAPICH are libmpi.so; Cray's name has the compiler in it.
_NAME = re.compile(r"libmpi(ch)?(_(gnu|cray|intel|nvidia|amd|aocc)\w*)?\.so[.\d]*")


def mpi_libraries(files: Iterable[str]) -> list[str]:
    """Return the MPI libraries among `files`, with links followed. Local."""
    found = (each for each in files if _NAME.fullmatch(os.path.basename(each)))
    return sorted({os.path.realpath(each) for each in found})
