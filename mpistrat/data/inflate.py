"""Undoing deflate, with the fastest library at hand."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["inflate"]

_FASTEST_FIRST = ("isal.isal_zlib", "zlib_ng.zlib_ng")
"""Modules with the functions of `zlib`, which need not be installed."""

_ZLIB_HEADER = 15


def inflate(encoded: Any, num_bytes: int) -> bytes:
    """Return the `num_bytes` or so that a stream of zlib holds. Local; other threads may run.

    Raises
    ------
    ValueError
        If the stream is damaged.
    """
    try:
        return _decompress()(encoded, _ZLIB_HEADER, num_bytes)
    except Exception as reason:  # each library has an error of its own
        raise ValueError(f"the compressed data are damaged: {reason}") from reason


@cache
def _decompress() -> Callable[[Any, int, int], bytes]:
    for name in _FASTEST_FIRST:
        with contextlib.suppress(ImportError):
            decompress: Callable[[Any, int, int], bytes] = importlib.import_module(name).decompress
            return decompress
    return zlib.decompress
