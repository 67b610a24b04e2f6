"""``mpistrat doctor``: whether this installation and this launch are sound."""

from __future__ import annotations

import argparse

from mpistrat.cli.output import Command, print_json, print_line, print_table

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--folder", default=".", metavar="DIR", help="where checkpoints shall lie; by default here"
    )


def _run(arguments: argparse.Namespace) -> int:
    # MPI starts here, not when the command line is read.
    from mpistrat.doctor import Level, examine

    report = examine(arguments.folder)
    if report is None:
        # Another task tells the same. A launcher might end it if this one were the first to fail.
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
        [(marks[each.level], each.topic, each.seen) for each in report.findings],
    )
    for each in report.findings:
        if each.level is not Level.OK:
            print_line(f"{marks[each.level]}: {each.topic}: {each.why}\n  {each.remedy}")
    counts = [
        sum(each.level is level for each in report.findings)
        for level in (Level.PROBLEM, Level.WARNING)
    ]
    print_line(f"{counts[0]} problem(s), {counts[1]} warning(s)")
    return code


COMMAND = Command(
    "doctor",
    "Look for what is wrong with this installation and launch, alone or under any launcher.",
    _add_arguments,
    _run,
)
