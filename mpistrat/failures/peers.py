"""Peers: asks the other ranks of a channel, through their monitors, what they are doing."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor  # it cannot be imported at the end
from pathlib import Path
from typing import Any

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.departures import Departure, Failure, Peers
from mpistrat.failures import logs
from mpistrat.failures.monitor import Address, Handler, Monitor, Question
from mpistrat.failures.process_state import process
from mpistrat.settings import settings_at_the_end
from mpistrat.system.background import call_later
from mpistrat.system.callsite import (
    UNKNOWN_PLACE,
    CodeOwner,
    code_owners,
    frame_of_thread,
    site_of_thread,
)
from mpistrat.system.exit_hooks import is_at_work
from mpistrat.system.text import rank_list

_MAX_FRAMES = 4

Answer = dict[str, Any]
"""JSON values: the ``state`` of a rank, and details for `describe_rank_state`."""


class RankState(str, enum.Enum):
    """State of a rank for which others wait."""

    HERE = "waiting here"
    """It waits in the same collective."""
    ELSEWHERE = "elsewhere"
    """It waits in a collective on a different channel."""
    LATE = "late"
    """It is alive, between two collectives."""
    FINISHED = "finished"
    """It has left the program."""
    STOPPED = "stopped"
    """Its process is suspended."""
    SILENT = "silent"
    """Its process exists but does not answer."""
    GONE = "gone"
    """Its process has ended without an exit announcement."""
    UNKNOWN = "unknown"
    """This rank cannot ask it."""


_NEVER_COMES = (RankState.STOPPED, RankState.SILENT, RankState.GONE)


def rank_state(channel: Channel, channels: Sequence[Channel], has_left: bool) -> Answer:
    """Return the state of the thread that uses `channel`, from any thread."""
    now = time.monotonic()
    thread, replica = channel.running() or (channel.thread, "")
    found: Answer = {
        "sequence": channel.ledger.sequence,
        "site": site_of_thread(thread),
        "at_work": is_at_work(),
    }
    others = (each for each in channels if each is not channel and each.waiting is not None)
    waits_elsewhere = next(others, None)
    # Check this before `has_left`: ranks that are stuck in one round and have left the program
    # learn by it which of them is the lowest and ends the job (`_extra_s` in shutdown.py).
    if channel.stuck_at is not None:
        return found | {"state": RankState.HERE, "site": channel.stuck_at}
    if channel.waiting is not None:
        return found | {"state": RankState.HERE}
    if has_left:
        return found | {"state": RankState.FINISHED}
    if waits_elsewhere is not None and waits_elsewhere.waiting is not None:
        what, since = waits_elsewhere.waiting
        return found | {"state": RankState.ELSEWHERE, "what": what, "for_s": now - since}
    stack = [
        f"{each.filename.rpartition('/')[2]}:{each.lineno} in {each.name}"
        for each in traceback.extract_stack(frame_of_thread(thread))
        if code_owners[each.filename] is CodeOwner.USER
    ]
    late = {
        "state": RankState.LATE,
        "replica": replica,
        "for_s": now - channel.flight.last_agreed_s(),
        "stack": stack[-_MAX_FRAMES:],
    }
    return found | late


def describe_rank_state(found: Answer) -> str:
    """Return one line on a rank and its state."""
    state = RankState(found["state"])
    if state is RankState.HERE:
        return f"{state.value} at {found['site']}"
    if state is RankState.ELSEWHERE:
        what, site = found["what"], found["site"]
        where = f"{what} at {site}, for {found['for_s']:.0f} s"
        return f"{state.value}: it waits in a collective of other ranks, {where}"
    if state is RankState.LATE:
        path = ", called from ".join(reversed(found["stack"])) or found["site"]
        who = found["replica"] and found["replica"] + " "
        return f"{state.value}: {who}computing for {found['for_s']:.0f} s, now at {path}"
    if state is RankState.FINISHED:
        place = "" if found["site"] == UNKNOWN_PLACE else f" at {found['site']}"
        return f"{state.value}: left the program{place}"
    where = f"process {found['pid']} on {found['host']}" if "pid" in found else "no address"
    return {
        RankState.STOPPED: f"stopped: {where} is suspended (SIGSTOP); SIGCONT resumes it",
        RankState.SILENT: f"silent: {where} does not answer: stopped, or in code that lets no "
        "other thread run",
        RankState.GONE: f"gone: {where} has ended without a word",
        RankState.UNKNOWN: f"unknown: {where} cannot be asked",
    }[state]


def _is_suspended(pid: int) -> bool:
    """Return whether a signal has stopped a process of this host."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The program name, in parentheses, may itself contain spaces and parentheses (proc(5)).
    return stat.rpartition(")")[2].split()[0] in "Tt"


_LIMIT_S = 1.5
"""How long an answer may take."""
_SHORT_LIMIT_S = 0.3
"""The same if the answer does not matter."""
_AT_ONCE = 16
_MAX_TURNS = 6
_POLL_S = 0.5
"""How often to check whether files are finished."""
_SETTLE_S = 0.5
"""Wait before reporting a broken connection; a launcher that ends the job is faster."""
_SHORT_SETTLE_S = 0.02
"""The same if the launcher does not end the job."""
_FAILURE_S = 1.0
"""Wait before reporting a failure; usually the next collective shows it, or the rank ends."""


class MonitorClient(Peers):
    """Client of the monitors of `channel`. Their `addresses` are in rank order."""

    def __init__(self, channel: Channel, key: str, addresses: Sequence[Address]) -> None:
        self._channel = channel
        self._key = key
        self._addresses = addresses
        self._watch: threading.Event | None = None
        self._has_left = False
        self._is_reporting = False
        """Whether a failure will be reported within `_FAILURE_S`."""
        self._failed_at = -1
        """Number of collectives before the last failure."""

    def join(self, monitor: Monitor, handlers: Mapping[str, Handler]) -> None:
        """Let `monitor` answer for this rank, and watch the next rank. **Collective**."""
        channel = self._channel
        monitor.add(self._key, self.handlers() | dict(handlers))
        channel.peers = self
        # Every monitor must know the key before a rank asks with it.
        channel.barrier()
        neighbour = (channel.rank + 1) % channel.size
        # If the neighbour cannot be watched, it may still be asked.
        with contextlib.suppress(OSError):
            try:
                connection = self._addresses[neighbour].watch(self._key, _LIMIT_S)
            except ConnectionError:
                # No firewall refuses connections within a host, so it has died since the barrier.
                if self._addresses[neighbour].host == socket.gethostname():
                    self.report_loss(neighbour)
                raise
            self._watch = monitor.watch(connection, lambda: self.report_loss(neighbour))

    def leave(self) -> None:
        """Undo `join`. All ranks must call it."""
        self._has_left = True
        if process.monitor is not None:
            process.monitor.remove(self._key)
        if self._watch is not None:
            # The monitor's thread closes the connection when the neighbour ends its side. Wait, so
            # that the descriptor is closed when `strategy.close()` returns.
            self._watch.wait(_LIMIT_S)

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers for the questions of other ranks."""

        # A question names its handler in `ask`.
        def state(question: Question) -> Answer:
            found = rank_state(self._channel, process.channels, process.has_left)
            if "departure" in question.details:
                # Either this rank has already counted the collective that the other one is about to
                # leave, or it finds the departure right after. So one of the two always notices.
                channel, number = self._channel, int(question["number"])
                found["comes"] = channel.departures.offer(
                    int(question["sender"]),
                    Departure(*question["departure"]),
                    lambda: channel.closed is None and channel.ledger.sequence >= number,
                )
            return found

        def lost(question: Question) -> dict[str, Any]:
            self.note_departure(int(question["lost"]), Departure(*question["departure"]))
            return {}

        def failed(question: Question) -> dict[str, Any]:
            failure = Failure(*question["failure"])
            self._channel.departures.failures[int(question["sender"])] = failure
            return {}

        return {"state": state, "lost": lost, "failed": failed}

    def ask(
        self, rank: int, ask: str = "state", limit_s: float = _LIMIT_S, **details: Any
    ) -> Answer:
        """Return the answer of `rank`, or the state that its silence means."""
        address = self._addresses[rank]
        place = {"pid": address.pid, "host": address.host}
        try:
            answer = address.ask({"key": self._key, "ask": ask, **details}, limit_s)
            if answer is not None:
                return answer
        except ConnectionError:
            # The system refuses connections to a dead process, and resets its open ones.
            return place | {"state": RankState.GONE}
        except TimeoutError:
            # The system also accepts connections for a stopped process, up to the backlog. So
            # silence means that the process exists.
            suspended = address.host == socket.gethostname() and _is_suspended(address.pid)
            return place | {"state": RankState.STOPPED if suspended else RankState.SILENT}
        except (OSError, ValueError):
            pass
        return place | {"state": RankState.UNKNOWN}

    def others(self) -> list[int]:
        """Return the other ranks."""
        return [rank for rank in range(len(self._addresses)) if rank != self._channel.rank]

    def ask_all(self, ranks: Iterable[int], **details: Any) -> dict[int, Answer]:
        """Ask `ranks` at the same time, and return the answer of each."""
        ranks = list(ranks)
        return dict(
            zip(ranks, _at_once(lambda rank: self.ask(rank, **details), ranks), strict=True)
        )

    def deliver(self, texts: Sequence[str]) -> bool:
        """Send lines to rank 0 to print, and return whether it accepted them."""
        answer = self.ask(0, "log", sender=self._channel.rank, lines=texts)
        return bool(answer.get("taken"))

    def report_end_of_job(self, limit_s: float) -> None:
        """Report to every other rank that this rank ends the job."""
        self._notify_all("end", limit_s, sender=self._channel.rank)

    def _notify_all(self, ask: str, limit_s: float = _SHORT_LIMIT_S, **details: Any) -> None:
        """Send a notice to every other rank. It may get lost."""
        _at_once(lambda rank: self.ask(rank, ask, limit_s, **details), self.others())

    def lowest_waiting(self) -> int:
        """Return the lowest rank that waits in the same collective as this rank."""
        for rank in range(self._channel.rank):
            if self.waits_here(self.ask(rank)):
                return rank
        return self._channel.rank

    def is_first_to_end(self) -> bool:
        """Return whether no lower rank has reached the end of the program."""
        lower = range(self._channel.rank)
        return all(self.ask(rank)["state"] != RankState.FINISHED for rank in lower)

    def is_root_at_work(self) -> bool:
        """Return whether rank 0 is still finishing a file for all."""
        if self._channel.rank == 0:
            return False
        return bool(self.ask(0).get("at_work"))

    def wait_for_work(self) -> None:
        """Wait until no rank is finishing a file. The end of the job would lose the file."""
        while is_at_work() or self.is_root_at_work():
            time.sleep(_POLL_S)

    def waits_here(self, found: Answer) -> bool:
        """Return whether the rank that answered waits in the same collective as this rank."""
        waits_here: bool = found["state"] == RankState.HERE
        return waits_here and found["sequence"] == self._channel.ledger.sequence

    def describe(self, site: str) -> tuple[str, str]:
        """Return, as text, the ranks for which this rank waits at `site`, and a table of all."""
        return self._describe(site, self.ask_all(self.others()))

    def describe_rank(self, rank: int) -> str:
        """Return, as text, where one rank is."""
        return describe_rank_state(self.ask(rank))

    def offer_to_leave(self, site: str, departure: Departure) -> tuple[str, str] | None:
        """Do `describe`, and tell missing ranks that this one leaves; ``None`` if all come."""
        channel = self._channel
        details = {"sender": channel.rank, "number": channel.ledger.sequence}
        # Each answer is also a decision. A rank that answers that it comes does not see this
        # departure; any other rank sees it before it waits.
        found = self.ask_all(self.others(), departure=departure, **details)
        # A rank that does not answer may still arrive. It then finds that this one has given up.
        if all(each.get("comes") for each in found.values()):
            return None
        return self._describe(site, found)

    def _describe(self, site: str, found: Mapping[int, Answer]) -> tuple[str, str]:
        names = self._channel.names
        missing = [rank for rank, each in found.items() if not self.waits_here(each)]
        lines: dict[str, list[int]] = {f"waiting here at {site}": [self._channel.rank]}
        for rank in sorted(found, key=lambda rank: rank not in missing):
            lines.setdefault(describe_rank_state(found[rank]), []).append(rank)
        # Missing ranks come first.
        ordered = sorted(lines.items(), key=lambda item: not set(item[1]) & set(missing))
        who = rank_list(names(missing)).capitalize() if missing else ""
        return who, "\n".join(f"  {rank_list(names(ranks))}: {line}" for line, ranks in ordered)

    def describe_lost(self) -> str:
        """Return a table of the ranks whose data will never arrive; empty if there are none."""
        found = self.ask_all(self.others())
        return "\n".join(
            f"  {rank_list(self._channel.names([rank]))}: {describe_rank_state(each)}"
            for rank, each in found.items()
            if each["state"] in _NEVER_COMES
        )

    def report_loss(self, rank: int) -> None:
        """Report to every rank that the process of `rank` has died, once that is certain."""

        def report() -> None:
            # A broken connection does not prove that the process has died.
            if self._has_left or self.ask(rank)["state"] != RankState.GONE:
                return
            place = self._addresses[rank]
            what = f"gone: process {place.pid} on {place.host} has ended without a word"
            departure = Departure("ended", what)
            self.note_departure(rank, departure)
            self._notify_all("lost", lost=rank, departure=departure)

        if not self._has_left:
            call_later(_SHORT_SETTLE_S if self._channel.is_tolerant else _SETTLE_S, report)

    def report_failure(self) -> None:
        """Report to every other rank, after a short wait, that a function has failed here."""
        # Do not report it if this rank reaches a collective in the meantime, which shows it too.
        # Set `_failed_at` before checking `_is_reporting`: a pending report also covers this
        # failure.
        ledger, self._failed_at = self._channel.ledger, self._channel.ledger.sequence
        if self._is_reporting:
            return
        self._is_reporting = True

        def report() -> None:
            self._is_reporting = False
            if ledger.sequence == self._failed_at and not process.has_left:
                what = f"{ledger.last_failure} has left run, merge_call or update"
                failure = Failure(ledger.sequence, ledger.failures, what)
                self._notify_all("failed", sender=self._channel.rank, failure=failure)

        call_later(_FAILURE_S, report)

    def report_departure(self, departure: Departure, at_once: bool = True) -> None:
        """Report to every other rank that this rank has left the channel."""

        def report() -> None:
            if at_once or not process.has_left:
                self._notify_all("lost", lost=self._channel.rank, departure=departure)

        report() if at_once else call_later(_FAILURE_S, report)

    def note_departure(self, rank: int, departure: Departure) -> None:
        """Make the next collective fail, because `rank` will never reach it. From any thread."""
        self._channel.departures.found.setdefault(rank, departure)
        # In a tolerant job MPI itself ends its waits for a dead rank, but waits in shared memory
        # have to be ended here.
        if departure.act == "ended" and self._channel.is_tolerant:
            self._channel.transport.leave_waits()

        def end_if_blocked() -> None:
            if departure.act == "ended":
                self._channel.departures.listener(rank)
            # Inside MPI no exception can be raised. The other ranks do the same in their threads.
            if not self._channel.is_moving_data():
                return
            self.wait_for_work()
            if self._channel.is_moving_data():
                if self._is_first_to_report():
                    verb = "is" if departure.act == "ended" else f"{departure.act}:"
                    who = rank_list(self._channel.names([rank]))
                    logs.print_last(f"{who} {verb} {departure.what}.")
                os._exit(1)

        call_later(settings_at_the_end().exit_grace_s, end_if_blocked)

    def _is_first_to_report(self) -> bool:
        """Return whether this rank prints the common line, if there is no rank 0 to merge lines."""
        channel = self._channel
        lost = channel.departures.lost()
        if 0 not in lost:
            return True
        survivors = [rank for rank in range(channel.size) if rank not in lost]
        # The lowest survivor reports first and tells the others, which are still sleeping here.
        time.sleep(_POLL_S * min(survivors.index(channel.rank), _MAX_TURNS))
        if not channel.is_reported:
            self.report_end_of_job(_SHORT_LIMIT_S)
            return True
        time.sleep(_LIMIT_S)  # a launcher may drop the lines of the others once this rank ends
        return False


def _at_once(do: Callable[[int], Answer], ranks: Sequence[int]) -> Iterable[Answer]:
    """Call `do` for several ranks at the same time, and return the results."""
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(do, ranks))
    except RuntimeError:  # the interpreter ends, and starts no more threads
        return [do(rank) for rank in ranks]
