"""Launcher of Python programs on several MPI ranks of this machine, with a time limit.

From a test: ``run(["-c", "print(1)"], ranks=2)``. From a shell:
``python -m mpistrat.testing -n 3 --limit 600 -- -m pytest``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpistrat import settings
from mpistrat.mpi.launcher import without_launcher
from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.system.processes import Program, send_signal

_UNWANTED = (
    # Unbuffered, Python writes a line and its newline separately, so the lines of ranks mix.
    "PYTHONUNBUFFERED",
    # With it every rank would compile the package again.
    "PYTHONDONTWRITEBYTECODE",
)
_RANK_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def rank_and_size() -> tuple[int, int] | None:
    """Return rank and number of ranks of this process, or ``None`` outside of mpiexec."""
    variables = settings.environment()
    for rank, size in _RANK_VARIABLES:
        if rank in variables and size in variables:
            return int(variables[rank]), int(variables[size])
    return None


def is_open_mpi() -> bool:
    """Return whether `mpiexec` belongs to Open MPI."""
    return "--oversubscribe" in mpiexec(1)


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a new job: one thread per rank, shared cores and GPUs."""
    variables = without_launcher()
    for name in _UNWANTED:
        variables.pop(name, None)
    variables |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MPISTRAT_OVERSUBSCRIBE": "on",
        "MPISTRAT_SHARE_GPUS": "on",
        # A rank prints its stacks if it crashes, or if it hangs and gets SIGABRT.
        "PYTHONFAULTHANDLER": "1",
    }
    return variables | dict(changes or {})


class Launched(Program):
    """A running Python program.

    Attributes
    ----------
    process : subprocess.Popen
        The launcher, or the program itself if ``ranks`` is `None`.
    """

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        ranks: int | None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        capture: bool = True,
    ) -> None:
        command = [
            *(mpiexec(ranks) if ranks else []),
            sys.executable,
            *(os.fspath(each) for each in arguments),
        ]
        super().__init__(command, environment(env), cwd, capture)

    def ask_for_stacks(self, patience_s: float = 2) -> None:
        """Make every Python process of the program print its stacks and exit."""
        own = os.path.realpath(sys.executable)
        pids = self.pids()
        asked = [pid for pid in pids if _program_of(pid) == own]
        launchers = [pid for pid in pids if pid not in asked]
        # Ask one after the other, or their lines mix. Stop the launcher meanwhile, because it would
        # kill the other ranks as soon as one exits.
        send_signal(signal.SIGSTOP, launchers)
        for pid in asked:
            send_signal(signal.SIGCONT, [pid])
            send_signal(signal.SIGABRT, [pid])
            end = time.monotonic() + patience_s
            while _is_running(pid) and time.monotonic() < end:
                time.sleep(0.01)
        send_signal(signal.SIGCONT, launchers)
        # The launcher forwards the output of the ranks until it exits.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)

    def wait_for_output(self, text: str, limit_s: float = 60) -> None:
        """Wait until the program has printed `text`."""
        end = time.monotonic() + limit_s
        while text not in self.stdout():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise AssertionError(f"{text!r} was not printed:\n{self.stdout()}{self.stderr()}")
            time.sleep(0.02)

    def finish(self, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Wait, and return exit code and output; at the limit, raise AssertionError with stacks."""
        try:
            code = self.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.ask_for_stacks()
            self.kill()
            raise AssertionError(
                f"{self.process.args!r} ran over {limit_s:g} s:\n{self.stdout()}{self.stderr()}"
            ) from None
        return subprocess.CompletedProcess(self.process.args, code, self.stdout(), self.stderr())


def run(
    arguments: Sequence[str | os.PathLike[str]],
    ranks: int | None = None,
    limit_s: float = 60,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` on several ranks, and wait for its end. Local.

    Parameters
    ----------
    arguments : sequence of str or path
        The arguments of ``python``, such as ``["train.py", "--epochs", "2"]``.
    ranks : int, optional
        Number of ranks that ``mpiexec`` starts. Default: the program runs without ``mpiexec``.
    limit_s : float
        Time limit in seconds. A program that takes longer is killed with all its ranks.
    cwd : path, optional
        Working directory of the program. Default: the current one.
    env : mapping, optional
        Environment variables to add or replace. By default the program gets the environment of this
        process without the launcher's variables, runs one thread per rank, and its ranks may share
        cores and GPUs.

    Returns
    -------
    subprocess.CompletedProcess
        Exit code, standard output and standard error, as strings.

    Raises
    ------
    AssertionError
        If the program did not end within `limit_s`.

    Examples
    --------
    >>> done = ms.testing.run_on_ranks(["-c", "print('hello', end='')"])
    >>> done.returncode, done.stdout
    (0, 'hello')
    """
    return Launched(arguments, ranks, cwd, env).finish(limit_s)


def _is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        # The program name, in parentheses, may itself contain spaces and ")" (proc(5)).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _program_of(pid: int) -> str:
    try:
        return os.path.realpath(f"/proc/{pid}/exe")
    except OSError:  # the process has ended
        return ""


_DESCRIPTION = "Run a Python program on several MPI ranks of this machine, with a time limit."


def main() -> int:
    """Run the program that the command line names, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mpistrat.testing", description=_DESCRIPTION)
    parser.add_argument("-n", type=int, required=True, dest="ranks", help="number of ranks")
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        metavar="SECONDS",
        help="kill the program after this time (default: %(default)s s)",
    )
    parser.add_argument(
        "arguments", nargs="+", help="after --: the arguments of python, such as -m pytest"
    )
    args = parser.parse_args()
    # Open MPI gives rank 0 its own terminal, even if the output goes to a file.
    colour = {} if sys.stdout.isatty() else {"NO_COLOR": "1"}
    launched = Launched(args.arguments, args.ranks, env=colour, capture=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return launched.finish(args.limit).returncode
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 124
    finally:
        if launched.process.poll() is None:
            launched.kill()
