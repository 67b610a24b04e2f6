"""The version of the package, and what else all ranks of a job must have in common."""

from pathlib import Path


def _built_version() -> str:
    """Return what setuptools-scm has found in the tags when the package was built."""
    try:
        return Path(__file__).with_name("_version.txt").read_text(encoding="ascii").strip()
    except OSError:  # a checkout that was never installed
        return "0.1.0.dev0"


__version__ = _built_version()

ORDER_VERSION = 4
"""Raised whenever an unchanged data set gets another order, so that old positions are refused."""

CHECKPOINT_FORMAT_VERSION = 2
"""The highest of the files that this version writes and reads."""

PROTOCOL_VERSION = 1
"""Of what ranks send each other, by MPI and on the side channel."""
