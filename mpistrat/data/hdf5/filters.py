"""HDF5 filters that threads decode outside of the library: deflate, shuffle, LZF and others.

HDF5 decodes under one global lock. These functions do not need it, and they release Python's lock
too, so that several threads decode chunks at the same time.
"""

from __future__ import annotations

import bz2
import contextlib
import ctypes
import importlib
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat import hdf5
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.native import native_library
from mpistrat.settings import settings
from mpistrat.system.cpu import current_core, own_cores

LZ4 = 32004
_ZSTD = 32015
_SYMBOLS = {LZ4: ("lz4", "LZ4_decompress_safe"), _ZSTD: ("zstd", "ZSTD_decompress")}
"""For each filter, its plugin and the function in it that decodes into given memory."""

_REENTRANT = {"blosc", "blosc2", "bshuf", "lz4", "zstd"}
"""Plugins of hdf5plugin that do not call HDF5 while they decode."""

_REVERSE = 0x0100
"""``H5Z_FLAG_REVERSE``, the flag for decoding."""

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
    """Return a function that decodes a chunk of the filter, ``None`` if there is no plugin."""
    if filter_id not in plugin_functions():
        return None

    def decode(encoded: Any, num_bytes: int) -> bytes:
        if filter_id == LZ4:
            _check_lz4_blocks(encoded)
        decoded = run_plugin(filter_id, values, _REVERSE, encoded)
        if decoded is None:
            raise ValueError(f"the filter {filter_id} cannot decode a chunk")
        return decoded

    return decode


def run_plugin(filter_id: int, values: Sequence[int], flags: int, data: Any) -> bytes | None:
    """Return what the plugin of a filter makes of `data`, ``None`` if it fails."""
    parameters = (ctypes.c_uint * len(values))(*values)
    size = ctypes.c_size_t(len(data))
    # The function frees this memory and replaces it by memory that it has allocated.
    memory = ctypes.c_void_p(_libc().malloc(max(len(data), 1)))
    try:
        ctypes.memmove(memory, bytes(data), len(data))
        length = plugin_functions()[filter_id](
            flags, len(parameters), parameters, len(data), ctypes.byref(size), ctypes.byref(memory)
        )
        # zstd returns error codes as negative sizes
        return ctypes.string_at(memory, length) if 0 < length <= sys.maxsize else None
    finally:
        _libc().free(memory)


@cache
def lz4_function(name: str) -> Any:
    """Return a function of the LZ4 in the plugin of HDF5, ``None`` if it exports none."""
    path = hdf5.plugin_libraries().get("lz4")
    return getattr(ctypes.CDLL(path), f"LZ4_{name}", None) if path else None


class Codec(NamedTuple):
    """The address of a function that decodes without HDF5."""

    name: str
    address: int


def find_codec(filter_id: int) -> Codec | None:
    """Return the codec in the plugin of a filter, for ``decode_chunks`` of compiled code."""
    name, symbol = _SYMBOLS.get(filter_id, ("", ""))
    path = hdf5.plugin_libraries().get(name)
    # The plugins contain their codecs, but some builds do not export them.
    function = getattr(ctypes.CDLL(path), symbol, None) if path else None
    if function is None:
        return None
    return Codec(name, ctypes.cast(function, ctypes.c_void_p).value or 0)


def _check_lz4_blocks(encoded: Any) -> None:
    """Check that no block of an LZ4 chunk is missing: the plugin would read past the end."""
    # The chunk begins with its size (8 bytes) and the size of a block (4). Then each block begins
    # with its own size.
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
def plugin_functions() -> dict[int, Any]:
    """Return the functions of the plugins by the number of the filter."""
    functions = {}
    for name, path in hdf5.plugin_libraries().items():
        if name in _REENTRANT:
            library = ctypes.CDLL(path)
            # Every dynamically loaded filter of HDF5 exports this function, which returns its
            # H5Z_class2_t.
            library.H5PLget_plugin_info.restype = ctypes.POINTER(_FilterClass)
            plugin = library.H5PLget_plugin_info().contents
            functions[plugin.id] = plugin.filter
    return functions


@cache
def _libc() -> Any:
    # The C library of this process, whose malloc and free the plugins use too: each side frees
    # memory of the other. Without a restype ctypes would cut the pointer to an int.
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


_Decode = Callable[[Any, int], Any]
"""Takes an encoded chunk and its final size in bytes, and undoes one filter."""

DEFLATE, SHUFFLE, FLETCHER32, BZIP2, LZF = 1, 2, 3, 307, 32000
_CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class ChunkDecoder:
    """Thread-safe decoder of the chunks of one dataset."""

    filters: tuple[_Decode, ...]
    """One function per filter, in the order in which the filters were applied."""

    def decode(self, encoded: Any, filter_mask: int, num_bytes: int) -> Any:
        """Return the `num_bytes` of a chunk; raise ValueError if it is damaged."""
        # Bit i of the mask is set if filter i was left out for this chunk.
        for number in reversed(range(len(self.filters))):
            if not filter_mask >> number & 1:
                encoded = self.filters[number](encoded, num_bytes)
        if len(encoded) != num_bytes:
            raise ValueError(f"a chunk has {len(encoded)} bytes in place of {num_bytes}")
        return encoded


def make_decoder(filters: Sequence[tuple[int, Sequence[int]]]) -> ChunkDecoder | None:
    """Return a decoder for filters, given by number and client data; ``None`` if one is unknown."""
    decoders = [_decoder_of(filter_id, values) for filter_id, values in filters]
    known = tuple(each for each in decoders if each is not None)
    return ChunkDecoder(known) if len(known) == len(decoders) else None


def _decoder_of(filter_id: int, values: Sequence[int]) -> _Decode | None:
    """Return the function that decodes one filter, ``None`` if only HDF5 can decode it."""
    if filter_id == DEFLATE:
        return _inflate
    if filter_id == SHUFFLE and values:
        return partial(_unshuffle, values[0])
    if filter_id == FLETCHER32:
        return _without_checksum
    if filter_id == BZIP2:
        return _decode_bzip2
    if filter_id == LZF and lzf_function("decompress") is not None:
        return _decode_lzf
    return plugin_decoder(filter_id, values)


_FASTEST_FIRST = ("isal.isal_zlib", "zlib_ng.zlib_ng")
"""Modules with the functions of `zlib`, which need not be installed."""

_ZLIB_HEADER = 15


def _inflate(encoded: Any, num_bytes: int) -> bytes:
    """Return the content of a zlib stream, about `num_bytes`."""
    try:
        return _decompress()(encoded, _ZLIB_HEADER, num_bytes)
    except Exception as reason:  # each library raises its own type
        raise ValueError(f"the compressed data are damaged: {reason}") from reason


@cache
def _decompress() -> Callable[[Any, int, int], bytes]:
    for name in _FASTEST_FIRST:
        with contextlib.suppress(ImportError):
            decompress: Callable[[Any, int, int], bytes] = importlib.import_module(name).decompress
            return decompress
    return zlib.decompress


def _unshuffle(item_bytes: int, shuffled: Any, num_bytes: int) -> Any:
    """Return the items from data with the first bytes of all items first, then the second, ..."""
    num_items = len(shuffled) // max(item_bytes, 1)
    if item_bytes <= 1 or num_items <= 1:
        return shuffled
    planes = np.frombuffer(shuffled, np.uint8)
    whole = np.empty(len(planes), np.uint8)
    # HDF5 shuffles only whole items, and leaves the bytes of an incomplete item at the end.
    end = num_items * item_bytes
    transpose_bytes(planes[:end].reshape(item_bytes, num_items), whole[:end])
    whole[end:] = planes[end:]
    return whole


def transpose_bytes(source: np.ndarray, target: np.ndarray) -> None:
    """Write the transpose of the 2-d array `source` of bytes to the 1-d array `target`."""
    library = native_library()
    if library is not None:
        library.transpose_bytes(source, target)
    else:
        target.reshape(source.shape[::-1])[:] = source.T


def _without_checksum(with_checksum: Any, num_bytes: int) -> Any:
    """Return the content without its Fletcher checksum; raise ValueError if that is wrong."""
    # The checksum is computed over 16-bit big-endian words.
    both = memoryview(with_checksum)
    content, stored = both[:-_CHECKSUM_BYTES], int.from_bytes(both[-_CHECKSUM_BYTES:], "little")
    first, second = fletcher_sums(content)
    # The sums are in ones' complement, where 0 and 65535 are the same number.
    if (first - (stored & 0xFFFF)) % 65535 or (second - (stored >> 16)) % 65535:
        raise ValueError("the checksum of a chunk is wrong")
    return content


def fletcher_sums(content: memoryview) -> tuple[int, int]:
    """Return the two sums of a Fletcher checksum, each modulo 65535 once it is reduced."""
    even = len(content) // 2 * 2
    words = np.frombuffer(content[:even], ">u2").astype(np.uint64)
    if even < len(content):
        words = np.append(words, np.uint64(content[-1] << 8))
    return int(words.sum()), int(np.dot(words, _weights(len(words))))


@lru_cache(maxsize=4)
def _weights(num_words: int) -> np.ndarray:
    """Return the weight of each word in the second sum, reduced so that no sum overflows."""
    weights: np.ndarray = np.arange(num_words, 0, -1, dtype=np.uint64) % np.uint64(65535)
    return weights


def _decode_bzip2(encoded: Any, num_bytes: int) -> bytes:
    """Return the content of a bzip2 stream."""
    # The plugin, and so HDF5, would never return from a stream whose end is missing.
    try:
        return bz2.decompress(encoded)
    except (OSError, ValueError) as reason:
        raise ValueError(f"the compressed data are damaged: {reason}") from reason


def _decode_lzf(encoded: Any, num_bytes: int) -> bytes:
    """Return the content of data that LZF has encoded."""
    # A filter applied before LZF, such as a checksum, may have made the chunk larger.
    room = num_bytes + num_bytes // 64 + 64
    decoded = ctypes.create_string_buffer(room)
    length = lzf_function("decompress")(bytes(encoded), len(encoded), decoded, room)
    if not length:
        raise ValueError("a chunk cannot be decoded by LZF")
    return decoded.raw[:length]


@cache
def lzf_function(name: str) -> Any:
    """Return a function of h5py's own copy of LZF, ``None`` if it has none."""
    try:
        function = getattr(ctypes.CDLL(hdf5.extension_path()), f"lzf_{name}")
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    function.restype = ctypes.c_uint
    return function


def missing_filters(dataset: Any) -> list[str]:
    """Return the names of the filters of `dataset` that this HDF5 lacks."""
    numbers = [number for number, _ in hdf5.filters_of(dataset)]
    return [name_of_filter(each) for each in numbers if not hdf5.h5py().h5z.filter_avail(each)]


def name_of_filter(number: int) -> str:
    """Return the name of a filter as users know it."""
    return _FILTER_NAMES.get(number, f"filter {number}")


def install_filter(name: str) -> str:
    """Return a sentence that says how to make a filter available."""
    if name in _OF_HDF5PLUGIN:
        return "Install it with: pip install hdf5plugin."
    return "Let HDF5_PLUGIN_PATH name the folder of its plugin, or write the file without it."


_FILTER_NAMES = {
    1: "gzip",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    307: "bzip2",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32026: "blosc2",
}
"""Names by number, from the HDF Group's list of registered filters."""
_OF_HDF5PLUGIN = {"bitshuffle", "blosc", "blosc2", "bzip2", "lz4", "sz", "zfp", "zstd"}


_MAX_THREADS = 8
"""More threads do not help, because a part of reading a chunk runs in Python."""


class DecodingThreads:
    """Threads of a reader, by default as many as this rank's share of the cores."""

    # A thread is bound to its own core while it works, because a virtual machine may run two
    # threads on one core while another core is idle.

    def __init__(self) -> None:
        chosen = settings().data_threads
        self.count = min(cores_of_rank(), _MAX_THREADS) if chosen is None else chosen
        self._pool: ThreadPoolExecutor | None = None
        self._cores = own_cores()
        self._free = sorted(self._cores)
        can_bind = current_core() is not None
        # Threads are bound only if no other rank uses these cores.
        self._is_apart = can_bind and self.count <= len(self._cores) == cores_of_rank() > 1
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call `function` in a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, "mpistrat-decode")
        if self._is_apart:
            args, function = (function, *args), self._run_apart
        return self._pool.submit(function, *args)

    def _run_apart(self, function: Callable[..., None], *args: Any) -> None:
        here = current_core()
        with self._lock:
            # Prefer the core on which the thread runs already, because its caches are filled.
            core = here if here in self._free else self._free[0]
            self._free.remove(core)
        try:
            _bind({core})
            function(*args)
        finally:
            # A waiting thread must not stay bound to a core that a different thread may get next.
            _bind(self._cores)
            with self._lock:
                self._free.append(core)

    def close(self) -> None:
        """End the threads, and cancel calls that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _bind(cores: Iterable[int]) -> None:
    """Let this thread run only on `cores`."""
    with contextlib.suppress(OSError):  # this job may have lost the cores
        os.sched_setaffinity(0, cores)
