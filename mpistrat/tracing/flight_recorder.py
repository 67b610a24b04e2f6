"""Flight recorder: a ring of the last collectives of a channel, always on.

An entry keeps references and clock readings only, because each collective makes one. They are
formatted when the record is dumped.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import Any, Protocol

from mpistrat.system.callsite import Place
from mpistrat.tracing.spans import Recorder

_DEFAULT_LENGTH = 256


class State:
    """How far a collective has come on this rank, as the strings of a dump."""

    WAITING = "waiting"
    """This rank waits for the others to agree."""
    AGREED = "agreed"
    """All ranks brought the same, and data may move."""
    DONE = "done"
    """The call has returned on this rank."""
    REFUSED = "refused"
    """This rank could not do it: its arguments were bad, or its part of some work failed."""
    FAILED = "failed"
    """The ranks disagreed or did not come, or the call raised after the agreement."""


_WAITING = State.WAITING


class FlightEntry:
    """One collective."""

    __slots__ = (
        "agreed_ns",
        "began_ns",
        "counters",
        "ended_ns",
        "extra",
        "number",
        "place",
        "signature",
        "state",
    )

    number: int
    """Of the collective on its channel, from 0."""
    counters: tuple[int, int, int, int]
    """Calls of run, merge_call and update begun before it, and functions that failed."""
    signature: tuple[Any, ...]
    """Kind, name, number of the strategy, and further details that ranks compare."""
    extra: str
    """Text of the number that ranks compare beside it, as it may change with each call."""
    place: Place
    """The call in the user's code."""
    began_ns: int
    agreed_ns: int
    ended_ns: int
    """Readings of the monotonic clock like the two before; 0 where not reached."""
    state: str
    """One of `State`."""

    def record_on(self, recorder: Recorder, channel: str, moved: dict[str, Any]) -> None:
        """Add this collective to a timeline."""
        kind, name, *_ = self.signature
        facts = {"channel": channel, "number": self.number, "agreed_ns": self.agreed_ns} | moved
        if name is not None:
            facts["name"] = name
        recorder.add("collective", kind, self.began_ns, self.ended_ns, facts)


class FlightRecord:
    """The last collectives of one channel, in the order in which this rank came to them."""

    def __init__(self, length: int = _DEFAULT_LENGTH) -> None:
        self.entries: deque[FlightEntry] = deque(maxlen=length)
        self.channel = ""
        """A name of the channel that is equal on its ranks."""
        self._began_s = monotonic_ns() * 1e-9

    def last_agreed_s(self) -> float:
        """Return when the ranks agreed last, by the monotonic clock, from any thread."""
        # A copy: the program may add a collective meanwhile, and a deque that changes during a loop
        # raises RuntimeError.
        for entry in reversed(list(self.entries)):
            if entry.agreed_ns:
                return entry.agreed_ns * 1e-9
        return self._began_s

    def resize(self, length: int) -> None:
        """Keep `length` collectives from now on."""
        if length != self.entries.maxlen:
            self.entries = deque(self.entries, maxlen=length)

    def begin(
        self, counters: Counters, signature: tuple[Any, ...], extra: str, place: Place
    ) -> FlightEntry:
        """Add the collective that this rank is about to make."""
        entry = FlightEntry()
        entry.began_ns = monotonic_ns()
        entry.agreed_ns = entry.ended_ns = 0
        entry.state = _WAITING
        # Formatted only when the record is dumped. Most records never are.
        entry.number = counters.sequence
        entry.counters = counters.runs, counters.merge_calls, counters.updates, counters.failures
        entry.signature = signature
        entry.extra = extra
        entry.place = place
        self.entries.append(entry)
        return entry


class Counters(Protocol):
    """The counters of a channel: see `Ledger`."""

    sequence: int
    runs: int
    merge_calls: int
    updates: int
    failures: int
