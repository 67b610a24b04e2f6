"""Command ``mpistrat watch``: run any Python MPI program, and report a hang or the death of a rank."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mpistrat.cli.output import Command, check_can_write, print_error, print_note
from mpistrat.cli.run import add_launch_arguments, plan, wait_for_job
from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import find_launcher
from mpistrat.settings import Settings, environment
from mpistrat.system.processes import descendants, send_signal
from mpistrat.watch.collector import Collector
from mpistrat.watch.report import EXIT_CODE

_STARTUP = Path(__file__).parents[1] / "watch" / "startup"
_LEAVING_S = 5.0


def _seconds(text: str) -> str:
    try:
        is_good = 0 < float(text) < float("inf")
    except ValueError:
        is_good = False
    if not is_good:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0.")
    return text


def _seconds_or_none(text: str) -> str:
    return text if text.lower() == "none" else _seconds(text)


def _add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--after",
        type=_seconds,
        metavar="SECONDS",
        help="how long a proven hang must stand still before it is reported (default: 30)",
    )
    add(
        "--busy-after",
        type=_seconds_or_none,
        metavar="SECONDS",
        help="how long ranks may wait for one that computes or polls; none: for ever "
        "(default: 1800)",
    )
    add("--report-only", action="store_true", help="report once, and leave the job alone")
    add("--json", metavar="FILE", help="also write the report there, only if there is one")


class _PrintFolder(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_STARTUP)
        parser.exit(0)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_watch_arguments(parser)
    parser.add_argument(
        "--startup-folder",
        action=_PrintFolder,
        nargs=0,
        help="print the folder that PYTHONPATH needs where MPISTRAT_WATCH_AFTER_S alone has no "
        "effect",
    )
    add_launch_arguments(parser)


def _changes(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the options set. Raise LaunchError for bad ones."""
    variables = environment()
    changes = {"MPISTRAT_WATCH_AFTER_S": variables.get("MPISTRAT_WATCH_AFTER_S", "30")}
    if arguments.after is not None:
        changes["MPISTRAT_WATCH_AFTER_S"] = arguments.after
    if arguments.busy_after is not None:
        changes["MPISTRAT_WATCH_BUSY_AFTER_S"] = arguments.busy_after
    if arguments.report_only:
        changes["MPISTRAT_WATCH_REPORT_ONLY"] = "on"
    if arguments.json is not None:
        changes["MPISTRAT_WATCH_JSON"] = os.path.abspath(arguments.json)
    limits = _limits(changes)
    if not limits.watch:
        raise LaunchError("MPISTRAT_WATCH=off forbids the sockets that the watch needs. Unset it.")
    if limits.watch_json is not None:
        try:
            check_can_write(Path(limits.watch_json))
        except ValueError as error:
            raise LaunchError(str(error)) from None
    if not list(_STARTUP.parent.glob("_recorder*.so")):
        from mpistrat.native import HOW_TO_COMPILE

        raise LaunchError(f"The recorder of the watch is not compiled. {HOW_TO_COMPILE}")
    # Python reads it at its start, before the program.
    path = os.pathsep.join(filter(None, [str(_STARTUP), variables.get("PYTHONPATH", "")]))
    return changes | {"PYTHONPATH": path}


def _limits(changes: Mapping[str, str]) -> Settings:
    try:
        return Settings.parse(dict(environment()) | dict(changes))
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _watch(arguments: argparse.Namespace) -> int:
    try:
        job = plan(arguments, "watch")
        changes = _changes(arguments)
    except LaunchError as error:
        print_error("watch", error)
        return 2
    is_local = job.command[0] != "srun" and "SLURM_JOB_ID" not in environment()
    collector = Collector(_limits(changes), job.num_ranks, is_local, _end_job)
    changes["MPISTRAT_WATCH_ADDRESS"] = collector.address
    job = replace(job, variables=job.variables | changes)
    thread = collector.start()

    def note_signal(_: signal.Signals) -> None:
        collector.is_asked_to_end = True

    if arguments.verbose:
        print_note("watch", job.short)
    code, _ = wait_for_job(job, note_signal)
    if collector.has_ended_job:
        # The thread kills what is left, and this process must not leave it alone.
        _wait_for_end()
        return EXIT_CODE
    time.sleep(0.05)  # connections that broke are noticed
    collector.close()
    thread.join(_LEAVING_S)
    if collector.report_deaths(_bracket(code)) is not None:
        return code or 1
    return code


def _bracket(code: int) -> str:
    """Return the signal that has killed a rank, by the exit code of the launcher."""
    number = code - 128 if code > 128 else code
    try:
        return signal.Signals(number).name if code else ""
    except ValueError:
        return f"exit code {code}"


def _end_job(collector: Collector) -> None:
    """Kill the launcher, before its page of text on dead ranks hides the report, and the ranks."""
    children = descendants(os.getpid())[1:]
    send_signal(signal.SIGKILL, children[:1])
    collector.tell_ranks_to_end()
    send_signal(signal.SIGKILL, children[1:])
    send_signal(signal.SIGKILL, collector.pids if collector.is_local else [])
    _wait_for_end()


def _wait_for_end() -> None:
    end_s = time.monotonic() + _LEAVING_S
    while (children := descendants(os.getpid())[1:]) and time.monotonic() < end_s:
        send_signal(signal.SIGKILL, children)
        for each in children:
            _reap(each)
        time.sleep(0.02)


def _reap(pid: int) -> None:
    """Take the exit code of a rank whose launcher is dead, or it would stay in the table."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except (ChildProcessError, OSError):
        return


def main_of_rank(argv: Sequence[str]) -> int:
    """Run ``python -m mpistrat.watch``: become the program, under the watch."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.watch",
        description="Run a program under the watch, one process a rank, as in: "
        "srun python -m mpistrat.watch solver.py",
    )
    _add_watch_arguments(parser)
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    arguments = parser.parse_args(argv)
    try:
        changes = _changes(arguments)
        if not arguments.is_module and not Path(arguments.program).exists():
            raise LaunchError(f"There is no program {arguments.program!r}.")
        if find_launcher().is_inherited:
            raise LaunchError("This process was started by a rank, and is not a rank.")
    except LaunchError as error:
        print_error("watch", error)
        return 2
    flag = ["-m"] if arguments.is_module else []
    command = [sys.executable, *flag, arguments.program, *arguments.arguments]
    os.execve(sys.executable, command, dict(environment()) | changes)


COMMAND = Command(
    "watch",
    "Run any Python MPI program; if it hangs, say which rank, and where.",
    _add_arguments,
    _watch,
    "find problems",
    """\
Run a Python MPI program, with or without mpistrat, on several ranks. If it can never go on, print
one short report that names ranks, lines and calls, and end the job with exit code 86. A program
that is only slow is left alone. See also: srun python -m mpistrat.watch solver.py, and
MPISTRAT_WATCH_AFTER_S for jobs whose commands cannot be changed.

  mpistrat watch -n 8 solver.py --steps 100
  mpistrat watch -n 8 --after 10 --json report.json solver.py
""",
)
