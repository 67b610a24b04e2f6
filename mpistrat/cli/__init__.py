"""Command line of the package: ``mpistrat COMMAND`` or ``python -m mpistrat COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpistrat.cli import bench, checkpoints, doctor, explain, run, timeline
from mpistrat.version import __version__

__all__ = ["main"]

COMMANDS = (
    run.COMMAND,
    checkpoints.INSPECT,
    checkpoints.VERIFY,
    checkpoints.DIFF,
    explain.COMMAND,
    timeline.COMMAND,
    bench.COMMAND,
    doctor.COMMAND,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, or 2 for bad arguments and failing output."""
    if sys.stdout is None:  # closed by the parent, which wants only the exit code
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the end
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has printed the help or the error
        return end.code if isinstance(end.code, int) else 0
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _forget_output()
        return 0
    except OSError:
        reason = _why_output_fails()
        if reason is None:  # the output works, so the error is of something else
            raise
        _forget_output()
        print(f"mpistrat: the output cannot be written: {reason}.", file=sys.stderr)
        return 2
    return code


def _why_output_fails() -> str | None:
    """Return why one more line cannot be printed, ``None`` where it can."""
    try:
        print(flush=True)
    except OSError as reason:
        return reason.strerror
    return None


def _forget_output() -> None:
    """Discard what is still buffered, which Python would otherwise flush again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpistrat",
        description="Inspect checkpoints and records of a job, run benchmarks, check a launch.",
    )
    parser.add_argument("--version", action="version", version=f"mpistrat {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser
