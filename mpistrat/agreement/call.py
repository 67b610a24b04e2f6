"""One collective call, from the check of its arguments to the last byte."""

from __future__ import annotations

import builtins
import struct
import sys
from time import monotonic_ns
from types import TracebackType
from typing import Any, TypeVar

from mpistrat import errors
from mpistrat.agreement.channel import Channel, Outcome, Status
from mpistrat.system.callsite import call_site, failure_site
from mpistrat.system.text import format_detail, text_of
from mpistrat.tracing.flight_recorder import FlightEntry, State, users_place
from mpistrat.tracing.spans import active, mark

__all__ = ["AllOrNone", "Call"]

_C = TypeVar("_C", bound="Call")

_CALL, _ALL_CALL, _AGREED, _DONE = Status.CALL, Outcome.ALL_CALL, State.AGREED, State.DONE
"""Not looked up in their classes at each collective."""


class Call:
    """Context manager around a collective call.

    The body checks the arguments, then calls `agree`, then moves data. Where the check raises
    on this rank, the rank tells the others in place of agreeing: if all ranks refuse, each
    raises its own error and the strategy stays usable; if only some do, the others get an
    `EpochMismatchError` that names them.
    """

    def __init__(
        self,
        channel: Channel,
        kind: str,
        name: str | None = None,
        timeout_s: float | None = None,
        owner: int = 0,
    ) -> None:
        self.channel = channel
        self.kind = kind
        self.name = name
        self.timeout_s = channel.timeout_s if timeout_s is None else timeout_s
        self.owner = owner
        self._agreed = False
        self._entry: FlightEntry | None = None
        self.moved: dict[str, Any] = {}
        """What the timeline shall show of the data: bytes, and what moves them."""
        self._extra = 0
        self._extra_words = ""

    def __enter__(self: _C) -> _C:
        if not self.channel.lock.acquire(blocking=False):
            raise errors.ContextError(
                f"{self.kind} was called while another thread of this rank is in a collective. "
                "Make all collective calls of a strategy from one thread at a time."
            )
        try:
            self.channel.check_open()
            # Not later: here the user's frame is near, and each frame looked at costs.
            self._place = users_place(sys._getframe(2))
            self._end_mark = mark(self.kind)
        except BaseException:
            self.channel.lock.release()
            raise
        return self

    def agree(self, *details: object) -> None:
        """Make sure that every rank is in this call with equal `details`. **Collective**."""
        self.agree_on(self.signature(*details))

    def signature(self, *details: object) -> tuple[Any, ...]:
        """Return all that the ranks compare."""
        return (self.kind, self.name, self.owner, *details)

    def agree_on(self, signature: tuple[Any, ...]) -> None:
        """Do `agree` for a signature that is known already. **Collective**."""
        self._agreed = True
        channel = self.channel
        if not channel.checks:
            return
        if self._entry is not None:
            self.end(self._entry, _DONE)
        flight = channel.flight
        entry = flight.begin(channel.ledger, signature, self._extra_words, self._place)
        self._entry = entry
        if channel.vote(_CALL, signature, self.timeout_s, self._extra) is not _ALL_CALL:
            report = channel.report(self.words(*signature[3:]), call_site())
            raise channel.disagreement(channel.exchange(report))
        entry.agreed_ns = monotonic_ns()
        entry.state = _AGREED

    def begin(self, signature: tuple[object, ...]) -> FlightEntry:
        """Note in the flight record that this rank comes to its next collective."""
        if self._entry is not None:
            self.end(self._entry, State.DONE)
        channel = self.channel
        entry = channel.flight.begin(channel.ledger, signature, self._extra_words, self._place)
        self._entry = entry
        return entry

    def end(self, entry: FlightEntry, state: str) -> None:
        """Note the end of one collective of this call."""
        entry.ended_ns = monotonic_ns()
        entry.state = state
        self._entry = None
        recorder = active()
        if recorder is not None:
            entry.record_on(recorder, self.channel.flight.channel, self.moved)
            self.moved = {}

    def include(self, number: float, words: str) -> None:
        """Have `number`, which may change with each call, agreed too; `words` name it."""
        self._extra = int.from_bytes(struct.pack("d", number), "big")
        self._extra_words = words

    def words(self, *details: object) -> str:
        """Return the call as error messages show it."""
        name = f" of {self.name!r}" if self.name is not None else ""
        if self.channel.num_strategies > 1:
            name += f" (strategy {self.owner})"
        spelt = [format_detail(detail) for detail in details if detail != ()]
        return " ".join(filter(None, [self.kind + name, self._extra_words, *spelt]))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._agreed and isinstance(error, Exception) and not self.channel.closed:
                self._refuse(error)
            elif self._entry is not None:
                self.end(self._entry, _DONE if error is None else State.FAILED)
        finally:
            if self._end_mark is not None:
                self._end_mark()
            self.channel.lock.release()
            if error is not None:
                self.channel.note_end()

    def _refuse(self, error: Exception) -> None:
        """Tell the others that this rank cannot do the call."""
        if not self.channel.checks:
            return
        entry = self.begin((self.kind, self.name, self.owner, f"refused: {type(error).__name__}"))
        try:
            outcome = self.channel.vote(Status.REFUSAL, (self.kind, "refused"), self.timeout_s)
        finally:
            self.end(entry, State.REFUSED)
        if outcome is not Outcome.ALL_REFUSE:
            what = f"{self.kind} refused its arguments ({type(error).__name__}: {text_of(error)})"
            report = self.channel.report(what, call_site(), cause=True)
            self.channel.disagreement(self.channel.exchange(report))


class AllOrNone:
    """Context manager around work in which any rank may fail: then all ranks fail.

    Every rank enters together, works on its own, and learns at the end whether all succeeded.
    Ranks that failed raise their own error, the others one of the same class and text. The
    strategy stays usable. The body must not contain collectives that a failing rank would miss.
    """

    def __init__(
        self,
        channel: Channel,
        kind: str,
        name: str | None = None,
        timeout_s: float | None = None,
        owner: int = 0,
    ) -> None:
        self.channel = channel
        self._call = Call(channel, kind, name, timeout_s, owner)

    def __enter__(self) -> None:
        with self._call as call:
            call.agree("begins")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.channel.closed or (error is not None and not isinstance(error, Exception)):
            return
        call, channel = self._call, self.channel
        status = Status.CALL if error is None else Status.REFUSAL
        signature = (call.kind, call.name, call.owner, "ends")
        entry = call.begin(signature)
        state = State.FAILED
        try:
            outcome = channel.vote(status, signature, call.timeout_s)
            if outcome is Outcome.ALL_CALL or (outcome is Outcome.ALL_REFUSE and error):
                state = State.DONE
                entry.agreed_ns = monotonic_ns()
                return
            self._settle(trace, error)
        finally:
            if error is not None:
                state = State.REFUSED
            call.end(entry, state)
            channel.note_end()

    def _settle(self, trace: TracebackType | None, error: Exception | None) -> None:
        """Raise on the ranks that succeeded what those that failed have raised."""
        call, channel = self._call, self.channel
        report = channel.report(call.words("failed" if error else "succeeded"), call_site())
        report["verdict"] = [call.kind, call.name, channel.ledger.sequence]
        if error is not None:
            report |= {"error": type(error).__name__, "text": text_of(error)}
            report["what"] += f" with {type(error).__name__}"
            report["site"] = failure_site(trace)
        _raise_for_all(channel, report, error)


def _raise_for_all(channel: Channel, report: dict[str, Any], own: Exception | None) -> None:
    reports = channel.exchange(report)
    if any(each.get("verdict") != report["verdict"] for each in reports):
        raise channel.disagreement(reports)
    if own is not None:
        return
    rank, first = next((r, each) for r, each in enumerate(reports) if "error" in each)
    text = f"{first['text']} (on rank {rank} of {channel.size})"
    error = _rebuilt(first["error"], text)
    vars(error)["_caused_elsewhere"] = True
    raise error


def _rebuilt(name: str, text: str) -> Exception:
    """Return an exception of the class that another rank has raised."""
    cls: Any = getattr(errors, name, None) or getattr(builtins, name, errors.MpistratError)
    try:
        error = cls(text)
    except TypeError:
        error = None  # a class whose parameters are others than one text
    return error if isinstance(error, Exception) else errors.MpistratError(f"{name}: {text}")
