"""A report from a machine with GPUs: ``python -m tools.gpu_report`` writes one page.

It runs the doctor, the proof that MPI takes GPU memory, the smoke test, the tests marked ``gpu``,
and benchmarks, on the GPUs that are here. A part that fails does not keep the rest from running.
Without a GPU it tries the parts that run on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import getpass
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpistrat.mpi.mpiexec import mpiexec

ROOT = Path(__file__).resolve().parents[1]
FORM = "https://github.com/mpistrat/mpistrat/issues/new?template=gpu-report.yml"
PACKAGES = ("mpistrat", "numpy", "mpi4py", "h5py", "cupy-cuda12x", "cupy-cuda13x", "torch")
GPU_TESTS = (
    "tests/gpu",
    "tests/comm/test_gpu_reducers.py",
    "tests/data/test_transfer.py",
    "tests/cuda_awareness/test_cuda_agreement.py",
)
MAX_LINES = 200
"""Of the output of one part; the beginning is left out."""


@dataclass(frozen=True)
class Gpu:
    """What nvidia-smi says of one GPU."""

    name: str
    memory: str
    driver: str


@dataclass(frozen=True)
class Part:
    """One section of the page: a command, and what came of it."""

    title: str
    command: Sequence[str]
    limit_s: float
    needs_gpu: bool = False
    is_question: bool = False
    """Whether its exit code is an answer, and no failure: most MPI libraries take no GPU memory."""


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    code: int | None
    """The exit code, ``None`` after the time limit."""
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        """In one word or two."""
        if self.code is None:
            return "time limit"
        return "ok" if self.code == 0 else f"exit code {self.code}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; 1 where a part fails on a machine with GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"), help="(%(default)s)")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, at least 2")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--figures", type=Path, default=Path(), help="folder of speed-N.json")
    arguments = parser.parse_args(argv)
    gpus = find_gpus()
    ranks = arguments.ranks or max(2, len(gpus))
    page = [heading(gpus)]
    failed = []
    for part in parts(ranks, arguments.quick, arguments.figures.resolve()):
        if part.needs_gpu and not gpus:
            page.append(f"## {part.title}\n\nNot tried: there is no GPU.\n")
            continue
        print(f"{part.title} ...", flush=True)
        outcome = run(part)
        print(f"  {outcome.verdict}, {outcome.seconds:.0f} s", flush=True)
        page.append(section(part, outcome))
        if outcome.code != 0 and not part.is_question:
            failed.append(part.title)
    result = f"{len(failed)} part(s) failed: {', '.join(failed)}" if failed else "All parts passed"
    page.insert(1, f"**{result}.**\n")
    arguments.output.write_text(without_names("\n".join(page)))
    print(f"{result}. The page is {arguments.output}.")
    if gpus:
        print(f"Please send it: {FORM}")
    else:
        print("There is no GPU here, so only what runs on the host was tried.")
    return 1 if failed and gpus else 0


def find_gpus() -> list[Gpu]:
    """Return the GPUs of this machine, by nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return read_gpus(done.stdout) if done.returncode == 0 else []


def read_gpus(table: str) -> list[Gpu]:
    """Return the GPUs in the table that nvidia-smi prints as CSV."""
    rows = (line.split(", ") for line in table.splitlines())
    return [Gpu(*row) for row in rows if len(row) == 3]


def parts(ranks: int, is_quick: bool, figures: Path) -> list[Part]:
    """Return what is tried, in this order; figures of speed go to that folder."""
    python = sys.executable
    on_ranks = [*mpiexec(ranks), python]
    pytest = [
        "-m",
        "pytest",
        "--with-mpi",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "--timeout=120",
        *GPU_TESTS,
    ]
    samples = ["--samples", "3" if is_quick else "9"]
    speed = [str(ROOT / "tools" / "gpu_speed.py"), *samples, "--output"]
    bench = [*on_ranks, "-m", "mpistrat", "bench", "allreduce", "--sizes", "8", "65536", *samples]
    return [
        Part("Doctor", [*on_ranks, "-m", "mpistrat", "doctor"], 300),
        Part("Topology", ["nvidia-smi", "topo", "-m"], 60, needs_gpu=True),
        Part(
            "MPI and GPU memory",
            [*mpiexec(2), python, "-m", "mpistrat.cuda_awareness", "--limit", "25"],
            60,
            needs_gpu=True,
            is_question=True,
        ),
        Part("Smoke test, 1 rank", [python, "-m", "mpistrat.testing", "smoke"], 180),
        Part(f"Smoke test, {ranks} ranks", [*on_ranks, "-m", "mpistrat.testing", "smoke"], 300),
        Part("Tests, 1 rank", [python, *pytest], 150, True),
        Part("Tests, 4 ranks", [*mpiexec(4), python, *pytest, "tests/gpu"], 150, True),
        Part(f"Tests, {ranks} ranks", [*on_ranks, *pytest], 150, True),
        Part("Speed, 1 rank", [python, *speed, str(figures / "speed-1.json")], 200, True),
        Part(
            f"Speed, {ranks} ranks",
            [*on_ranks, *speed, str(figures / f"speed-{ranks}.json")],
            200,
            True,
        ),
        Part("allreduce on the host", bench, 300),
    ]


def run(part: Part) -> Outcome:
    """Run a part to its end, or to its time limit."""
    # Ranks may share a GPU here, and cores: the page says how many there are.
    variables = os.environ | {
        "MPISTRAT_OVERSUBSCRIBE": "on",
        "MPISTRAT_SHARE_GPUS": "on",
        "NO_COLOR": "1",
        "COLUMNS": "110",
    }
    variables.setdefault("OMP_NUM_THREADS", "1")
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, 9)
            process.wait()
        output.seek(0)
        text = output.read()
    return Outcome(code, time.perf_counter() - began, text)


def heading(gpus: Iterable[Gpu]) -> str:
    """Return the top of the page: when, what and where."""
    lines = ["# GPU report of mpistrat", "", f"{datetime.date.today()}, {platform.platform()}", ""]
    lines += ["| GPU | memory | driver |", "|---|---|---|"]
    lines += [f"| {gpu.name} | {gpu.memory} | {gpu.driver} |" for gpu in gpus] or ["| none | | |"]
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    lines += ["", ", ".join(versions)]
    return "\n".join(lines) + "\n"


def section(part: Part, outcome: Outcome) -> str:
    """Return the part of the page about one part."""
    lines = outcome.output.rstrip().splitlines()
    if len(lines) > MAX_LINES:
        lines = [f"... {len(lines) - MAX_LINES} lines", *lines[-MAX_LINES:]]
    command = " ".join(part.command)
    return "\n".join(
        [
            f"## {part.title}: {outcome.verdict}, {outcome.seconds:.0f} s",
            "",
            "```text",
            f"$ {command}",
            *(line.replace("```", "'''") for line in lines),
            "```",
            "",
        ]
    )


def without_names(page: str) -> str:
    """Return a page without the names of its user, host and folders."""
    page = page.replace(str(ROOT), "CHECKOUT").replace(str(Path.home()), "~")
    for name, role in ((socket.gethostname(), "HOST"), (getpass.getuser(), "USER")):
        page = re.sub(rf"\b{re.escape(name)}\b", role, page)
    return page


if __name__ == "__main__":
    sys.exit(main())
