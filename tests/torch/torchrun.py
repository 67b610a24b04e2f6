"""Programs under torchrun, the launcher of PyTorch, without MPI."""

import re
from pathlib import Path

from mpistrat.testing import launch

PROGRAMS = Path(__file__).parent / "programs"


def command(program, ranks):
    """Return the arguments of Python that start `program`, a list, on some ranks."""
    return [
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *program,
    ]


def run(program, ranks, limit_s=200, **options):
    """Run a program that is expected to end well, and return what it has printed."""
    for _ in range(3):
        done = launch.run(command(program, ranks), None, limit_s, **options)
        # gloo's threads abort the process now and then while it ends, all work done.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_on(launcher, program, ranks, **options):
    """Do `run` under torchrun or mpiexec."""
    if launcher == "torchrun":
        return run(program, ranks, **options)
    assert launcher == "mpiexec"
    done = launch.run(["-W", "ignore", *program], ranks, 200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def failure(program, ranks, limit_s=200, **options):
    """Run a program that is expected to fail, and return what it has written to stderr."""
    done = launch.run(command(program, ranks), None, limit_s, **options)
    assert done.returncode != 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)
