"""Filters of hdf5plugin, called without HDF5 and its lock."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from mpistrat import hdf5

_LZ4, _ZSTD = 32004, 32015
_SYMBOLS = {_LZ4: ("lz4", "LZ4_decompress_safe"), _ZSTD: ("zstd", "ZSTD_decompress")}
"""Of a filter its plugin, and the function there that decodes to a given place."""

_REENTRANT = {"blosc", "blosc2", "bshuf", "lz4", "zstd"}
"""Plugins of hdf5plugin that ask nothing of HDF5 while they decode."""

_REVERSE = 0x0100
"""``H5Z_FLAG_REVERSE``: decode."""

_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_void_p),
)


class _FilterClass(ctypes.Structure):
    """``H5Z_class2_t``."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.c_int),
        ("encoder_present", ctypes.c_uint),
        ("decoder_present", ctypes.c_uint),
        ("name", ctypes.c_char_p),
        ("can_apply", ctypes.c_void_p),
        ("set_local", ctypes.c_void_p),
        ("filter", _FUNCTION),
    )


def plugin_decoder(filter_id: int, values: Sequence[int]) -> Callable[[Any, int], Any] | None:
    """Return what decodes a chunk of the filter, ``None`` where no plugin is known to."""
    function = _functions().get(filter_id)
    if function is None:
        return None
    parameters = (ctypes.c_uint * len(values))(*values)

    def decode(encoded: Any, num_bytes: int) -> bytes:
        if filter_id == _LZ4:
            _check_lz4_blocks(encoded)
        size = ctypes.c_size_t(len(encoded))
        # The function frees this memory, and returns other memory in its place.
        memory = ctypes.c_void_p(_libc().malloc(max(len(encoded), 1)))
        try:
            ctypes.memmove(memory, bytes(encoded), len(encoded))
            length = function(
                _REVERSE,
                len(parameters),
                parameters,
                len(encoded),
                ctypes.byref(size),
                ctypes.byref(memory),
            )
            if not 0 < length <= sys.maxsize:  # zstd returns its error codes, as negative sizes
                raise ValueError(f"the filter {filter_id} cannot decode a chunk")
            return ctypes.string_at(memory, length)
        finally:
            _libc().free(memory)

    return decode


class Codec(NamedTuple):
    """A function that decodes without HDF5, by its address."""

    name: str
    address: int


def find_codec(filter_id: int) -> Codec | None:
    """Return the codec of a plugin that lends it, for ``decode_chunks`` of compiled code."""
    name, symbol = _SYMBOLS.get(filter_id, ("", ""))
    path = hdf5.plugin_libraries().get(name)
    # The plugins bring their codecs, and some builds of them hide these.
    function = getattr(ctypes.CDLL(path), symbol, None) if path else None
    if function is None:
        return None
    return Codec(name, ctypes.cast(function, ctypes.c_void_p).value or 0)


def _check_lz4_blocks(encoded: Any) -> None:
    """Make sure that all blocks of a chunk of LZ4 are there, beyond which its plugin reads."""
    # The size of the chunk (8 bytes) and of a block (4), then before each block its own size.
    try:
        num_bytes, block_bytes = struct.unpack_from(">QI", encoded)
        position = struct.calcsize(">QI")
        for _ in range(-(-num_bytes // min(block_bytes, num_bytes))):
            (size,) = struct.unpack_from(">I", encoded, position)
            position += struct.calcsize(">I") + size
    except (struct.error, ZeroDivisionError):
        position = sys.maxsize
    if position > len(encoded):
        raise ValueError("the end of a chunk of LZ4 is missing")


@cache
def _functions() -> dict[int, Any]:
    """Return the functions of the plugins by the number of the filter."""
    functions = {}
    for name, path in hdf5.plugin_libraries().items():
        if name in _REENTRANT:
            library = ctypes.CDLL(path)
            library.H5PLget_plugin_info.restype = ctypes.POINTER(_FilterClass)
            plugin = library.H5PLget_plugin_info().contents
            functions[plugin.id] = plugin.filter
    return functions


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc
