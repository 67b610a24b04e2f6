"""Process state: what all that watches over this process has in common."""

from __future__ import annotations

from mpistrat.epochs.beacon import Beacon
from mpistrat.epochs.channel import Channel

__all__ = ["own"]


class ProcessState:
    """What is known of this process.

    Attributes
    ----------
    channels : list of Channel
        Those whose other ranks must hear of the end of this one.
    beacon : Beacon or None
        What answers for this process, once it is asked to.
    has_left : bool
        Whether the main program is over.
    """

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.beacon: Beacon | None = None
        self.has_left = False


own = ProcessState()
