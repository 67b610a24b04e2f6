"""A message: arrays of one dtype that are reduced together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.comm.pool import Pool

__all__ = ["Message"]


class Message:
    """Arrays to be reduced, and where the results go.

    Parameters
    ----------
    sources, targets : sequence of numpy.ndarray
        In C order and native byte order, of equal dtype, and of equal lengths in pairs. A target
        may be its source; else they share no memory, and the source is not written to.
    pool : Pool
        For reducers that need the arrays one behind the other.
    """

    on_device = False
    """Whether the arrays are in device memory. Then there is one."""

    def __init__(
        self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], pool: Pool
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.dtype = sources[0].dtype
        self.num_bytes = sum([source.nbytes for source in sources])
        self._pool = pool

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.num_bytes // self.dtype.itemsize

    def whole(self) -> tuple[np.ndarray, np.ndarray, Callable[[], object]]:
        """Return one source, one target, and what is to be called when that is written. Local."""
        if len(self.sources) == 1:
            return self.sources[0], self.targets[0], _nothing
        joined, split = self.joined()
        return joined, joined, split

    def joined(self) -> tuple[np.ndarray, Callable[[], object]]:
        """Return one array to reduce in place, and what is to be called then. Local."""
        if len(self.sources) == 1:
            source, target = self.sources[0], self.targets[0]
            if target is not source:
                np.copyto(target, source)
            return target, _nothing
        joined = self._pool.take((self.size,), self.dtype)
        np.concatenate([source.reshape(-1) for source in self.sources], out=joined)

        def split() -> None:
            start = 0
            for target in self.targets:
                target[...] = joined[start : start + target.size].reshape(target.shape)
                start += target.size

        return joined, split


def _nothing() -> None:
    pass
