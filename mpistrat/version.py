"""The version of the package, and of the formats that all ranks of a job must share."""

from pathlib import Path


def _built_version() -> str:
    """Return the version that setuptools-scm found in the tags when the package was built."""
    try:
        return Path(__file__).with_name("_version.txt").read_text(encoding="ascii").strip()
    except OSError:  # a checkout that was never installed
        return "0.1.0.dev0"


__version__ = _built_version()

ORDER_VERSION = 4
"""Incremented when the order of an unchanged dataset changes, so that old positions raise."""

CHECKPOINT_FORMAT_VERSION = 2
"""The only format version of the files that this version writes and reads."""

PROTOCOL_VERSION = 1
"""Version of the data that ranks send each other, by MPI and on the side channel."""
