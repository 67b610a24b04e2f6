"""The command line: ``mpistrat <command>``, or ``python -m mpistrat <command>``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mpistrat.cli import bench, checkpoints, doctor, explain, timeline
from mpistrat.version import __version__

__all__ = ["main"]

COMMANDS = (
    checkpoints.INSPECT,
    checkpoints.VERIFY,
    checkpoints.DIFF,
    explain.COMMAND,
    timeline.COMMAND,
    bench.COMMAND,
    doctor.COMMAND,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; by default those of this process.

    Returns
    -------
    int
        2 for arguments that cannot be used, and where the output cannot be written; otherwise what
        the command says.
    """
    if sys.stdout is None:  # it was closed before: the exit code alone is wanted
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
        if reason is None:  # something else does
            raise
        _forget_output()
        print(f"mpistrat: the output cannot be written: {reason}.", file=sys.stderr)
        return 2
    return code


def _why_output_fails() -> str | None:
    """Return what the system says against one more line, ``None`` where it takes it."""
    try:
        print(flush=True)
    except OSError as reason:
        return reason.strerror
    return None


def _forget_output() -> None:
    """Have what is still to be printed go nowhere, or Python would try it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpistrat",
        description="Look into mpistrat's checkpoints, its records of a job, and its surroundings.",
    )
    parser.add_argument("--version", action="version", version=f"mpistrat {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser
