"""Encoders of chunks: the mirror of ``data/hdf5/filters.py``, which decodes them.

They release Python's lock, and do not need the lock of HDF5, so that threads encode chunks at the
same time.
"""

from __future__ import annotations

import bz2
import contextlib
import ctypes
import importlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from mpistrat.comm.pool import Pool
from mpistrat.data.hdf5.filters import (
    BZIP2,
    DEFLATE,
    FLETCHER32,
    LZ4,
    LZF,
    SHUFFLE,
    fletcher_sums,
    lz4_function,
    lzf_function,
    name_of_filter,
    plugin_functions,
    run_plugin,
    transpose_bytes,
)
from mpistrat.errors import DataError
from mpistrat.sharding import ceil_div

_Encode = Callable[[Any], Any]
"""Takes bytes, and returns them encoded, or ``None`` if they would not become shorter."""


@dataclass(frozen=True)
class ChunkEncoder:
    """Thread-safe encoder of the chunks of one dataset."""

    filters: tuple[_Encode, ...] = ()
    """One function per filter, in the order of application."""

    def encode(self, chunk: np.ndarray) -> tuple[Any, int]:
        """Return the stored bytes of a chunk in C order, and its filter mask."""
        data: Any = chunk.reshape(-1).view(np.uint8).data
        mask = 0
        for number, encode in enumerate(self.filters):
            encoded = encode(data)
            if encoded is None:
                mask |= 1 << number
            else:
                data = encoded
        return data, mask


def make_encoder(
    name: str, filters: Sequence[tuple[int, Sequence[int]]], fast_gzip: bool
) -> ChunkEncoder:
    """Return the encoder of the dataset `name`; its filters have a number and client data.

    `fast_gzip` allows the compressor of ISA-L, which must then be installed on all ranks.
    """
    memory = Pool()
    return ChunkEncoder(tuple(_encoder_of(name, *each, fast_gzip, memory) for each in filters))


def _encoder_of(
    name: str, number: int, values: Sequence[int], fast_gzip: bool, memory: Pool
) -> _Encode:
    if number == DEFLATE:
        level = values[0]
        if fast_gzip and level in _ISAL_LEVELS:
            return partial(_fast_deflate, _ISAL_LEVELS[level])
        return partial(_deflate, level)
    if number == SHUFFLE:
        return partial(_shuffle, values[0], memory)
    if number == FLETCHER32:
        return _with_checksum
    if number == BZIP2:
        return partial(_encode_bzip2, values[0] if values else 9)
    if number == LZF and lzf_function("compress") is not None:
        return _encode_lzf
    if number == LZ4 and lz4_function("compress_default") is not None:
        return partial(_encode_lz4, values[0] if values else 0, memory)
    if number in plugin_functions():
        return lambda data: run_plugin(number, values, 0, data)
    raise DataError(
        f"HDF5Writer: the filter {name_of_filter(number)} of dataset {name!r} can only be applied "
        'by HDF5 itself, in one process. Use compression="gzip" or "lzf", a filter of hdf5plugin '
        "such as hdf5plugin.LZ4() or hdf5plugin.Zstd(), or none."
    )


_ISAL_LEVELS = {1: 1, 2: 2, 3: 2, 4: 2}
"""Levels of zlib, and of ISA-L with about the same size. ISA-L has none for higher levels."""


@cache
def isal_version() -> str | None:
    """Return the version of ISA-L, ``None`` if it is not installed."""
    with contextlib.suppress(ImportError):
        return str(importlib.import_module("isal").__version__)
    return None


@cache
def _isal() -> Any:
    return importlib.import_module("isal.isal_zlib")


def _fast_deflate(level: int, data: Any) -> bytes | None:
    return _if_shorter(_isal().compress(data, level), data)


def _deflate(level: int, data: Any) -> bytes | None:
    return _if_shorter(zlib.compress(data, level), data)


def _if_shorter(encoded: bytes, data: Any) -> bytes | None:
    # HDF5 then stores the chunk without this filter, and says so in the filter mask.
    return encoded if len(encoded) < len(data) else None


def _shuffle(item_bytes: int, memory: Pool, data: Any) -> Any:
    """Return the first bytes of all items, then the second bytes, and so on."""
    num_items = len(data) // max(item_bytes, 1)
    if item_bytes <= 1 or num_items <= 1:
        return data
    items = np.frombuffer(data, np.uint8)
    shuffled = memory.take(items.shape, items.dtype)
    # HDF5 shuffles only whole items, and leaves the bytes of an incomplete item at the end.
    end = num_items * item_bytes
    transpose_bytes(items[:end].reshape(num_items, item_bytes), shuffled[:end])
    shuffled[end:] = items[end:]
    return shuffled.data


def _with_checksum(data: Any) -> bytes:
    # HDF5 folds its sums to 16 bits, which makes 65535 of a positive multiple of 65535, where a
    # remainder would be 0.
    both = [each % 65535 or 65535 * (each > 0) for each in fletcher_sums(memoryview(data))]
    if both[0] and not both[1]:  # the second sum is reduced before it is added up
        both[1] = 65535
    return bytes(data) + (both[1] << 16 | both[0]).to_bytes(4, "little")


def _encode_bzip2(level: int, data: Any) -> bytes | None:
    return _if_shorter(bz2.compress(data, level), data)


_LZ4_BLOCK_BYTES = 2**30


def _encode_lz4(block_bytes: int, memory: Pool, data: Any) -> Any:
    """Return the size of the data and of a block, then each block behind its encoded size.

    The plugin does the same, but allocates memory for each chunk. That takes more time than LZ4.
    """
    source = np.frombuffer(data, np.uint8)
    block_bytes = min(block_bytes or _LZ4_BLOCK_BYTES, len(source))
    num_blocks = ceil_div(len(source), block_bytes)
    # LZ4_compressBound of each block.
    room = len(source) + len(source) // 255 + 16 * num_blocks
    encoded = memory.take((_LZ4_HEAD.size + num_blocks * _LZ4_SIZE.size + room,), source.dtype)
    _LZ4_HEAD.pack_into(encoded.data, 0, len(source), block_bytes)
    position, compress = _LZ4_HEAD.size, lz4_function("compress_default")
    for start in range(0, len(source), block_bytes):
        block = source[start : start + block_bytes]
        begin = position + _LZ4_SIZE.size
        space = len(block) + len(block) // 255 + 16
        length = compress(_pointer(block), _pointer(encoded[begin:]), len(block), space)
        if not 0 < length < len(block):
            length = len(block)
            encoded[begin : begin + length] = block
        _LZ4_SIZE.pack_into(encoded.data, position, length)
        position = begin + length
    return encoded[:position].data


_LZ4_HEAD, _LZ4_SIZE = struct.Struct(">QI"), struct.Struct(">I")


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _encode_lzf(data: Any) -> bytes | None:
    room = len(data)
    encoded = ctypes.create_string_buffer(room)
    length = lzf_function("compress")(bytes(data), room, encoded, room)
    return encoded.raw[:length] if length else None
