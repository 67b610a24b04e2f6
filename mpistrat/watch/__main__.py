"""``python -m mpistrat.watch PROGRAM``: run a program under the watch, one process a rank."""

import sys

from mpistrat.cli.watch import main_of_rank

if __name__ == "__main__":
    sys.exit(main_of_rank(sys.argv[1:]))
