"""Benchmark of `all_reduce` and of the best that the MPI library can do under any settings.

MPI reads its settings when it starts, so each setting is timed in separate jobs, in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrat.bench.benchmark import (
    RESULTS,
    Benchmark,
    Choices,
    Column,
    Findings,
    Lines,
    Row,
    Table,
)
from mpistrat.cuda_awareness import loaded_files
from mpistrat.doctor.facts import mpi_libraries
from mpistrat.errors import LaunchError
from mpistrat.mpi.mpiexec import Mpiexec, family_of, find_mpiexec
from mpistrat.mpi.world import library_version, open_world
from mpistrat.settings import environment
from mpistrat.system.cpu import num_cores

_DEFAULT = "default"

_SETTINGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    # https://github.com/pmodels/mpich/blob/main/src/mpi/coll/cvars.txt
    "MPICH": {
        "release_gather": {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"},
        **{
            name: {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name}
            for name in (
                *("recursive_doubling", "reduce_scatter_allgather", "ring", "tree"),
                "k_reduce_scatter_allgather",
            )
        },
    },
    # ompi_info --param coll all --level 9, and --param pml ucx
    "Open MPI": {
        "UCX": {
            "OMPI_MCA_pml": "ucx",
            "OMPI_MCA_pml_ucx_tls": "any",
            "OMPI_MCA_pml_ucx_devices": "any",
        },
        "han": {"OMPI_MCA_coll_han_priority": "100"},
        **{
            f"tuned: {name}": {
                "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
                "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number),
            }
            for number, name in (
                (3, "recursive doubling"),
                (4, "ring"),
                (5, "segmented ring"),
                (6, "Rabenseifner"),
            )
        },
    },
}
"""Variables of the environment for each setting worth a trial, by family of library."""

_LIMIT_S = 300.0
_SAMPLES_OF_JOB = 3
_WAYS = {"raw_s": "", "in_place_s": ", in place"}


def measure(choices: Choices) -> Findings:
    """Time jobs with each setting in turns, on `choices.num_ranks` ranks of this machine."""
    if open_world(None).size > 1:
        raise LaunchError("--best starts the ranks itself: run it without mpiexec, with --ranks N.")
    family = family_of(library_version())
    mpiexec = find_mpiexec(library_version().partition(",")[0], mpi_libraries(loaded_files()))
    settings = {_DEFAULT: {}, **_SETTINGS.get(family, {})}
    rounds: list[dict[str, list[Row]]] = []
    failed: dict[str, str] = {}
    for _ in range(max(choices.num_samples // _SAMPLES_OF_JOB, 1)):
        timed: dict[str, list[Row]] = {}
        for name, variables in settings.items():
            if name in failed:
                continue
            try:
                timed[name] = _run_job(mpiexec, choices, variables)
            except RuntimeError as error:
                if name == _DEFAULT:
                    raise LaunchError(f"The ranks could not be timed: {error}") from None
                failed[name] = str(error)
        rounds.append(timed)
    rows = [_row(number, rounds) for number in range(len(choices.sizes))]
    notes = [f"{name} is left out: {why}" for name, why in failed.items()]
    ranks = f"{choices.num_ranks} ranks, settings of {family or 'this library'}"
    return Findings(
        {RESULTS: rows}, (f"{ranks}: {', '.join(settings)}.", *notes), choices.num_ranks
    )


def _run_job(mpiexec: Mpiexec, choices: Choices, variables: Mapping[str, str]) -> list[Row]:
    """Return the rows that ``bench allreduce`` prints under `variables`."""
    ranks = choices.num_ranks
    command = mpiexec.command(ranks, oversubscribe=ranks > num_cores())
    command += [sys.executable, "-m", "mpistrat", "bench", "allreduce", "--json"]
    command += ["--samples", str(_SAMPLES_OF_JOB), "--sizes", *map(str, choices.sizes)]
    try:
        done = subprocess.run(
            command,
            env=dict(environment()) | dict(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took more than {_LIMIT_S:.0f} s.") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"exit code {done.returncode} ({last[0]})")
    results: list[Row] = json.loads(done.stdout)[RESULTS]
    return results


def _row(number: int, rounds: Sequence[Mapping[str, Sequence[Row]]]) -> Row:
    """Return the row of one size: the best candidate by its median, and ratios by rounds."""
    first = rounds[0][_DEFAULT][number]
    candidates = {
        (name, way): statistics.median(timed[name][number][way] for timed in rounds)
        for name in rounds[-1]
        for way in _WAYS
    }
    name, way = min(candidates, key=lambda each: candidates[each])
    row: dict[str, Any] = {
        "num_bytes": first["num_bytes"],
        "best": f"{name}{_WAYS[way]}",
        "best_s": candidates[name, way],
        "all": {f"{of}{_WAYS[by]}": seconds for (of, by), seconds in candidates.items()},
    }
    # In the same jobs: between nodes, this package reduces by MPI, and the settings help both.
    for key, ours in (("ratio", "ours_s"), ("out_ratio", "out_s")):
        row[ours] = statistics.median(timed[name][number][ours] for timed in rounds)
        row[key] = statistics.median(
            timed[name][number][way] / timed[name][number][ours] for timed in rounds
        )
    return row


BENCHMARK = Benchmark(
    "allreduce --best",
    "all_reduce of one array, and the best setting of the MPI library for each size",
    measure,
    (
        Table(
            (
                Column.size("array", "num_bytes"),
                Column.text("best of MPI", "best"),
                Column.time("takes", "best_s"),
                Column.time("all_reduce", "ours_s"),
                Column.ratio("best / all_reduce", "ratio"),
                Column.time("with out=", "out_s"),
                Column.ratio("best / with out=", "out_ratio"),
            )
        ),
    ),
    (
        Lines(
            "num_bytes",
            {"best_s": "best of MPI", "ours_s": "all_reduce", "out_s": "all_reduce with out="},
            "size of the array",
            "seconds",
        ),
    ),
    sizes=(8, 2**10, 2**16, 2**20, 2**22, 2**24, 2**26),
    starts_ranks=True,
)
