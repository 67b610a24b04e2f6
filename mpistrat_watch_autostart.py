"""Start of the watch by ``MPISTRAT_WATCH_AFTER_S``, for jobs whose commands cannot be changed.

``mpistrat_watch.pth`` imports this at the start of Python, only if the variable is set. It must not
import the package, which would change how the program starts and ends.
"""

import importlib
import importlib.util
import sys
from pathlib import Path


def begin() -> None:
    """Start the watch in this process, if it is a rank."""
    package = importlib.util.find_spec("mpistrat")
    if package is None or package.origin is None:
        return
    folder = str(Path(package.origin).parent / "watch" / "startup")
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module("mpistrat_watch_rank")
    finally:
        sys.path.remove(folder)
    module.begin()
