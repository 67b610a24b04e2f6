"""Libraries that setup.py has compiled from C, where a compiler was at hand."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
from pathlib import Path
from typing import Any

__all__ = ["find_library", "native_library"]


@functools.lru_cache
def native_library() -> Any:
    """Return the compiled module, ``None`` where there is none for today's sources. Local."""
    try:
        module: Any = importlib.import_module("mpistrat._native")
    except ImportError:
        return None
    # Python may find that of another installation.
    is_here = Path(module.__file__).parent == Path(__file__).parents[1]
    return module if is_here and _digest() == module.DIGEST else None


def _digest() -> str:
    """Return what tells these sources from others. setup.py computes the same."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_library(folder: Path, stem: str, digest: str) -> str | None:
    """Return the path of the library `stem` in `folder` that was made from today's source. Local.

    Parameters
    ----------
    folder : pathlib.Path
    stem : str
        The file's name up to what names the kind of machine. A folder that machines of several
        kinds share holds libraries for each of them.
    digest : str
        What the library holds as ``mpistrat_digest`` if it was made from this source.

    Returns
    -------
    str or None
        None where there is none for this machine and source.
    """
    made_from = ctypes.c_char * len(digest)
    for path in sorted(folder.glob(f"{stem}*.so")):
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(path))
            if made_from.in_dll(library, "mpistrat_digest").value == digest.encode():
                return str(path)
    return None
