"""What a command of ``mpistrat`` consists of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Command"]


@dataclass(frozen=True)
class Command:
    """One command; `mpistrat.cli` lists them all."""

    name: str
    """The word after ``mpistrat``."""
    help: str
    """One line for ``mpistrat --help``."""
    add_arguments: Callable[[argparse.ArgumentParser], object]
    """Declares the arguments."""
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit code."""
