"""Tries CUDA-aware MPI in child programs, and agrees on one answer for all ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Device
from mpistrat.cuda_awareness import (
    Answer,
    CudaAwareness,
    Evidence,
    Outcome,
    Trial,
    gather_claims,
    judge,
    weigh,
)
from mpistrat.mpi.launcher import without_launcher
from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.mpi.world import World
from mpistrat.system.processes import Program

if TYPE_CHECKING:
    from mpi4py import MPI

_LIMIT_S = 60.0
_PATIENCE_S = 5.0
"""How long to wait for a killed process. A process that hangs in a driver does not end."""

_LENGTH = 200
"""Most characters that are shown of a line printed by a child."""

_REPORT = {"exchange": str, "num_processes": int, "text": str}
"""Keys of a report, and the types of their values."""

_FROM_OUTSIDE = {"SIGHUP", "SIGINT", "SIGTERM", "SIGKILL"}
"""Signals that other processes send, so that the exchange is not the cause."""


def exchange_command(device_index: int, memory: str, limit_s: float) -> list[str]:
    """Return the command for one process of the exchange."""
    return [
        *(sys.executable, "-m", "mpistrat.cuda_awareness"),
        *("--memory", memory, "--device", str(device_index)),
        *("--limit", str(math.ceil(limit_s))),
    ]


@functools.cache
def try_exchange(
    device_index: int, memory: str = "device", limit_s: float = _LIMIT_S
) -> tuple[Trial, ...]:
    """Exchange memory between two child processes, or within one if that fails. Cached."""
    # Only tests of this function use host memory.
    end = time.monotonic() + limit_s
    command = exchange_command(device_index, memory, limit_s)
    try:
        # Use child processes: a library that reads device memory as host memory crashes, and must
        # not end this rank.
        trials = [run_trial([*mpiexec(2, limit_s), *command], end - time.monotonic())]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        trials = [Trial(Outcome.OPEN, f"no exchange between two processes: {error}")]
    remaining_s = end - time.monotonic()
    if trials[0].outcome is Outcome.OPEN and remaining_s > 0:
        trials.append(run_trial(command, remaining_s))
    return tuple(trials)


def run_trial(command: Sequence[str], limit_s: float) -> Trial:
    """Run a command that does the exchange, and return its result. This does not raise."""
    try:
        program = Program(command, _variables())
    except (OSError, ValueError, TypeError) as error:
        return Trial(Outcome.OPEN, f"the exchange could not be started: {error}")
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = program.wait(limit_s)
    finally:
        if code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.kill(_PATIENCE_S)
    return _read(program, code, limit_s)


def _variables() -> dict[str, str]:
    """Return the environment of a child: this process's, without variables of the launcher."""
    # Set PYTHONPATH, so that the child imports the same packages from the same places.
    return without_launcher() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _read(program: Program, code: int | None, limit_s: float) -> Trial:
    """Return the result of an exchange from the reports and the exit code of its program."""
    reports = _reports(program.stdout())
    stages = {report["exchange"]: report for report in reports}
    num_processes = min((report["num_processes"] for report in reports), default=0)
    who = _count(num_processes)
    # Check this first: a child that has reported wrong numbers may hang, or end in any way.
    if "failed" in stages:
        text = f"an exchange {who} failed: {stages['failed']['text']}"
        return Trial(Outcome.FAILED, text, num_processes)
    if code is None:
        text = f"an exchange {who} did not end within {limit_s:.0f} s"
        return Trial(Outcome.OPEN, text, num_processes)
    if "unable" in stages:
        text = f"an exchange {who} could not be tried: {stages['unable']['text']}"
        return Trial(Outcome.OPEN, text, num_processes)
    if "passed" in stages and code == 0:
        text = f"an exchange {who} has passed: {stages['passed']['text']}"
        return Trial(Outcome.PASSED, text, num_processes)
    ending = _format_end(code, program.stdout() + program.stderr())
    if "begun" in stages and "passed" not in stages and ending not in _FROM_OUTSIDE:
        text = f"an exchange {who} ended the process with {ending}"
        return Trial(Outcome.FAILED, text, num_processes)
    details = ", ".join([ending, *_last_line(program.stderr() or program.stdout())])
    return Trial(Outcome.OPEN, f"an exchange {who} shows nothing: {details}", num_processes)


def _last_line(text: str) -> list[str]:
    """Return the last line with a letter or digit, if there is one."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return [line[:_LENGTH] for line in lines[-1:]]


def _count(num_processes: int) -> str:
    if num_processes == 1:
        return "in a process alone"
    return f"between {num_processes} processes" if num_processes else "in child processes"


def _reports(text: str) -> list[dict[str, Any]]:
    """Return the reports among the lines, and ignore all other lines."""
    reports = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and all(
                isinstance(value.get(key), kind) for key, kind in _REPORT.items()
            ):
                reports.append(value)
    return reports


def _format_end(code: int, text: str) -> str:
    """Return the signal that has ended a process, or its exit code."""
    # Launchers and shells add 128 to the signal. Hydra does not, and prints "(signal N)".
    number = -code if code < 0 else code - 128
    if f"(signal {code})" in text:
        number = code
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"exit code {code}"


_POLL_S = 0.001
"""Time for which a waiting rank sleeps, so that the children of a different rank get its core."""


def cuda_awareness(
    world: World,
    device: Device,
    override: bool | None = None,
    *,
    gather: Callable[[MPI.Intracomm], Sequence[Evidence]] = gather_claims,
    attempt: Callable[[int], Sequence[Trial]] = try_exchange,
) -> CudaAwareness:
    """Return whether these ranks may pass device memory to MPI, and why. **Collective**."""
    comm = world.comm
    own = _found(device, override, lambda: gather(comm))
    agreed = _weakest(comm, own)
    if agreed.answer is not Answer.CLAIMED:
        return agreed
    # Run one trial per node, because the children of all ranks would load cupy from the same disk.
    # Ranks without a trial have the strongest answer, so they do not weaken their node's answer.
    own = CudaAwareness(Answer.PROVED, ())
    if world.local_rank == 0:
        own = _tried(agreed, lambda: attempt(device.index))
    return _weakest(comm, own)


def _found(
    device: Device, override: bool | None, gather: Callable[[], Sequence[Evidence]]
) -> CudaAwareness:
    try:
        asks = device.kind == "gpu" and override is None
        return judge(device.kind, override, gather() if asks else ())
    except Exception as error:  # the other ranks wait for an answer
        return CudaAwareness(Answer.NO, (f"the search for evidence failed: {error!r}",))


def _tried(claimed: CudaAwareness, attempt: Callable[[], Sequence[Trial]]) -> CudaAwareness:
    try:
        return weigh(claimed, attempt())
    except Exception as error:
        return replace(claimed, reasons=(*claimed.reasons, f"the trial failed: {error!r}"))


def _weakest(comm: MPI.Intracomm, own: CudaAwareness) -> CudaAwareness:
    """Return the weakest answer of all ranks. **Collective**."""
    from mpi4py import MPI

    # One MIN of one number finds the weakest answer, and the lowest rank that has it.
    number = np.array([own.answer * comm.size + comm.rank], np.int64)
    lowest = np.empty_like(number)
    # Use a nonblocking call and sleep, because a blocking call would spin on a core that the trial
    # of a different rank needs.
    request = comm.Iallreduce(number, lowest, MPI.MIN)
    while not request.Test():
        time.sleep(_POLL_S)
    answer, rank = divmod(int(lowest[0]), comm.size)
    return CudaAwareness(Answer(answer), tuple(comm.bcast(own.reasons, rank)), rank)
