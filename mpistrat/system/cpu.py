"""CPU cores that this process may use, and CPU cores near a device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_DEVICES = Path("/sys/bus/pci/devices")


def own_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return max(len(own_cores()), 1)


def current_core() -> int | None:
    """Return the core on which this thread runs, or ``None`` if the system cannot bind threads."""
    ask = _sched_getcpu()
    return None if ask is None else int(ask())


@cache
def _sched_getcpu() -> Any:
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.PyDLL(None), "sched_getcpu", None)


def mask_of_cores(cores: Iterable[int]) -> int:
    """Return a bit mask of cores, which is short to send."""
    return sum(1 << core for core in frozenset(cores))


def cores_of_mask(mask: int) -> frozenset[int]:
    """Return the cores whose bits are set in `mask`."""
    return frozenset(core for core in range(mask.bit_length()) if mask >> core & 1)


def parse_core_list(text: str) -> frozenset[int]:
    """Return the cores in a list of Linux, such as ``"0-3,8"``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def cores_near_pci(address: str, devices: Path = _DEVICES) -> frozenset[int]:
    """Return the cores nearest to a PCI device, such as ``"0000:3B:00.0"``, if known."""
    try:
        return parse_core_list((devices / address.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
