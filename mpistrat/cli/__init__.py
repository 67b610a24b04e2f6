"""Command line of the package: ``mpistrat COMMAND`` or ``python -m mpistrat COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from mpistrat.cli import bench, checkpoints, diff, doctor, explain, run, timeline, watch
from mpistrat.cli.output import GROUPS, Command, print_error
from mpistrat.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit code, or 2 for bad arguments or failing output."""
    if sys.stdout is None:  # the parent has closed it, because it wants only the exit code
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the end
    try:
        arguments = make_parser().parse_args(argv)
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
        if reason is None:  # the output works, so the error has a different cause
            raise
        _forget_output()
        print(f"mpistrat: the output cannot be written: {reason}.", file=sys.stderr)
        return 2
    return code


def _why_output_fails() -> str | None:
    """Return why one more line cannot be printed, or ``None`` if it can."""
    try:
        print(flush=True)
    except OSError as reason:
        return reason.strerror
    return None


def _forget_output() -> None:
    """Discard buffered output, which Python would otherwise try to flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _MainParser(argparse.ArgumentParser):
    """Parser of ``mpistrat``, whose help shows the commands in groups."""

    def format_help(self) -> str:
        lines = ["usage: mpistrat COMMAND [options]", "", *_DESCRIPTION]
        width = max(len(command.name) for command in COMMANDS)
        for group in GROUPS:
            lines += ["", f"{group}:"]
            lines += [f"  {c.name:{width}}  {c.help}" for c in COMMANDS if c.group == group]
        lines += ["", "mpistrat COMMAND --help describes a command and its options.", ""]
        return "\n".join(lines)


_DESCRIPTION = (
    "Start programs on several MPI ranks, inspect their checkpoints and data, and find out",
    "why a job fails or is slow. --version prints the version.",
)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _MainParser(prog="mpistrat")
    parser.add_argument("--version", action="version", version=f"mpistrat {__version__}")
    commands = parser.add_subparsers(
        title="commands",
        metavar="COMMAND",
        required=True,
        parser_class=argparse.ArgumentParser,
    )
    for command in COMMANDS:
        child = commands.add_parser(
            command.name,
            help=command.help,
            description=command.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


_SHELLS = ("bash", "zsh", "tcsh")


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="the shell")


def _complete(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        print_error("completion", "shtab is not installed. Install it with: pip install shtab.")
        return 2
    parser = make_parser()
    kinds = {"file": shtab.FILE, "folder": shtab.DIRECTORY}
    for action, kind in _paths(parser):
        action.complete = kinds[kind]  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, arguments.shell) + "\n")
    return 0


_FILES = {"A", "B", "FILE", "PATH", "PNG", "PROGRAM"}
_FOLDERS = {"DIR"}
"""Placeholders of arguments that are files, and of those that are folders."""


def _paths(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.Action, str]]:
    """Yield each argument of the commands that is a path, with ``"file"`` or ``"folder"``."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _paths(child)
        elif action.metavar in _FILES:
            yield action, "file"
        elif action.metavar in _FOLDERS:
            yield action, "folder"


_COMPLETION = Command(
    "completion",
    "Print a script that lets a shell complete commands, options and files.",
    _add_completion_arguments,
    _complete,
    "other",
    """\
Let the Tab key complete commands, options and file names. The shell loads the script when it
starts. This needs the package shtab (pip install shtab).

  mpistrat completion bash > ~/.local/share/bash-completion/completions/mpistrat
  mpistrat completion zsh > ~/.zfunc/_mpistrat        (a folder of $fpath)
  mpistrat completion tcsh >> ~/.cshrc
""",
)

COMMANDS = (
    run.COMMAND,
    checkpoints.INSPECT,
    checkpoints.VERIFY,
    diff.DIFF,
    doctor.COMMAND,
    watch.COMMAND,
    explain.COMMAND,
    timeline.COMMAND,
    bench.COMMAND,
    _COMPLETION,
)
"""All commands, in the order of ``mpistrat --help``."""
