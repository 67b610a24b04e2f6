"""Applying the filters of a chunk outside of HDF5, whose lock lets one thread encode at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpistrat.data.plugin_filters import plugin_apply

__all__ = ["ChunkEncoder", "make_encoder"]

_Apply = Callable[[Any], Any]
"""Takes the bytes of a chunk, returns them with one filter more."""

_DEFLATE, _SHUFFLE = 1, 2


@dataclass(frozen=True)
class ChunkEncoder:
    """Encodes the chunks of one data set. Threads may share it."""

    applies: tuple[_Apply, ...]
    """One for each filter, in the order in which they are applied."""

    def encode(self, chunk: np.ndarray) -> bytes | None:
        """Return what stands for `chunk` in a file. Local; other threads may run.

        ``None`` where a filter declines, because it cannot make the chunk smaller.
        """
        encoded: Any = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
        try:
            for apply in self.applies:
                encoded = apply(encoded)
        except ValueError:
            return None
        return bytes(encoded)


def make_encoder(filters: Sequence[tuple[int, Sequence[int]]]) -> ChunkEncoder | None:
    """Return an encoder, ``None`` where there is a filter that only HDF5 can apply. Local.

    Parameters
    ----------
    filters : sequence of (int, sequence of int)
        Number and client data of each, as a data set in a file has them.
    """
    applies = [_apply(filter_id, values) for filter_id, values in filters]
    known = tuple(apply for apply in applies if apply is not None)
    return ChunkEncoder(known) if len(known) == len(applies) else None


def _apply(filter_id: int, values: Sequence[int]) -> _Apply | None:
    if filter_id == _DEFLATE and values:
        return partial(zlib.compress, level=values[0])
    if filter_id == _SHUFFLE and values:
        return partial(_shuffled, values[0])
    return plugin_apply(filter_id, values)


def _shuffled(item_bytes: int, whole: Any) -> Any:
    """Return first the first byte of each item, then the second, and so on."""
    num_items = len(whole) // max(item_bytes, 1)
    if item_bytes <= 1 or num_items <= 1:
        return whole
    content = np.frombuffer(whole, np.uint8)
    end = num_items * item_bytes
    planes = np.empty(len(content), np.uint8)
    planes[:end].reshape(item_bytes, num_items)[:] = content[:end].reshape(num_items, item_bytes).T
    planes[end:] = content[end:]
    return planes.data
