"""``python -m mpistrat`` runs the command line."""

import sys

from mpistrat.cli import main

if __name__ == "__main__":
    sys.exit(main())
