"""The machine and the versions that figures belong to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.settings import environment
from mpistrat.version import __version__
from mpistrat.world import World, library_version

__all__ = ["describe_machine"]

_PACKAGES = ("mpi4py", "torch", "h5py", "isal")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def describe_machine(world: World) -> dict[str, Any]:
    """Return what a reader must know to judge a figure, as JSON values. Local."""
    variables = environment()
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count() or 1,
            "architecture": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "threads": {name: variables[name] for name in _THREAD_VARIABLES if name in variables},
        },
        "versions": {
            "mpistrat": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            **_installed(),
        },
        "mpi_library": library_version(),
        "num_ranks": world.size,
        "num_nodes": len(world.hosts),
    }


def _installed() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
