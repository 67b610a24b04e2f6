"""Undoing the filters of a chunk outside of HDF5, whose lock lets one thread decode at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mpistrat.data.inflate import inflate
from mpistrat.data.plugin_filters import has_lzf, plugin_undo, undo_lzf

__all__ = ["ChunkDecoder", "make_decoder"]

_Undo = Callable[[Any, int], Any]
"""Takes an encoded chunk and its final size in bytes, returns it with one filter less."""

_DEFLATE, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class ChunkDecoder:
    """Decodes the chunks of one data set. Threads may share it."""

    undos: tuple[_Undo, ...]
    """One for each filter, in the order in which they were applied."""

    def decode(self, encoded: Any, filter_mask: int, num_bytes: int) -> Any:
        """Return the `num_bytes` of a chunk. Local; other threads may run.

        Parameters
        ----------
        encoded : bytes-like
        filter_mask : int
            Bit i is set where filter i was left out for this chunk.
        num_bytes : int

        Raises
        ------
        ValueError
            If the chunk is damaged.
        """
        for number in reversed(range(len(self.undos))):
            if not filter_mask >> number & 1:
                encoded = self.undos[number](encoded, num_bytes)
        if len(encoded) != num_bytes:
            raise ValueError(f"a chunk has {len(encoded)} bytes in place of {num_bytes}")
        return encoded


def make_decoder(filters: Sequence[tuple[int, Sequence[int]]]) -> ChunkDecoder | None:
    """Return a decoder, ``None`` where there is a filter that only HDF5 knows. Local.

    Parameters
    ----------
    filters : sequence of (int, sequence of int)
        Number and client data of each, in the order in which they are applied.
    """
    undos = [_undo(filter_id, values) for filter_id, values in filters]
    known = tuple(undo for undo in undos if undo is not None)
    return ChunkDecoder(known) if len(known) == len(undos) else None


def _undo(filter_id: int, values: Sequence[int]) -> _Undo | None:
    if filter_id == _DEFLATE:
        return inflate
    if filter_id == _SHUFFLE and values:
        return partial(_unshuffled, values[0])
    if filter_id == _FLETCHER32:
        return _checked
    if filter_id == _LZF and has_lzf():
        return undo_lzf
    return plugin_undo(filter_id, values)


def _unshuffled(item_bytes: int, shuffled: Any, num_bytes: int) -> Any:
    """Return the items whole again: first came the first byte of each, then the second, ..."""
    num_items = len(shuffled) // max(item_bytes, 1)
    if item_bytes <= 1 or num_items <= 1:
        return shuffled
    planes = np.frombuffer(shuffled, np.uint8)
    whole = np.empty(len(planes), np.uint8)
    end = num_items * item_bytes
    whole[:end].reshape(num_items, item_bytes)[:] = planes[:end].reshape(item_bytes, num_items).T
    whole[end:] = planes[end:]
    return whole


def _checked(with_checksum: Any, num_bytes: int) -> Any:
    """Return the bytes before the checksum (Fletcher's, over 16-bit big-endian words)."""
    both = memoryview(with_checksum)
    content, stored = both[:-_CHECKSUM_BYTES], int.from_bytes(both[-_CHECKSUM_BYTES:], "little")
    even = len(content) // 2 * 2
    words = np.frombuffer(content[:even], ">u2").astype(np.uint64)
    if even < len(content):
        words = np.append(words, np.uint64(content[-1] << 8))
    first, second = int(words.sum()), int(np.dot(words, _weights(len(words))))
    # Sums of ones' complement: 0 and 65535 are the same number.
    if (first - (stored & 0xFFFF)) % 65535 or (second - (stored >> 16)) % 65535:
        raise ValueError("a chunk has another checksum than when it was written")
    return content


@lru_cache(maxsize=4)
def _weights(num_words: int) -> np.ndarray:
    """Return how often each word counts in the second sum, so small that no sum overflows."""
    weights: np.ndarray = np.arange(num_words, 0, -1, dtype=np.uint64) % np.uint64(65535)
    return weights
