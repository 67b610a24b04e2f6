"""HDF5's filter plugins, called outside of HDF5.

A plugin is a library with one C function that encodes or decodes a chunk (``H5Z_func_t`` in the
HDF5 reference). It is called here on memory of its own, so threads may decode side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mpistrat import hdf5

__all__ = ["has_lzf", "plugin_undo", "undo_lzf"]

_REENTRANT = {"blosc", "blosc2", "bshuf", "bzip2", "lz4", "zstd"}
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


def plugin_undo(filter_id: int, values: Sequence[int]) -> Callable[[Any, int], bytes] | None:
    """Return what decodes a chunk of the filter, ``None`` where no plugin is known to. Local.

    Parameters
    ----------
    filter_id : int
    values : sequence of int
        The client data of the filter, as the data set keeps them.
    """
    function = _functions().get(filter_id)
    if function is None:
        return None
    parameters = (ctypes.c_uint * len(values))(*values)

    def undo(encoded: Any, num_bytes: int) -> bytes:
        size = ctypes.c_size_t(len(encoded))
        # The function frees this memory, and puts its own in place.
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
            if not length:
                raise ValueError(f"the filter {filter_id} cannot decode a chunk")
            return ctypes.string_at(memory, length)
        finally:
            _libc().free(memory)

    return undo


def undo_lzf(encoded: Any, num_bytes: int) -> bytes:
    """Return what LZF has encoded, by h5py's own copy of the library. Local.

    Raises
    ------
    ValueError
        If the chunk is damaged.
    """
    decoded = ctypes.create_string_buffer(num_bytes)
    length = _lzf()(bytes(encoded), len(encoded), decoded, num_bytes)
    if not length:
        raise ValueError("a chunk cannot be decoded by LZF")
    return decoded.raw[:length]


def has_lzf() -> bool:
    """Return whether `undo_lzf` can be called. Local."""
    return _lzf() is not None


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
def _lzf() -> Any:
    try:
        function = ctypes.CDLL(hdf5.extension_path()).lzf_decompress
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    function.restype = ctypes.c_uint
    return function


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc
