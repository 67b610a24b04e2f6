"""Collective calls: the check of arguments, the agreement of the ranks, the outcome."""

from __future__ import annotations

import builtins
import contextlib
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic_ns
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpistrat import errors
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.departures import Overlap
from mpistrat.agreement.ledger import Outcome, Status, compared_values
from mpistrat.system.callsite import Place, call_site, failure_site, users_place
from mpistrat.system.text import format_call, is_structure, text_of
from mpistrat.tracing.flight_recorder import FlightEntry, State
from mpistrat.tracing.spans import Recorder, active, mark

_C = TypeVar("_C", bound="Call")

_LENGTH = struct.Struct("=q")
_SHORT_BYTES = 2048
"""A message of up to this many bytes is sent without asking for its length first."""

_CALL, _ALL_CALL, _AGREED, _DONE = Status.CALL, Outcome.ALL_CALL, State.AGREED, State.DONE
"""Names of the module are faster to look up than class members, in each collective."""


class Call:
    """Context manager around a collective call: first checks, then `agree`, then the data."""

    # If the check raises on this rank, the rank contributes a refusal to the round, not a call. If
    # all ranks refuse, each raises its own error and the strategy stays usable. If only some do,
    # the other ranks raise a `CollectiveMismatchError` that names them.

    _place: Place = None
    """The line of the user's code, once the call has begun."""

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
        self.own_timeout_s = timeout_s
        """The limit that the call was passed, ``None`` to use the channel's limit."""
        self.timeout_s = channel.timeout_s if timeout_s is None else timeout_s
        self.owner = owner
        self._agreed = False
        self.is_moving = False
        """Whether other ranks wait for data of this rank, which an error would deny them."""
        self._entry: FlightEntry | None = None
        self.recorder: Recorder | None = None
        """The timeline, if there is one."""
        self.moved: dict[str, Any] = {}
        """For the timeline: the number of bytes, and the reducer that moves them."""
        self._extra = 0
        self._extra_text = ""

    def __enter__(self: _C) -> _C:
        # Does the same as `take_channel` and, in `__exit__`, `leave_channel`, without method calls.
        channel = self.channel
        is_taken = channel.lock.acquire(False)
        if not is_taken or channel.inside is not None:
            self._refuse_overlap(is_taken)
        channel.inside = self.kind
        # From here on the channel is taken. Any error, even a KeyboardInterrupt, must release it,
        # or every later call raises an overlap error.
        try:
            if channel.closed is not None:
                channel.check_open(self.owner)
            # Here, not later: the user's frame is near, and each frame to look at takes time.
            self._place = users_place(sys._getframe(2))
            self.recorder = active()
            self._end_mark = None if self.recorder is None else mark(self.kind)
        except BaseException as error:
            self.leave_channel(error)
            raise
        return self

    def take_channel(self) -> None:
        """Begin, or raise a `ContextError` on all ranks inside another collective."""
        if not self.channel.enter(self.kind):
            # `enter` fails for two reasons, and the lock tells which: only the thread that is in
            # the other collective can acquire it a second time.
            is_taken = self.channel.lock.acquire(False)
            self._refuse_overlap(is_taken)

    def _refuse_overlap(self, is_taken: bool) -> NoReturn:
        """Raise because this rank is in another collective; `is_taken`: on this thread."""
        channel = self.channel
        outer, site = channel.inside or "another collective", call_site()
        if is_taken:
            channel.lock.release()
            what = f"{self.kind} was called inside of {outer}"
            remedy = (
                "A signal handler, __del__ or callback may run at any time, and on one rank alone. "
                "Have it set a flag, and make the call where every rank makes it."
            )
        else:
            what = f"{self.kind} was called while another thread of this rank was in {outer}"
            remedy = "Make all collective calls of a strategy from one thread at a time."
        error = errors.ContextError(f"{what}, at {site}. {remedy}")
        # Only the first overlap: the other ranks do not know of it yet, and one refusal is enough
        # to make the ranks differ.
        if channel.overlap is None:
            channel.overlap = Overlap(error, what, site)
        # Usually the outer call is still inside, and reports this at its end. This line reports
        # only if that call has ended in the meantime on a different thread.
        self._report_overlap()
        raise error

    def leave_channel(self, error: BaseException | None) -> None:
        """End the call, and report a collective that was called meanwhile."""
        self.channel.leave()
        if self.channel.overlap is not None:
            self.end_overlap(error)

    def end_overlap(self, error: BaseException | None) -> None:
        """Report a collective that was called inside of this one, which has ended."""
        channel = self.channel
        overlap = channel.overlap
        if overlap is None:
            return
        if error is not None and self._agreed and channel.closed is None:
            # It may have been called between two messages, for which the other ranks still wait.
            channel.leave_alone(f"{overlap.what} at {overlap.site}", overlap.what)
        self._report_overlap()
        # Other ranks may have matched this call with the second one, or the reverse.
        if error is None and (self._agreed or channel.closed is not None):
            raise errors.ContextError(str(overlap.error))

    def _report_overlap(self) -> None:
        """Contribute a refusal for a collective called within another one. **Collective**."""
        channel = self.channel
        if not channel.enter(self.kind):
            return  # the thread that is inside reports it at the end
        try:
            overlap, channel.overlap = channel.overlap, None
            if overlap is not None and channel.closed is None:
                self._bring_refusal(overlap.error, "an overlap", overlap.what, overlap.site)
        finally:
            channel.leave()

    def agree(self, *details: object) -> None:
        """Raise unless every rank makes this call with equal `details`. **Collective**."""
        # Ranks compare the `repr` of the details, which must be hashable.
        self.agree_on(self.signature(*details))
        self.is_moving = False

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Set `is_moving` within the ``with`` block, and keep it set if the block raises."""
        self.is_moving = True
        yield
        self.is_moving = False

    def signature(self, *details: object) -> tuple[Any, ...]:
        """Return the tuple that the ranks compare."""
        return (self.kind, self.name, self.owner, *details)

    def agree_on(self, signature: tuple[Any, ...]) -> None:
        """Do `agree` for a `signature` created before, and set `is_moving`. **Collective**."""
        # Set before the vote. If the vote raises, this rank has contributed to the round already,
        # and `__exit__` must not start a second round with a refusal.
        self._agreed = True
        channel = self.channel
        if not channel.checks:
            if channel.departures.found:
                channel.check_complete(self.kind)
            # The ranks have not compared the calls, but the other ranks wait for data from here on
            # anyway.
            self.is_moving = True
            return
        # A call may consist of several collectives, each with its own entry.
        if self._entry is not None:
            self.end(self._entry, _DONE)
        flight = channel.flight
        entry = flight.begin(channel.ledger, signature, self._extra_text, self._place)
        self._entry = entry
        if channel.vote(_CALL, signature, self.timeout_s, self._extra) is not _ALL_CALL:
            raise self.disagreement(signature)
        self.is_moving = True
        entry.agreed_ns = monotonic_ns()
        entry.state = _AGREED

    def agree_with(self, signature: tuple[Any, ...], own: bytes) -> list[bytes]:
        """Do `agree_on`, and return the bytes of every rank, in rank order. **Collective**."""
        # The bytes are mostly few. Then the agreement carries them, or one message.
        transport = self.channel.transport
        joined = np.frombuffer(_LENGTH.pack(len(own)) + own, np.uint8)
        piggyback = transport.piggyback if self.channel.checks else None
        room = _SHORT_BYTES if piggyback is None else piggyback.room
        # Attached before the agreement, which then carries the first bytes of every rank.
        if piggyback is not None:
            piggyback.attach(joined[:room])
        self.agree_on(signature)
        with self.moving():
            if piggyback is not None:
                rows = piggyback.brought()
            else:
                first = np.zeros(room, np.uint8)
                first[: joined.size] = joined[:room]
                gathered = transport.all_gather(first, [room] * transport.size)
                rows = [each.data for each in gathered.reshape(-1, room)]
            stops = [_LENGTH.size + _LENGTH.unpack_from(row)[0] for row in rows]
            texts = [
                row[_LENGTH.size : min(stop, room)].tobytes()
                for row, stop in zip(rows, stops, strict=True)
            ]
            # Every rank knows the lengths of all, so either all ranks make this second call or
            # none.
            if max(stops) > room:
                rest = [max(each - room, 0) for each in stops]
                more = transport.all_gather(joined[room:], rest)
                parts = np.split(more, np.cumsum(rest)[:-1])
                texts = [text + part.tobytes() for text, part in zip(texts, parts, strict=True)]
        return texts

    def disagreement(self, signature: tuple[Any, ...]) -> errors.CollectiveError:
        """Return the error to raise if the ranks do not agree on `signature`. **Collective**."""
        channel = self.channel
        report = channel.report(self.format_signature(*signature[3:]), call_site())
        report["structure"] = " ".join(str(each) for each in signature[3:] if is_structure(each))
        return channel.disagreement(channel.exchange_reports(report))

    def resume(self, entry: FlightEntry | None, is_moving: bool) -> None:
        """Continue and end a call that `FastReduction` has begun in its place."""
        self._place = users_place(sys._getframe(2))
        self._agreed = entry is not None or is_moving
        self._entry = entry
        self.is_moving = is_moving
        self._end_mark = None

    def begin(self, signature: tuple[object, ...]) -> FlightEntry:
        """Record in the flight record that this rank reaches its next collective."""
        if self._entry is not None:
            self.end(self._entry, State.DONE)
        channel = self.channel
        entry = channel.flight.begin(channel.ledger, signature, self._extra_text, self._place)
        self._entry = entry
        return entry

    def end(self, entry: FlightEntry, state: str) -> None:
        """Record the end of one collective of this call."""
        entry.ended_ns = monotonic_ns()
        entry.state = state
        self._entry = None
        if self.recorder is not None:
            entry.record_on(self.recorder, self.channel.flight.channel, self.moved)
            self.moved = {}

    def note_moved(self, num_bytes: int, implementation: str) -> None:
        """Show in the timeline how many bytes were moved, and by which implementation."""
        if self.recorder is not None:
            self.moved["bytes"] = self.moved.get("bytes", 0) + num_bytes
            self.moved["implementation"] = implementation

    def show_received(self, arrays: Sequence[Any]) -> None:
        """Pass data from other ranks to a fault injection that waits for them."""
        if self.channel.on_received is not None:
            for array in arrays:
                self.channel.on_received(array)

    @staticmethod
    def number_of(number: float) -> int:
        """Return the integer that represents `number` in a digest."""
        return int.from_bytes(struct.pack("d", number), "big")

    def include(self, number: float, text: str) -> None:
        """Add `number` to the next agreement, and `text` about it to error messages."""
        # Not a detail, because a signature that stays equal is digested only once.
        self._extra = self.number_of(number)
        self._extra_text = text

    def include_values(self, arrays: Iterable[Any]) -> None:
        """Add the values of host arrays to the next agreement: see `include`."""
        if self.channel.size > 1 and self.channel.checks:
            digest, text = compared_values(arrays)
            self._extra ^= digest
            self._extra_text = f"{self._extra_text} {text}".lstrip()

    def format_signature(self, *details: object) -> str:
        """Return the call in the form for error messages."""
        call = format_call(self.kind, self.name, details)
        if self.channel.num_strategies > 1:
            call += f" of strategy {self.owner}"
        return " ".join(filter(None, [call, self._extra_text]))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # Only for an `Exception`. After a KeyboardInterrupt or SystemExit this rank ends, and
            # its last round tells the other ranks.
            if not self._agreed and isinstance(error, Exception) and not self.channel.closed:
                self._refuse(error)
            elif self._entry is not None:
                self.end(self._entry, _DONE if error is None else State.FAILED)
            if error is not None and self.is_moving:
                self._leave_data(error)
        finally:
            if self._end_mark is not None:
                self._end_mark()
            channel = self.channel
            # Before the overlap is reported: the report is itself a collective, and enters the
            # channel again.
            channel.inside = None
            channel.lock.release()
            try:
                if channel.overlap is not None:
                    self.end_overlap(error)
            finally:
                if error is not None:
                    # Also if the report above raises: the groups of this channel must close too, or
                    # ranks wait in them for ranks that have left here.
                    channel.note_end(self.owner)

    def _leave_data(self, error: BaseException) -> None:
        """Report that this rank will not send the data for which other ranks wait."""
        channel = self.channel
        if channel.closed is None and channel.overlap is None:  # an overlap is reported separately
            channel.leave_interrupted(f"transfer of data in {self.kind}", error)

    def _refuse(self, error: Exception) -> None:
        """Report to the other ranks that this rank cannot make the call."""
        what = f"{self.kind} refused its arguments ({type(error).__name__}: {text_of(error)})"
        self._bring_refusal(error, self.kind, what, call_site())

    def _bring_refusal(self, error: Exception, subject: str, what: str, site: str) -> None:
        """Take part in the next round with a refusal of `subject`. **Collective**."""
        channel = self.channel
        if not channel.checks:
            return
        entry = self.begin((self.kind, self.name, self.owner, f"refused: {type(error).__name__}"))
        try:
            # Without the arguments: if all ranks refuse for different bad arguments, their refusals
            # are equal, and the strategy stays usable.
            outcome = channel.vote(Status.REFUSAL, (subject, "refused"), self.timeout_s)
        finally:
            self.end(entry, State.REFUSED)
        if outcome is not Outcome.ALL_REFUSE:
            # Ranks that made a call raise a disagreement, and need this report for it. This rank
            # raises its own error, so it drops the error that is returned here.
            report = channel.report(what, site, cause=True)
            channel.disagreement(channel.exchange_reports(report))


class CommonOutcome:
    """Context manager around work that fails on all ranks if it fails on any."""

    # **Collective** at its end, in one round. The ranks must be known to do the same work, by an
    # earlier agreement of the same public call. Ranks that failed raise their own error, the others
    # raise one of the same class and text, and the strategy stays usable. The body must not contain
    # collectives that a failing rank would miss.

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
        # This call takes part in no round, and ends here. While the body runs, the channel is free
        # for the collectives in it.
        with self._call:
            pass  # only to find the user's line, for messages

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A KeyboardInterrupt or SystemExit ends this rank, and its last round reports that.
        if self.channel.closed or (error is not None and not isinstance(error, Exception)):
            return
        call, channel = self._call, self.channel
        status = Status.CALL if error is None else Status.REFUSAL
        signature = (call.kind, call.name, call.owner, "ends")
        call.take_channel()
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
            call.leave_channel(error)
            channel.note_end(call.owner)

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, once all have succeeded. **Collective**."""
        call, channel = self._call, self.channel
        call.take_channel()
        # The round of `__exit__` has agreed. There is no further round, and an error from here on
        # leaves other ranks waiting for data.
        call._agreed = True
        error: BaseException | None = None
        try:
            return channel.exchange(value)
        except BaseException as raised:  # from a signal handler: other ranks wait for this one
            error = raised
            call._leave_data(raised)
            raise
        finally:
            call.leave_channel(error)
            channel.note_end(call.owner)

    def _settle(self, trace: TracebackType | None, error: Exception | None) -> None:
        """Raise the error of the lowest failed rank on the ranks that succeeded."""
        call, channel = self._call, self.channel
        report = channel.report(
            call.format_signature("failed" if error else "succeeded"), call_site()
        )
        report["verdict"] = [call.kind, call.name, channel.ledger.sequence]
        if error is not None:
            report |= {"error": type(error).__name__, "text": text_of(error)}
            report["what"] += f" with {type(error).__name__}"
            report["site"] = failure_site(trace)
        _raise_for_all(channel, report, error)


class AllOrNone(CommonOutcome):
    """`CommonOutcome` for work that the ranks agree to begin, in an extra round before it."""

    def __enter__(self) -> None:
        with self._call as call:
            call.agree("begins")


def _raise_for_all(channel: Channel, report: dict[str, Any], own: Exception | None) -> None:
    reports = channel.exchange_reports(report)
    # A rank may have contributed a different call to this round. Then there is no common outcome.
    if any(each.get("verdict") != report["verdict"] for each in reports):
        raise channel.disagreement(reports)
    if own is not None:
        return
    rank, first = next((r, each) for r, each in enumerate(reports) if "error" in each)
    text = f"{first['text']} (on {channel.place(rank)})"
    error = _rebuilt(first["error"], text)
    # So that only the rank on which the work failed prints its traceback for the job.
    vars(error)["_caused_elsewhere"] = True
    raise error


def _rebuilt(name: str, text: str) -> Exception:
    """Return an exception of the class that a different rank raised."""
    cls: Any = getattr(errors, name, None) or getattr(builtins, name, None)
    try:
        error = cls(text)
    except TypeError:
        error = None  # an unknown class, or one that takes more than a string
    return error if isinstance(error, Exception) else errors.MpistratError(f"{name}: {text}")
