"""``python -m mpistrat`` is the command line."""

import sys

from mpistrat.cli import main

if __name__ == "__main__":
    sys.exit(main())
