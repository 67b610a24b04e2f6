"""The values of a file on their way to all ranks: one reads, each checks a part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.checkpoint.digesting import Digester, Digests
from mpistrat.checkpoint.pieces import BYTES_PER_PIECE
from mpistrat.checkpoint.reader import CheckpointReader
from mpistrat.collectives import Collectives
from mpistrat.comm.background import Background
from mpistrat.errors import CheckpointCorruptError
from mpistrat.variables.broadcasting import pieces

__all__ = ["Stored", "distribute", "share_of_rank", "stored_in"]


@dataclass(frozen=True)
class Stored:
    """What a file has of one array. Equal on all ranks."""

    shape: tuple[int, ...]
    dtype: np.dtype
    digest: str
    """Of the bytes as they travel; empty where rank 0 checks it while it unpacks them."""

    @classmethod
    def from_json(cls, value: Any) -> Stored:
        """Return what `as_json` took apart. Local."""
        shape, dtype, digest = value
        return cls(tuple(shape), np.dtype(dtype), digest)

    def as_json(self) -> list[Any]:
        """Return a JSON value. Local."""
        return [self.shape, self.dtype.str, self.digest]


def stored_in(reader: CheckpointReader) -> dict[str, Stored]:
    """Return what an open file has, by path. Local."""
    return {
        name: Stored(info.shape, info.dtype, info.digest if reader.is_plain(name) else "")
        for name, info in reader.variables.items()
    }


def distribute(
    ranks: Collectives,
    what: str,
    path: str,
    stored: Mapping[str, Stored],
    reader: CheckpointReader | None,
) -> dict[str, np.ndarray]:
    """Return the arrays of a file on every rank, once their digests are right. **Collective**.

    Rank 0 reads ahead in a thread, and broadcasts piece by piece. Each rank computes the digests
    of its share of the arrays beside that.

    Parameters
    ----------
    ranks : Collectives
    what : str
        The public function, for messages.
    path : str
    stored : dict of str to Stored
    reader : CheckpointReader or None
        The open file on rank 0.

    Raises
    ------
    CheckpointCorruptError
        On every rank, if an array is damaged; the message names all of these.
    """
    arrays = {name: np.empty(each.shape, each.dtype) for name, each in stored.items()}
    sizes = {name: array.nbytes for name, array in arrays.items() if stored[name].digest}
    own = share_of_rank(sizes, ranks.rank, ranks.size)
    digesters: dict[str, Digester] = {}
    damage: dict[str, str] = {}
    with Digests() as digests, _ReadingAhead(reader, arrays) as ahead:
        with ranks.call(what, path) as call:
            call.agree("the values")
            for name, array in arrays.items():
                if name in own:
                    digesters[name] = digests.begin()
                for piece in pieces(array, BYTES_PER_PIECE):
                    ahead.wait_for_next(name, damage)
                    call.channel.transport.broadcast(piece, 0)
                    if name in own:
                        digesters[name].update(piece, is_view=True)
        for name, digester in digesters.items():
            if digester.result() != stored[name].digest:
                damage.setdefault(
                    name,
                    f"The checkpoint {path} is damaged at {name}: the values do not have the "
                    "digest that was stored with them.",
                )
    found: dict[str, str] = {}
    for of_rank in ranks.gather_json(damage):
        found = {**of_rank, **found}
    if found:
        raise CheckpointCorruptError("\n".join(found[name] for name in sorted(found)))
    return arrays


def share_of_rank(sizes: Mapping[str, int], rank: int, size: int) -> set[str]:
    """Return the arrays that a rank checks: each rank about as many bytes. Local."""
    load = [0] * size
    own = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        of_rank = load.index(min(load))
        load[of_rank] += sizes[name]
        if of_rank == rank:
            own.add(name)
    return own


class _ReadingAhead:
    """Fills arrays from a file in a thread; does nothing where there is no file."""

    def __init__(self, reader: CheckpointReader | None, arrays: Mapping[str, np.ndarray]) -> None:
        self._thread = Background("mpistrat-reading")
        self._waits: deque[Callable[[], None]] = deque()
        if reader is not None:
            for name, array in arrays.items():
                at = 0
                for piece in pieces(array, BYTES_PER_PIECE):
                    self._submit(reader, name, array, piece, at)
                    at += piece.nbytes

    def _submit(
        self, reader: CheckpointReader, name: str, array: np.ndarray, piece: np.ndarray, at: int
    ) -> None:
        def read() -> None:
            if reader.is_plain(name):
                reader.read_plain(name, piece, at)
            elif at == 0:  # what has to be unpacked is read as a whole
                array[...] = reader.read_variable(name)

        self._waits.append(self._thread.submit(read))

    def wait_for_next(self, name: str, damage: dict[str, str]) -> None:
        """Wait for the next piece, which is of the array `name`, and note what is wrong. Local."""
        if self._waits:
            try:
                self._waits.popleft()()
            except CheckpointCorruptError as error:
                damage[name] = str(error)

    def __enter__(self) -> _ReadingAhead:
        return self

    def __exit__(self, *_: object) -> None:
        # The file may be closed only when nobody reads it any more.
        self._thread.drain()
        self._thread.close()
