"""Command ``mpistrat watch``: run any Python MPI program, and report a hang or a death."""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import replace

from mpistrat.cli.output import Command, print_error, print_note
from mpistrat.cli.run import add_launch_arguments, plan, wait_for_job
from mpistrat.errors import LaunchError
from mpistrat.settings import environment
from mpistrat.system.processes import descendants, send_signal
from mpistrat.watch.choices import STARTUP, add_watch_arguments, limits_of, variables_of
from mpistrat.watch.collector import Collector
from mpistrat.watch.hang_report import EXIT_CODE

_LEAVING_S = 5.0


class _PrintFolder(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(STARTUP)
        parser.exit(0)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_watch_arguments(parser)
    parser.add_argument(
        "--startup-folder",
        action=_PrintFolder,
        nargs=0,
        help="print the folder that PYTHONPATH needs where MPISTRAT_WATCH_AFTER_S alone has no "
        "effect",
    )
    add_launch_arguments(parser)


def _watch(arguments: argparse.Namespace) -> int:
    try:
        job = plan(arguments, "watch")
        changes = variables_of(arguments)
    except LaunchError as error:
        print_error("watch", error)
        return 2
    is_local = job.command[0] != "srun" and "SLURM_JOB_ID" not in environment()
    collector = Collector(limits_of(changes), job.num_ranks, is_local, _end_job)
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
    report = collector.report_deaths(_bracket(code)) or collector.report
    return code or 1 if report is not None and report.cause.kind == "died" else code


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
