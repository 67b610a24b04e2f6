"""Counts of a process: from /proc while it stands, and from the trace of its system calls."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_OPENS = ("open", "openat", "openat2", "creat")
_LOOKS = (
    *("stat", "lstat", "newfstatat", "fstatat64", "statx", "access", "faccessat", "faccessat2"),
    *("readlink", "readlinkat", "getdents", "getdents64", "getcwd"),
)
TRACED = ("%file", "getdents64", "socket", "connect", "accept", "accept4")
"""Classes and names of the system calls that strace records."""


@dataclass(frozen=True)
class Calls:
    """System calls of one rank, from the start of Python to the end of its work."""

    opens: int
    """Files that it opened, or tried to open."""
    looks: int
    """Calls that only look: whether a file is there, what it is, what a folder has."""
    connects: int
    """Connections that it made or tried to make."""


def read_trace(lines: Iterable[str], mark: str) -> Calls:
    """Return the system calls in the lines of ``strace -f`` above the one with `mark`."""
    counts: Counter[str] = Counter()
    for line in lines:
        if mark in line:
            break
        # A call that another thread interrupts has a second line, which begins with "<...".
        found = re.match(r"(?:\d+\s+)?(\w+)\(", line)
        if found:
            counts[found[1]] += 1
    return Calls(
        sum(counts[name] for name in _OPENS),
        sum(counts[name] for name in _LOOKS),
        counts["connect"],
    )


@dataclass(frozen=True)
class Standing:
    """What a process holds at this moment. Memory is in bytes."""

    descriptors: int
    """Open file descriptors of every kind."""
    sockets: int
    threads: int
    resident: int
    """Memory that is in RAM and mapped, also what other processes map too (RSS)."""
    own: int
    """The same, with each page divided by the number of processes that map it (PSS)."""
    anonymous: int
    """Memory of the process alone, such as Python's objects: the part of `own` of no file."""
    shared: int
    """The part of `own` that is memory shared on purpose: /dev/shm and memfd."""
    page_tables: int
    """Memory of the kernel for the tables of the mapped pages."""
    mapped: dict[str, int]
    """Sizes of the shared memory that it maps, in RAM or not, by name."""


def read_process(pid: int) -> Standing:
    """Return what a running process of this machine holds."""
    root = Path(f"/proc/{pid}")
    names = list(_targets(root / "fd"))
    sums = _fields((root / "smaps_rollup").read_text())
    status = _fields((root / "status").read_text())
    return Standing(
        descriptors=len(names),
        sockets=sum(name.startswith("socket:") for name in names),
        threads=len(list((root / "task").iterdir())),
        resident=sums["Rss"],
        own=sums["Pss"],
        anonymous=sums["Pss_Anon"],
        shared=sums["Pss_Shmem"],
        page_tables=status["VmPTE"],
        mapped=_shared_maps((root / "maps").read_text()),
    )


def _targets(folder: Path) -> Iterator[str]:
    for each in folder.iterdir():
        # A process that reads itself has listed the descriptor of the listing too.
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(each)


def _fields(text: str) -> dict[str, int]:
    """Return the lines ``Name:  12 kB`` of a file of /proc, in bytes."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: 1024 * int(number) for name, number in found}


def _shared_maps(text: str) -> dict[str, int]:
    """Return the sizes of shared memory in the text of ``/proc/PID/maps``, by inode and name."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        bounds, flags, _, device, inode, *name = line.split(maxsplit=5)
        if flags[3] == "s" and name and name[0].startswith(("/dev/shm/", "/memfd:", "/dev/zero")):
            start, _, stop = bounds.partition("-")
            key = f"{device} {inode}"
            sizes[key] = sizes.get(key, 0) + int(stop, 16) - int(start, 16)
    return sizes
