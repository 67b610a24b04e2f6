"""Names, signatures and loops of the installed CuPy, as JSON for the stand-in of the tests.

    python -m tools.cupy_names > tests/standin/cupy/names.json

Needs the CuPy wheel, but no GPU.
"""

import inspect
import json
import sys
from typing import Any

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "both",
    inspect.Parameter.VAR_POSITIONAL: "rest",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "keywords",
}


def names_of(cupy: Any) -> dict[str, Any]:
    """Return what a program can use of the module `cupy`."""
    functions, ufuncs, others = {}, {}, []
    for name in sorted(vars(cupy)):
        found = getattr(cupy, name)
        if name.startswith("_") or inspect.ismodule(found):
            continue
        if isinstance(found, cupy.ufunc):
            ufuncs[name] = [found.nin, found.nout, found.types]
        elif callable(found) and not inspect.isclass(found):
            functions[name] = _signature(found)
        else:
            others.append(name)
    methods = {name for name in dir(cupy.ndarray) if name[0] != "_" or name.endswith("__")}
    methods -= {"__buffer__", "__release_buffer__"}  # which Python 3.12 adds
    return {
        "version": cupy.__version__,
        "functions": functions,
        "ufuncs": ufuncs,
        "others": others,
        "ndarray": sorted(methods),
    }


def _signature(function: Any) -> list[list[Any]] | None:
    """Return name, kind and whether it may be left out of each parameter; None if unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled without one
        return None
    return [[p.name, _KINDS[p.kind], p.default is not p.empty] for p in parameters]


if __name__ == "__main__":
    import cupy

    json.dump(names_of(cupy), sys.stdout, indent=None, separators=(",", ":"))
    print()
