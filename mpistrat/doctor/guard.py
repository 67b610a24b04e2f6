"""Guard process that watches MPI start, because MPI may end the process that starts it.

``python guard.py`` reads a line of JSON from standard input: the time limit in seconds, the process
to kill after it, and what to print if the process ends or is late. A second line means that MPI has
started. The file is run by its path, so that it does not import the package.
"""

import json
import os
import select
import signal
import sys


def _main() -> int:
    """Wait until MPI has started. If it does not start, print why and return 1."""
    order = json.loads(sys.stdin.readline())
    ready, _, _ = select.select([sys.stdin], [], [], order["limit_s"])
    if ready and sys.stdin.readline():  # an empty line is the end of the process
        return 0
    sys.stderr.write(order["ended" if ready else "late"] + "\n")
    sys.stderr.flush()
    if not ready:
        os.kill(order["pid"], signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(_main())
