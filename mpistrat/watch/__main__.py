"""``python -m mpistrat.watch PROGRAM``: run a program under the watch, one process a rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import find_launcher
from mpistrat.settings import environment
from mpistrat.watch.choices import add_watch_arguments, variables_of


def main(argv: Sequence[str]) -> int:
    """Run ``python -m mpistrat.watch``: become the program. Returns only for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.watch",
        description="Run a program under the watch, one process a rank, as in: "
        "srun python -m mpistrat.watch solver.py",
    )
    add_watch_arguments(parser)
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", metavar="PROGRAM", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    arguments = parser.parse_args(argv)
    try:
        changes = variables_of(arguments)
        if not arguments.is_module and not Path(arguments.program).exists():
            raise LaunchError(f"There is no program {arguments.program!r}.")
        if find_launcher().is_inherited:
            raise LaunchError("This process was started by a rank, and is not a rank.")
    except LaunchError as error:
        print(f"mpistrat watch: {error}", file=sys.stderr)
        return 2
    flag = ["-m"] if arguments.is_module else []
    command = [sys.executable, *flag, arguments.program, *arguments.arguments]
    # The program replaces this process: one more between launcher and rank would have to pass on
    # signals and the exit code.
    return os.execve(sys.executable, command, dict(environment()) | changes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
