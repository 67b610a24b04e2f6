"""Flight recorder: ring buffer of the last collectives of a channel, which is always on.

An entry keeps only references and clock readings, because each collective creates one. They are
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
    """Progress of a collective on this rank, as strings for a dump."""

    WAITING = "waiting"
    """This rank waits for the others to agree."""
    AGREED = "agreed"
    """All ranks have voted for the same call, and data may move."""
    DONE = "done"
    """The call has returned on this rank."""
    REFUSED = "refused"
    """This rank could not take part: its arguments were bad, or its part of the work failed."""
    FAILED = "failed"
    """The ranks disagreed or did not arrive, or the call raised after the agreement."""


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
    """Number of the collective on its channel, from 0."""
    counters: tuple[int, int, int, int]
    """Numbers of calls of run, merge_call and update before it, and of functions that failed."""
    signature: tuple[Any, ...]
    """Kind, name, number of the strategy, and further details that ranks compare."""
    extra: str
    """Text of a further number that ranks compare, because it may change with each call."""
    place: Place
    """Place of the call in the user's code."""
    began_ns: int
    agreed_ns: int
    ended_ns: int
    """Reading of the monotonic clock, like the two before; 0 if the call has not got that far."""
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
    """Last collectives of one channel, in the order in which this rank reached them."""

    def __init__(self, length: int = _DEFAULT_LENGTH) -> None:
        self.entries: deque[FlightEntry] = deque(maxlen=length)
        self.channel = ""
        """Name of the channel, the same on all of its ranks."""
        self._began_s = monotonic_ns() * 1e-9

    def last_agreed_s(self) -> float:
        """Return when the ranks last agreed, by the monotonic clock. From any thread."""
        # Copy the deque: the program may add a collective at the same time, and a deque that
        # changes during a loop raises RuntimeError.
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
        # Nothing is formatted before the record is dumped. Most records never are.
        entry.number = counters.sequence
        entry.counters = counters.runs, counters.merge_calls, counters.updates, counters.failures
        entry.signature = signature
        entry.extra = extra
        entry.place = place
        self.entries.append(entry)
        return entry


class Counters(Protocol):
    """Counters of a channel: see `Ledger`."""

    sequence: int
    runs: int
    merge_calls: int
    updates: int
    failures: int
