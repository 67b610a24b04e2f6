"""Ctrl-C at a moment when this rank must not be torn from what it does with the others."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """Context manager in which SIGINT raises nothing, but is noted. Local.

    Attributes
    ----------
    is_asked : bool
        Whether SIGINT has come.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._previous: Any = None

    def __enter__(self) -> Interruption:
        # Only the main thread may change handlers, and only there they run.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # not where the program ignores it
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
