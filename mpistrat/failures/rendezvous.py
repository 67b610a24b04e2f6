"""Rendezvous of all ranks before they open a channel, or leave the program without one."""

from __future__ import annotations

import json
import platform
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.errors import LaunchError
from mpistrat.mpi.survival import failed_ranks, is_revoked
from mpistrat.system.text import rank_list
from mpistrat.version import (
    CHECKPOINT_FORMAT_VERSION,
    ORDER_VERSION,
    PROTOCOL_VERSION,
    __version__,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_MASK = 2**64 - 1

_INSTALLED = (
    f"mpistrat {__version__}, order of examples {ORDER_VERSION}, checkpoint format "
    f"{CHECKPOINT_FORMAT_VERSION}, protocol {PROTOCOL_VERSION}"
)
"""What must be the same on all ranks."""


_abandoned: list[Rendezvous] = []
"""MPI may still write to the memory of those that some ranks never came to."""


class Rendezvous:
    """Nonblocking meeting of the ranks of `comm`, of which some may have left the program."""

    # Every version of the package does the same here, or ranks with different ones would hang: a
    # duplicate, and on it the MAX of three numbers. A rank can poll for as long as it likes, and
    # MPI can be finalized while others are missing.

    def __init__(self, comm: MPI.Intracomm, opens: bool, outlives_losses: bool = False) -> None:
        from mpi4py import MPI

        own = int.from_bytes(blake2b(_INSTALLED.encode(), digest_size=8).digest(), "big")
        self.rank, self.size = comm.rank, comm.size
        self.of = comm
        # Where a rank dies in Idup, Open MPI 5 may end the others by a segmentation fault. Shrink
        # outlives that, but waits for all ranks.
        self.comm: MPI.Intracomm
        """A private duplicate, once all ranks are here."""
        self._request: MPI.Request
        if outlives_losses:
            shrunk: Any = comm.Shrink()
            self.comm, self._request = shrunk, MPI.REQUEST_NULL
        else:
            self.comm, self._request = comm.Idup()
        # The MAX shows whether any rank opens a channel, and by the complement whether all versions
        # are equal.
        self._send = np.array([opens, own, _MASK - own], np.uint64)
        self._receive = np.zeros_like(self._send)
        self._op = MPI.MAX
        self._is_reducing = False

    @property
    def has_fewer(self) -> bool:
        """Whether ranks were lost before all had come, where that is known."""
        return not self._request and self.comm.size < self.size

    def is_done(self) -> bool:
        """Return whether every rank has come."""
        if not self._request.Test():
            return False
        # Not earlier: the duplicate may be used only once the request of Idup is done (MPI 4.1,
        # section 7.4.2).
        if not self._is_reducing:
            self._is_reducing = True
            self._request = self.comm.Iallreduce(self._send, self._receive, self._op)
        return bool(self._request.Test())

    def lost_ranks(self) -> list[int] | None:
        """Return the ranks that have died, or that others know to; ``None`` where all may come."""
        lost = failed_ranks(self.of)
        if not lost and not is_revoked(self.of):
            return None
        _abandoned.append(self)
        return lost

    def is_wanted(self) -> bool:
        """Return whether any rank opens a channel; if not, free the duplicate."""
        is_wanted = bool(self._receive[0])
        # Free is collective. The maximum is the same on all ranks, so all of them free it, or none
        # does.
        if not is_wanted:
            self.comm.Free()
        return is_wanted

    def check(self) -> None:
        """Raise `LaunchError` on every rank unless all run the same version. **Collective**."""
        _, largest, smallest = self._receive.tolist()
        if largest == _MASK - smallest:
            return
        facts = [_INSTALLED, str(Path(__file__).parents[1]), platform.node()]
        # JSON, because ranks with different versions are exactly the case here.
        text = json.dumps(facts).encode()
        found = [json.loads(each) for each in self._all_gather(text)]
        self.comm.Free()
        groups: dict[tuple[str, str], list[int]] = {}
        for other, (installed, folder, _) in enumerate(found):
            groups.setdefault((installed, folder), []).append(other)
        lines = [
            f"  {rank_list(ranks)}: {installed}, from {folder} on {found[ranks[0]][2]}"
            for (installed, folder), ranks in groups.items()
        ]
        error = LaunchError(
            "The ranks run different versions of mpistrat:\n" + "\n".join(lines) + "\n"
            "Start all ranks with the same installation: look at PYTHONPATH, the environment that "
            "each node activates, and copies on local disks."
        )
        error._is_reported_elsewhere = self.rank != 0
        raise error

    def _all_gather(self, text: bytes) -> list[bytes]:
        """Return the bytes of every rank, which need not agree on how to pickle."""
        lengths = np.zeros(self.size, np.int64)
        self.comm.Allgather(np.array([len(text)], np.int64), lengths)
        joined = bytearray(int(lengths.sum()))
        self.comm.Allgatherv(text, [joined, lengths.tolist()])
        ends = np.cumsum(lengths).tolist()
        return [bytes(joined[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
