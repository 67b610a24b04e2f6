"""What speaks for CUDA-awareness without trying it: each source has been wrong somewhere.

The library's own query says no in builds of Open MPI where UCX moves device memory all the same
(open-mpi/ompi#7963), and yes in builds of MVAPICH where it is switched off. So claims only decide
whether a trial is worth its seconds.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat.cuda_awareness.answer import Evidence
from mpistrat.settings import environment

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "ask_library",
    "gather_claims",
    "list_libraries",
    "list_switches",
    "loaded_files",
    "read_memory_kinds",
]

_MPIX_GPU_SUPPORT_CUDA = 0  # as in MPICH's mpi.h

_SWITCHES = {
    "I_MPI_OFFLOAD": "Intel MPI",
    "MPICH_GPU_SUPPORT_ENABLED": "Cray MPICH",
    "MPIR_CVAR_ENABLE_GPU": "MPICH",
    "MV2_USE_CUDA": "MVAPICH2",
    "MVP_ENABLE_GPU": "MVAPICH-Plus",
    "MVP_USE_CUDA": "MVAPICH",
    "OMPI_MCA_opal_cuda_support": "Open MPI",
    "PSP_CUDA": "ParaStation MPI",
}
"""Variables that switch GPU support on and off, and whose they are."""

_OFF = {"", "0", "disable", "false", "n", "no", "off"}

_GPU_PARTS = re.compile(
    r"libmpi_gtl_cuda|libuc[tm]_cuda|libucc_\w+_cuda|mca_(accelerator|btl|coll|common)_(sm)?cuda"
)
"""Parts of MPI libraries and of UCX that are loaded for CUDA's memory alone."""


def gather_claims(comm: MPI.Intracomm) -> list[Evidence]:
    """Return what the library and the environment of this process say. Local; starts MPI."""
    from mpi4py import MPI

    try:
        # The symbols of the MPI library are found through the extension that is linked to it.
        library: Any = ctypes.CDLL(MPI.__file__)
    except OSError:
        library = None
    info = comm.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    return [
        ask_library(library),
        read_memory_kinds(kinds),
        list_switches(environment()),
        list_libraries(loaded_files()),
    ]


def ask_library(library: Any) -> Evidence:
    """Return what the query of an MPI library says. Local; MPI must run.

    Parameters
    ----------
    library : ctypes.CDLL or None
    """
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        return _evidence(query() == 1, "MPIX_Query_cuda_support says")
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is not None:
        supported = ctypes.c_int(0)
        failed = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(supported))
        return _evidence(not failed and supported.value == 1, "MPIX_GPU_query_support says")
    return Evidence(False, "the MPI library has no query for CUDA support")


def _evidence(is_claim: bool, words: str) -> Evidence:
    return Evidence(is_claim, f"{words} {'yes' if is_claim else 'no'}")


def read_memory_kinds(kinds: str | None) -> Evidence:
    """Return what the kinds of memory of a communicator say (MPI 4.1, section 11.4.3). Local.

    Parameters
    ----------
    kinds : str or None
        The info value, such as ``"mpi,system,cuda:device"``.
    """
    if kinds is None:
        return Evidence(False, "the communicator has no mpi_memory_alloc_kinds (MPI 4.1)")
    named = [kind.strip().lower() for kind in kinds.split(",")]
    is_claim = not {"cuda", "cuda:device"}.isdisjoint(named)
    return Evidence(is_claim, f"mpi_memory_alloc_kinds is {kinds}")


def list_switches(variables: Mapping[str, str], names: Iterable[str] = _SWITCHES) -> Evidence:
    """Return which of the variables `names` switch GPU support on or off. Local."""
    found = {name: variables[name] for name in names if name in variables}
    if not found:
        return Evidence(False, "no variable switches GPU support on")
    is_claim = any(value.strip().lower() not in _OFF for value in found.values())
    spelt = (f"{name}={value} ({_SWITCHES[name]})" for name, value in found.items())
    return Evidence(is_claim, f"set: {', '.join(spelt)}")


def list_libraries(files: Iterable[str]) -> Evidence:
    """Return which of the loaded `files` are there for device memory alone. Local."""
    names = sorted({Path(file).name for file in files if _GPU_PARTS.search(Path(file).name)})
    if not names:
        return Evidence(False, "no part of MPI or UCX for CUDA is loaded")
    return Evidence(True, f"loaded: {', '.join(names)}")


def loaded_files() -> list[str]:
    """Return the files that are mapped into this process. Local."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    # address, permissions, offset, device and inode come before the path, which may hold blanks.
    fields = (line.split(maxsplit=5) for line in lines)
    return [each[5] for each in fields if len(each) == 6]
