"""Compiled C extension, and other libraries that setup.py builds if there is a compiler."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
from pathlib import Path
from typing import Any

__all__ = ["HOW_TO_COMPILE", "find_library", "missing_libraries", "native_library"]

HOW_TO_COMPILE = (
    "Install a C compiler, such as gcc, and the headers of Python, then install mpistrat again "
    "from its source folder: pip install --force-reinstall --no-deps --no-cache-dir -e ."
)
"""What to do if `missing_libraries` names any."""


@functools.lru_cache
def native_library() -> Any:
    """Return the compiled module, ``None`` if there is none for the current sources."""
    try:
        module: Any = importlib.import_module("mpistrat._native")
    except ImportError:
        return None
    # Python may find the module of a different installation.
    is_here = Path(module.__file__).parent == Path(__file__).parents[1]
    return module if is_here and _digest() == module.DIGEST else None


def _digest() -> str:
    """Return the digest of the C sources, as setup.py computes it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def missing_libraries() -> tuple[str, ...]:
    """Return which work is done without compiled code, because installation found no compiler."""
    missing = []
    if native_library() is None:
        missing.append("reductions in shared memory")
    if not any(Path(__file__).parents[1].glob("optimizers/_host_kernels*.so")):
        missing.append("optimizer updates")
    return tuple(missing)


def find_library(folder: Path, stem: str, digest: str) -> str | None:
    """Return the path of the library `stem` whose ``mpistrat_digest`` is `digest`, if any."""
    made_from = ctypes.c_char * len(digest)
    # A folder that is shared by different kinds of machines holds a library for each of them.
    for path in sorted(folder.glob(f"{stem}*.so")):
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(path))
            if made_from.in_dll(library, "mpistrat_digest").value == digest.encode():
                return str(path)
    return None
