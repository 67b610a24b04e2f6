"""Programs that lose ranks: with Open MPI's ULFM, and SIGKILL at random moments."""

import os
import random
import signal
import time

import pytest

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch

__all__ = ["digests", "needs_ulfm", "patient", "rounds", "start"]

needs_ulfm = pytest.mark.skipif(not launch.is_open_mpi(), reason="MPICH ends the job with the rank")


def start(folder, program, ranks=4, fault="", is_tolerant=True, arguments=(), **variables):
    script = folder / "program.py"
    script.write_text(program)
    patch = pytest.MonkeyPatch()
    patch.delenv("MPISTRAT_KILLS", raising=False)  # programs refuse unknown settings
    if is_tolerant:
        first, *rest = mpiexec(ranks)
        patch.setattr(launch, "mpiexec", lambda _: [first, "--with-ft", "ulfm", *rest])
    with patch.context():
        env = variables | ({"MPISTRAT_FAULT": fault} if fault else {})
        launched = launch.Launched([script, *arguments], ranks, cwd=folder, env=env)
    patch.undo()
    return launched


def digests(done):
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("digest")]


_NUM_ROUNDS = int(os.environ.get("MPISTRAT_KILLS", "4"))

patient = pytest.mark.timeout(60 + 15 * _NUM_ROUNDS)
"""Mark of a test that uses `rounds`."""


def rounds(launch_next, within_s, limit_s=90):
    """Yield about each round of kills: a text, how many ranks were killed, and how it ended.

    One rank or two die within `within_s` after MPI has started, which itself outlives no loss.
    There are as many rounds as ``MPISTRAT_KILLS`` in the environment of pytest says, or four.
    """
    generator = random.Random(int(os.environ.get("KILLS_SEED", "23")))
    for number in range(_NUM_ROUNDS):
        launched = launch_next()
        launched.wait_for_output("started\n" * 4)
        ranks = _processes(launched)
        after_s = generator.uniform(0, within_s)
        time.sleep(after_s)
        victims = generator.sample(range(4), generator.choice([1, 1, 2]))
        killed = 0
        for victim in victims:
            killed += _kill(ranks[victim])
            time.sleep(generator.choice([0, 0.01, 0.3]))
        done = launched.finish(limit_s)
        yield (number, victims, after_s, done.stdout, done.stderr), killed, done


def _processes(launched):
    """Return the process of each rank that has begun."""
    found = {}
    for pid in launched.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = dict(each.split(b"=", 1) for each in file.read().split(b"\0") if each)
        except OSError:
            continue
        if b"OMPI_COMM_WORLD_RANK" in variables:
            found[int(variables[b"OMPI_COMM_WORLD_RANK"])] = pid
    return found


def _kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1
