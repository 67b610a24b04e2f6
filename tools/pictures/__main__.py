"""Draw the pictures of the documentation.

    python -m tools.pictures                    # all, from the recorded runs
    python -m tools.pictures --record           # make the runs again, then draw
    python -m tools.pictures --record restart   # only one of them

`make pictures` and `make pictures RECORD=1` do it.
"""

import argparse
import sys

from tools.pictures.catalog import PICTURES


def main() -> int:
    """Draw; return the exit code."""
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as gallery/kmeans")
    parser.add_argument("--record", action="store_true", help="make the runs again (minutes)")
    arguments = parser.parse_args()
    known = {picture.name: picture for picture in PICTURES}
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}: use {', '.join(known)}")
    for name in arguments.names or known:
        if arguments.record and known[name].record is not None:
            print(f"recording {name}", flush=True)
            known[name].run()
        known[name].write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
