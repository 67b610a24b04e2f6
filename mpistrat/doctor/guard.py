"""A process that stands by while MPI starts, because MPI may end the one that it starts in.

``python guard.py`` reads a line of JSON from standard input: the seconds that MPI has, the process
to kill when they are over, and what to say in either case. A second line says that MPI has started.
The file is run by its path, so that it takes no time to import the package.
"""

import json
import os
import select
import signal
import sys
from typing import TextIO

__all__ = ["main"]


def main(orders: TextIO = sys.stdin) -> int:
    """Wait for the end of the start, and say what came of a bad one. Local."""
    order = json.loads(orders.readline())
    ready, _, _ = select.select([orders], [], [], order["limit_s"])
    if ready and orders.readline():
        return 0
    sys.stderr.write(order["ended" if ready else "late"] + "\n")
    sys.stderr.flush()
    if not ready:
        os.kill(order["pid"], signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main())
