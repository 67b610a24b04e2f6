"""Process state: channels, monitor and exit of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from mpistrat.agreement.channel import Channel
from mpistrat.failures.monitor import Monitor


class _ProcessState:
    """State of this process that the modules of this folder share."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        """Channels whose other ranks must learn when this rank ends."""
        self.lost: set[int] = set()
        """Ranks of the job that are known to be dead, as far as this rank has to know."""
        self.outlives_losses = False
        """Whether this process ends normally if ranks are lost at the end of the program."""
        self.when_all_have_ended: Callable[[], object] = bool
        """Called once all ranks are known to have ended without failure."""
        self.world_size = 1
        """Number of ranks of the job."""
        self.monitor: Monitor | None = None
        """Answers for this process, once it has a channel with other ranks."""
        self.has_left = False
        """Whether the main program is over."""
        self.is_fork = False
        """Whether this process is a fork of a rank, and not a rank."""
        self.is_over: Callable[[], bool] = bool
        """Returns whether the transport can no longer be used (MPI is finalized)."""
        self.open_last_channel: Callable[[float, bool], Channel | None] | None = None
        """Opens a channel of all ranks for a rank that ends before it has any."""
        self.abort: Callable[[int], None] = os._exit
        """Ends every process of the job."""
        self._fork = _Fork()
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._become_fork,
        )

    def can_communicate(self) -> bool:
        """Return whether this process may still communicate with other ranks."""
        return not self.is_fork and not self.has_left and not self.is_over()

    def _before_fork(self) -> None:
        # The pipe is per thread, because two threads may fork at the same time.
        self._fork.pipe = None
        # The child copies results that are in shared memory. The parent must wait until it has.
        if any(channel.pool.lends_shared_memory() for channel in self.channels):
            self._fork.pipe = os.pipe()

    def _after_fork(self) -> None:
        if self._fork.pipe is not None:
            read, write = self._fork.pipe
            # Close our end. Otherwise the read below would wait forever if the new process ends
            # before it has written.
            os.close(write)
            os.read(read, 1)  # returns nothing if the new process has ended
            os.close(read)

    def _become_fork(self) -> None:
        self.is_fork, self.monitor = True, None
        for channel in self.channels:
            channel.close_in_fork()
        if self._fork.pipe is not None:
            read, write = self._fork.pipe
            # The copies are made, so the parent may now write to the shared memory again.
            os.write(write, b"x")
            os.close(write)
            os.close(read)


class _Fork(threading.local):
    """State of the fork that a thread is making."""

    pipe: tuple[int, int] | None = None
    """Pipe over which the new process reports that it has copied the shared memory."""


process = _ProcessState()
