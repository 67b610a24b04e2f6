"""How a data set is divided among ranks."""

from __future__ import annotations

import enum

__all__ = ["AutoShardPolicy"]


class AutoShardPolicy(enum.Enum):
    """How a distributed data set is divided among ranks."""

    AUTO = "AUTO"
    """DATA, because an HDF5 file that all ranks share is the normal case."""
    DATA = "DATA"
    """Each global batch is split into contiguous parts, in rank order."""
    FILE = "FILE"
    """File f goes to rank f mod N; batches have at most ceil(B / N) examples."""
    OFF = "OFF"
    """Each rank iterates over every example, in batches of ceil(B / N)."""
