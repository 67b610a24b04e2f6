"""Checks of h5py, HDF5 and the folder for checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.cuda_awareness import loaded_files
from mpistrat.doctor.facts import Finding, mpi_libraries
from mpistrat.hdf5 import h5py
from mpistrat.mpi.launcher import without_launcher
from mpistrat.settings import environment
from mpistrat.system.processes import Program

_LIMIT_S = 60.0
_PROBE = "from mpistrat.doctor.storage import print_hdf5_versions as run; run()"
_MISSING = "it does not exist"
_NOWHERE = "the folder that this process works in has been removed"


@dataclass(frozen=True)
class HDF5Facts:
    """Facts about how h5py was built."""

    versions: Mapping[str, Any]
    """Output of `print_hdf5_versions`; empty if that failed."""
    error: str = ""


def probe_hdf5() -> HDF5Facts:
    """Load h5py in a child process, and return how it was built."""
    # If h5py was built with a different MPI library than mpi4py, it may end the process.
    variables = without_launcher() | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MPI4PY_RC_INITIALIZE": "0",
    }
    child = Program([sys.executable, "-c", _PROBE], variables)
    try:
        code = child.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return HDF5Facts({}, f"it did not load within {_LIMIT_S:.0f} s")
    for line in reversed(child.stdout().splitlines()):
        with contextlib.suppress(ValueError):
            return HDF5Facts(json.loads(line))
    lines = [line for line in child.stderr().splitlines() if line.strip()]
    return HDF5Facts({}, lines[-1] if code > 0 and lines else f"signal {-code}")


def print_hdf5_versions() -> None:
    """Print as JSON how h5py was built, and which MPI libraries it and mpi4py load."""
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module("mpi4py.MPI")  # MPI4PY_RC_INITIALIZE keeps MPI from starting
    of_mpi4py = mpi_libraries(loaded_files())
    module = h5py()
    versions = {
        "h5py": module.version.version,
        "hdf5": module.version.hdf5_version,
        "is_parallel": bool(module.get_config().mpi),
        "of_mpi4py": of_mpi4py,
        "of_h5py": [each for each in mpi_libraries(loaded_files()) if each not in of_mpi4py],
    }
    print(json.dumps(versions), flush=True)


def check_hdf5(facts: HDF5Facts) -> Finding:
    """Return the finding about h5py and the MPI library that it was built with."""
    if facts.error:
        return Finding.problem(
            "hdf5",
            f"h5py cannot be loaded: {facts.error}",
            "Datasets and checkpoints are HDF5 files.",
            "pip install --force-reinstall h5py (or conda install h5py)",
        )
    found = facts.versions
    seen = f"h5py {found['h5py']}, HDF5 {found['hdf5']}"
    if found["of_h5py"]:
        of_mpi4py = ", ".join(found["of_mpi4py"]) or "none"
        return Finding.problem(
            "hdf5",
            f"{seen} with MPI: h5py loads {', '.join(found['of_h5py'])}, mpi4py {of_mpi4py}",
            "Two MPI libraries in one process get each other's calls, so jobs crash or hang.",
            "pip install --force-reinstall --no-deps --only-binary=h5py h5py (built without MPI, "
            "which is enough), or build it with the MPI of mpi4py: CC=mpicc HDF5_MPI=ON "
            "pip install --force-reinstall --no-deps --no-binary=h5py h5py",
        )
    if found["is_parallel"]:
        return Finding.ok("hdf5", f"{seen} with MPI, the same library as mpi4py's", seen)
    return Finding.ok("hdf5", f"{seen} without MPI, which is enough", seen)


@dataclass(frozen=True)
class FolderFacts:
    """Whether files in a folder can be written and locked from one node."""

    path: str
    node: str
    error: str = ""
    """Why no file can be written there; empty if one can."""
    lock_error: str = ""
    """Why files there cannot be locked; empty if they can."""


def probe_folder(path: str, node: str) -> FolderFacts:
    """Write, flush, lock, rename and remove a small file in a folder. This does not raise."""
    folder = Path(path)
    try:
        own = FolderFacts(os.path.abspath(path), node)
    except OSError:  # the working directory of a relative path is gone
        return FolderFacts(path, node, _NOWHERE)
    if not folder.is_dir():
        what = "it is not a folder" if folder.exists() else _MISSING
        return FolderFacts(own.path, node, what)
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".mpistrat-doctor-")
    except OSError as error:
        return FolderFacts(own.path, node, error.strerror or str(error))
    final = f"{name}.renamed"
    try:
        os.write(handle, b"mpistrat")
        os.fsync(handle)
        lock_error = _try_lock(handle, name)
        os.replace(name, final)
    except OSError as error:
        return FolderFacts(own.path, node, error.strerror or str(error))
    finally:
        os.close(handle)
        for each in (name, final):
            with contextlib.suppress(OSError):
                os.unlink(each)
    return FolderFacts(own.path, node, "", lock_error)


def _try_lock(handle: int, name: str) -> str:
    """Return why a file cannot be locked in the way of HDF5, or an empty string."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    # flock belongs to an open file (flock(2)), so a lock through a second open file must fail.
    second = os.open(name, os.O_RDWR)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ""
    finally:
        os.close(second)
    return "a second lock is granted"


def _remedy(facts: FolderFacts) -> str:
    if facts.error == _NOWHERE:
        return "cd to a folder that exists"
    path = shlex.quote(facts.path)
    if facts.error == _MISSING:
        return f"mkdir -p {path}"
    return f"ls -ld {path} and df {path} show its owner and the free space"


def check_folder(facts: Sequence[FolderFacts]) -> Finding:
    """Return the finding about writing checkpoints to a folder."""
    for each in facts:
        if each.error:
            return Finding.problem(
                "folder",
                f"{each.path} cannot be written on {each.node}: {each.error}",
                "Checkpoints cannot be saved there.",
                f"{_remedy(each)}, or use a different one: mpistrat doctor --folder DIR",
            )
    switch = environment().get("HDF5_USE_FILE_LOCKING", "").upper()
    for each in facts:
        if each.lock_error and switch not in ("FALSE", "BEST_EFFORT"):
            return Finding.warning(
                "folder",
                f"files in {each.path} can be written, but not locked on {each.node}: "
                f"{each.lock_error}",
                "HDF5 locks the files that it opens, and may fail to open them.",
                "export HDF5_USE_FILE_LOCKING=FALSE, on a file system without locks",
            )
    where = f" on {len(facts)} nodes" if len(facts) > 1 else ""
    folder = f"files in {facts[0].path} can be written"
    if switch == "FALSE":
        return Finding.ok("folder", f"{folder} and renamed{where}; HDF5 does not lock files")
    return Finding.ok("folder", f"{folder}, renamed and locked{where}")
