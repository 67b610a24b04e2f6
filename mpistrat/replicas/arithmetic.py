"""Fingerprint of the arithmetic of a rank. The bits of a program's results depend on it."""

from __future__ import annotations

import functools
import hashlib
import logging
from typing import Any

import numpy as np

from mpistrat.arrays import Device, host_view, place
from mpistrat.collectives.collectives import Collectives
from mpistrat.system.text import rank_list

_logger = logging.getLogger("mpistrat")

_SIZE = 160
"""Rows and columns of matrices that are large enough for a BLAS to use all of its threads."""

_LONG = (16, 1000, 256)
"""Shape of a product whose bits depend on the number of threads. Square ones rarely do."""


def compare_arithmetic(ranks: Collectives) -> str:
    """Return the fingerprint of rank 0, and warn if other ranks differ. **Collective**."""
    found: list[str] = ranks.gather_json(fingerprint(ranks.device), "MPIStrategy")
    if len(set(found)) > 1 and ranks.rank == 0:
        groups = {each: [r for r, own in enumerate(found) if own == each] for each in found}
        lines = [f"  {rank_list(members)}: {each}" for each, members in groups.items()]
        _logger.warning(
            "Computations on these ranks give different bits, because their types of CPU or "
            "numbers of BLAS threads differ. Results depend on which rank computes a replica:\n%s",
            "\n".join(lines),
        )
    return found[0]


@functools.lru_cache
def fingerprint(device: Device) -> str:
    """Return a digest of the bits of several products, sums and exponentials on `device`."""
    digest = hashlib.blake2b(digest_size=8)
    with device.current(), np.errstate(all="ignore"):
        for dtype in (np.float32, np.float64):
            matrix = _numbers(dtype, _SIZE**2).reshape(_SIZE, _SIZE)
            a: Any = place(matrix, device)
            few = a[:16]
            rows, inner, columns = _LONG
            left, right = (place(_numbers(dtype, inner * each), device) for each in (rows, columns))
            long: Any = left.reshape(rows, inner) @ right.reshape(inner, columns)
            for result in (
                long,
                a @ a.T,
                few @ a,
                a @ a[0],
                a.sum(axis=1),
                np.exp(few),
                np.tanh(few),
            ):
                digest.update(host_view(result).tobytes())
    return digest.hexdigest()


def _numbers(dtype: type[np.floating[Any]], count: int) -> np.ndarray:
    """Return numbers between -1 and 1 that are the same on every machine."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers: np.ndarray = (state >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return numbers.astype(dtype)
