"""Command ``mpistrat doctor``: check this installation and this launch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mpistrat.cli.output import Command, print_json, print_line, print_table
from mpistrat.system.text import counted

if TYPE_CHECKING:
    from mpistrat.doctor import Report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        *("-v", "--verbose"), action="store_true", help="show the details of each line"
    )
    parser.add_argument(
        "--folder",
        default=".",
        metavar="DIR",
        help="the folder for checkpoints (default: the current folder)",
    )


def _run(arguments: argparse.Namespace) -> int:
    # Imported late, so that other commands do not start MPI.
    from mpistrat.doctor import examine
    from mpistrat.doctor.facts import Level

    report = examine(arguments.folder)
    if report is None:
        # A different task reports the same. If this task failed first, a launcher might end it.
        return 0
    code = 0 if report.is_healthy else 1
    if report.rank != 0:
        return code
    if arguments.json:
        print_json(report.as_json())
        return code
    marks = {Level.OK: "ok", Level.WARNING: "warning", Level.PROBLEM: "PROBLEM"}
    print_table(
        ("", "what", "seen"),
        [
            (marks[each.level], each.topic, each.seen if arguments.verbose else each.brief)
            for each in report.findings
        ],
    )
    for each in report.findings:
        if each.level is not Level.OK:
            print_line(
                marks[each.level], f": {each.topic}: {each.why}\n", (f"  {each.remedy}", "bold")
            )
    print_line(_verdict(report))
    print_line("A program that hangs: mpistrat watch -n 4 program.py says which rank, and where.")
    return code


def _verdict(report: Report) -> str:
    from mpistrat.doctor.facts import Level

    levels = [each.level for each in report.findings]
    counts = ((Level.PROBLEM, "problem"), (Level.WARNING, "warning"))
    found = [counted(levels.count(level), noun) for level, noun in counts if level in levels]
    if report.is_healthy:
        return f"Ready, with {found[0]}." if found else "Ready."
    return f"Not ready: {', '.join(found)}."


COMMAND = Command(
    "doctor",
    "Check this installation and this launch, alone or under any launcher.",
    _add_arguments,
    _run,
    "find problems",
    """\
Check an installation and a launch before a job fails: MPI, launcher, cores and threads, GPUs,
HDF5, and the folder for checkpoints. Run it as the job will be started. It prints a remedy for
each problem, usually the command to type. The exit code is 1 if there is a problem.

A program that starts and then hangs: mpistrat watch -n 4 program.py says which rank, and where.

  mpistrat doctor
  srun --mpi=pmi2 mpistrat doctor --folder runs
""",
)
