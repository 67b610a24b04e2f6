"""Command line of the package: ``mpistrat COMMAND`` or ``python -m mpistrat COMMAND``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mpistrat.cli.parser import make_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, or 2 for bad arguments and failing output."""
    if sys.stdout is None:  # closed by the parent, which wants only the exit code
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
