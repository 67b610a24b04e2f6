"""Start of the watch in each rank, and then of the ``sitecustomize`` that this one hides.

This folder is on ``PYTHONPATH`` of the ranks that ``mpistrat watch`` starts.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    # Otherwise the search would find this file again.
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    importlib.import_module("mpistrat_watch_rank").begin()
finally:
    _run_hidden()
