"""XXH3 digests of values; the only user of xxhash.

They show that ranks hold the same bytes, or that a file is not damaged. They do not protect against
changes on purpose.
"""

from __future__ import annotations

import numpy as np
import xxhash

xxh3_128 = xxhash.xxh3_128
xxh3_128_hexdigest = xxhash.xxh3_128_hexdigest


def digest_of_values(array: np.ndarray) -> int:
    """Return a 64-bit digest of the bytes of the values, in C order."""
    if array.dtype.names:  # the bytes between fields are undefined
        return mixed_digest([digest_of_values(array[name]) for name in array.dtype.names])
    if not array.dtype.itemsize:
        return 0
    return xxhash.xxh3_64_intdigest(_value_bytes(array).data)


def mixed_digest(digests: list[int]) -> int:
    """Return a 64-bit digest of several digests, which depends on their order."""
    return xxhash.xxh3_64_intdigest(np.array(digests, np.uint64).data)


def _value_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of `array` that hold its values, in native byte order."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
    if flat.dtype.char not in "gG" or np.finfo(np.longdouble).nmant != 63:
        return flat.view(np.uint8)
    # x86 uses 10 of the 16 bytes of a long double. The other bytes are undefined.
    reals = flat.view(np.longdouble)
    raw = reals.view(np.uint8).reshape(reals.size, reals.itemsize)
    return np.ascontiguousarray(raw[:, :10])
