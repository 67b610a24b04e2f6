"""Jobs that stand still while they are counted."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks.machine import rank
from benchmarks.machine.counts import TRACED, Calls, Standing, read_process, read_trace
from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.system.processes import Program
from mpistrat.testing import launch

_POLL_S = 0.2
_SAMPLE = "0 1 2 3"
"""Ranks whose system calls are traced, besides the last one. Most ranks do what rank 1 does."""


def count_job(stage: str, num_ranks: int, limit_s: float) -> dict[str, Any]:
    """Start a job, and return what its ranks hold, as a row of the report.

    Raises
    ------
    RuntimeError
        If the job ends before it is counted, or takes longer than `limit_s` seconds.
    """
    with _standing_job(stage, num_ranks, limit_s) as (folder, pids):
        found = [read_process(pid) for pid in pids]
        calls = [
            read_trace(path.read_text(errors="replace").splitlines(), rank.MARK)
            for path in sorted(folder.glob("trace-*"))
        ]
    return {"stage": stage, "num_ranks": num_ranks, **_row(found, calls)}


def can_trace() -> bool:
    """Return whether strace can trace a program here."""
    if shutil.which("strace") is None:
        return False
    trial = Program(["strace", "-o", "/dev/null", "true"], launch.environment())
    return trial.wait(10) == 0


@contextlib.contextmanager
def _standing_job(stage: str, num_ranks: int, limit_s: float) -> Iterator[tuple[Path, list[int]]]:
    """Start a job, and yield its folder and the ids of its processes once all stand still."""
    with tempfile.TemporaryDirectory(prefix="mpistrat-machine-") as name:
        folder = Path(name)
        _write_data(folder / rank.DATA)
        # Otherwise the many ranks of a core would spend their time in MPI's busy waits.
        variables = launch.environment({"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"})
        command = [*mpiexec(num_ranks), *_traced(folder, num_ranks)]
        command += [sys.executable, str(Path(rank.__file__)), stage, str(folder)]
        program = Program(command, variables)
        try:
            yield folder, _wait_for_ranks(program, folder, num_ranks, limit_s)
            (folder / "leave").touch()
            program.wait(limit_s)
        finally:
            program.kill()


def _wait_for_ranks(program: Program, folder: Path, num_ranks: int, limit_s: float) -> list[int]:
    end = time.monotonic() + limit_s
    while True:
        found = list(folder.glob("standing-*"))
        if len(found) == num_ranks:
            return sorted(int(each.name.partition("-")[2]) for each in found)
        if program.process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(
                f"{len(found)} of {num_ranks} ranks stand.\n{program.stdout()}{program.stderr()}"
            )
        time.sleep(_POLL_S)


def _traced(folder: Path, num_ranks: int) -> list[str]:
    """Return the beginning of a command that traces the sample of the ranks."""
    if not can_trace():
        return []
    # Some architectures lack some of the calls: strace ignores these after "?".
    traced = "--trace=" + ",".join(each if each[0] == "%" else f"?{each}" for each in TRACED)
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", traced, "--signal=none"]
    script = (
        "r=${PMI_RANK:-$OMPI_COMM_WORLD_RANK}; "
        f'case " {_SAMPLE} {num_ranks - 1} " in *" $r "*) '
        f'exec {shlex.join(strace)} -o {shlex.quote(str(folder))}/trace-$r "$@";; esac; '
        'exec "$@"'
    )
    return ["sh", "-c", script, "sh"]


def _write_data(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        image = rng.integers(0, 17, (4096, 8, 8), np.uint8)
        file.create_dataset("image", data=image, chunks=(64, 8, 8), compression="gzip")
        file.create_dataset("label", data=rng.integers(0, 10, 4096))


def _row(found: list[Standing], calls: list[Calls]) -> dict[str, Any]:
    """Return means per rank, the largest values, and sums over the job."""
    row: dict[str, Any] = {}
    of_ranks = [asdict(each) for each in found]
    mapped: dict[str, int] = {}
    for each in of_ranks:
        mapped |= each.pop("mapped")
    for values in (of_ranks, [asdict(each) for each in calls]):
        for key in values[0] if values else ():
            row[key] = round(statistics.mean(each[key] for each in values), 1)
            row[f"{key}_max"] = max(each[key] for each in values)
    row["mapped_of_job"] = sum(mapped.values())
    row["shared_of_job"] = sum(each["shared"] for each in of_ranks)
    row["memory_of_job"] = sum(each["own"] + each["page_tables"] for each in of_ranks)
    return row
