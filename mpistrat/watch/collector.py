"""Collector: holds one connection of each rank, judges, prints the report and ends the job.

It is a thread of ``mpistrat watch``, or else a child program of rank 0. Ranks send lines of JSON.
Nothing that a rank sends is run, or used as a path.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpistrat.mpi.launcher import is_on_one_node
from mpistrat.settings import Settings, settings
from mpistrat.system.processes import send_signal
from mpistrat.watch.cause import deaths_cause
from mpistrat.watch.hang_report import EXIT_CODE, Report
from mpistrat.watch.rank_links import Rank, agreement_key
from mpistrat.watch.verdict import Verdict

_MAX_LINE = 2**20
_BACKLOG = 4096
_LOOK_S = 0.25
_GREETING_S = 1.0
"""How long a stranger may take to say the secret."""
_PAUSE_S = 2.0
"""A longer gap between two looks means that this process was stopped too."""
_TOLERATED_S = 2.0
"""Ranks that still work so long after the death of another one survive it."""
_LEAVING_S = 2.0


@dataclass
class _Peer:
    """One connection."""

    connection: socket.socket
    since_s: float
    received: bytearray = field(default_factory=bytearray)
    rank: Rank | None = None
    groups: dict[int, str] = field(default_factory=dict)


class Collector:
    """Collector of a job.

    Parameters
    ----------
    limits : Settings
        Its ``watch_...`` settings.
    size : int
        Number of ranks; 0 if only the ranks know it.
    is_local : bool
        Whether all ranks are on this machine.
    end : callable
        Kills the job; its argument is the collector.
    """

    def __init__(
        self, limits: Settings, size: int, is_local: bool, end: Callable[[Collector], object]
    ) -> None:
        self._limits = limits
        self._end = end
        self.is_local = is_local
        """Whether all ranks are on this machine."""
        self._server = socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self._key = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._peers: list[_Peer] = []
        self._ranks: dict[int, Rank] = {each: Rank(each) for each in range(size)}
        self._members: dict[str, frozenset[int]] = {}
        self._is_closing = threading.Event()
        self._looked_s = time.monotonic()
        self._verdict = Verdict(limits, self._ask)
        self._is_reported = False
        """Whether there is nothing more to look for."""
        self.report: Report | None = None
        """The report, once there is one."""
        self.has_ended_job = False
        """Whether this collector has ended the job."""
        self.is_asked_to_end = False
        """Whether a signal has asked the job to end, so that no death is reported."""

    @property
    def address(self) -> str:
        """Host, port and secret."""
        return f"{socket.gethostname()}:{self._server.getsockname()[1]}:{self._key}"

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks of this machine."""
        here = socket.gethostname()
        ranks = self._ranks.values()
        return [each.pid for each in ranks if each.pid > 1 and each.host == here]

    def start(self) -> threading.Thread:
        """Serve in a thread."""
        thread = threading.Thread(target=self.serve, name="mpistrat-watch", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End `serve`, after messages that have arrived."""
        self._is_closing.set()

    def serve(self, until_empty: bool = False) -> None:
        """Serve until `close` is called, or until all ranks have closed their connections."""
        had_ranks = False
        began_s = time.monotonic()
        while True:
            # Before the messages are read: after `close`, one more round takes those that have
            # arrived.
            was_closing = self._is_closing.is_set()
            for key, _ in self._selector.select(0 if was_closing else _LOOK_S):
                self._accept() if key.data is None else self._receive(key.data)
            if was_closing:
                return
            self._drop_strangers()
            self._look()
            had_ranks = had_ranks or any(peer.rank for peer in self._peers)
            # Rank 0 may die before it connects, and no collector may stay forever.
            if until_empty and not self._peers and (had_ranks or _is_over(began_s, 600)):
                return

    # Connections

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            peer = _Peer(connection, time.monotonic())
            self._peers.append(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _drop_strangers(self) -> None:
        for peer in [each for each in self._peers if each.rank is None]:
            if _is_over(peer.since_s, _GREETING_S):
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            part = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        peer.received += part
        while (end := peer.received.find(b"\n")) >= 0:
            line = bytes(peer.received[:end])
            del peer.received[: end + 1]
            try:
                self._take(peer, json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                # A bad line of a known rank is left out: to drop the rank would look like its
                # death.
                if peer.rank is None:
                    self._drop(peer)
                    return
        limit = _MAX_LINE if peer.rank is not None else 4096
        if not part or len(peer.received) > limit:
            self._lose(peer)

    def _lose(self, peer: _Peer) -> None:
        rank = peer.rank
        self._drop(peer)
        if rank is None or rank.left is not None:
            return
        rank.is_connected = False
        rank.lost_s = rank.changed_s = time.monotonic()
        others = [each for each in self._ranks.values() if each is not rank]
        # A launcher ends the others after the first one, and after one that has left by itself. The
        # news of the two may come in either order, so an exception at the end of one is enough.
        rank.is_first_lost = not any(
            each.lost_s is not None
            or each.after is not None
            or (each.left and each.left[0] in ("exit", "abort"))
            for each in others
        )

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if peer.rank is None:
            if not hmac.compare_digest(str(message["key"]), self._key):
                raise ValueError
            number = int(message["rank"])
            peer.rank = self._ranks.get(number) or Rank(number)
            # If no variable of the launcher names the rank, `_place` takes it from MPI later.
            if number >= 0:
                self._ranks[number] = peer.rank
            rank = peer.rank
            rank.pid, rank.host = int(message["pid"]), str(message["host"])
            rank.is_connected, rank.changed_s = True, now_s
            # A rank that never hears this was too late with its greeting, and greets again.
            with contextlib.suppress(OSError):
                peer.connection.send(b"welcome\n")
            return
        rank = peer.rank
        if "group" in message:
            key = f"{int(message['space'])}:{message['key']}"
            peer.groups[int(message["group"])] = key
            self._note_members(key, message["ranks"])
        elif "state" in message:
            self._place(rank, int(message["state"]["rank"]), int(message["state"]["size"]))
            for each in (message["state"].get("lines") or {}).get("agreements", ()):
                self._note_members(agreement_key(each), each["ranks"])
            rank.note_state(message["state"], peer.groups, now_s)
        elif "history" in message:
            rank.note_history(message["history"], peer.groups)
        elif "answer" in message:
            rank.answer = int(message["answer"])
        elif "left" in message:
            rank.left = (str(message["left"]), int(message["code"]))
            rank.changed_s = now_s

    def _note_members(self, key: str, spans: list[tuple[int, int]]) -> None:
        if key not in self._members:
            self._members[key] = frozenset(r for a, b in spans for r in range(a, b + 1))

    def _place(self, rank: Rank, number: int, size: int) -> None:
        """Take the rank and the number of ranks from MPI, which knows them best."""
        if number < 0:
            return
        for each in range(size):
            self._ranks.setdefault(each, Rank(each))
        if rank.number != number or self._ranks[number] is not rank:
            rank.number = number
            self._ranks[number] = rank

    # Judgement

    def _look(self) -> None:
        now_s = time.monotonic()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        ranks = [self._ranks[each] for each in sorted(self._ranks)]
        if gap_s > _PAUSE_S:  # the ranks were stopped as well, maybe
            for each in ranks:
                each.changed_s += gap_s
        if self._is_reported or self.is_asked_to_end or self._has_gap():
            return
        for each in ranks:
            self._note_stop(each, now_s)
        report = self._verdict.look(ranks, self._members, now_s)
        if report is not None:
            self._finish(report)

    def _has_gap(self) -> bool:
        return sorted(self._ranks) != list(range(len(self._ranks)))

    def _ask(self, question: int) -> None:
        """Ask all ranks whether they still stand where their last message says."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.send(f"ask {question}\n".encode())

    def _note_stop(self, rank: Rank, now_s: float) -> None:
        """Note whether a signal has stopped a process of this machine."""
        if not rank.is_connected or rank.host != socket.gethostname():
            return
        try:
            stat = Path(f"/proc/{rank.pid}/stat").read_text()
        except OSError:
            return
        # The name of the program, in parentheses, may contain any character (proc(5)).
        letter = stat.rpartition(")")[2].split()[0]
        rank.tracer = rank.tracer or (1 if letter == "t" else 0)
        if (letter == "T") != rank.is_stopped:
            rank.is_stopped, rank.changed_s = letter == "T", now_s

    def _finish(self, report: Report) -> None:
        # The death of a rank was reported before. A job has one report.
        is_first, self.report = self.report is None, report
        write_report(report, self._limits.watch_json, is_first)
        self._is_reported = report.ends_job or report.cause.kind != "died"
        if report.ends_job:
            self.has_ended_job = True
            self._end(self)

    def tell_ranks_to_end(self) -> None:
        """Let every rank exit at once, with the exit code of the watch."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.send(f"end {EXIT_CODE}\n".encode())

    def tell_one_to_abort(self) -> None:
        """Let one rank call MPI_Abort with the exit code of the watch."""
        waiting = [each for each in self._peers if each.rank and each.rank.state == "waits"]
        for peer in waiting[:1]:
            with contextlib.suppress(OSError):
                peer.connection.send(f"abort {EXIT_CODE}\n".encode())

    def report_deaths(self, bracket: str = "") -> Report | None:
        """Report ranks that died, once the launcher has ended, unless the others survived."""
        ranks = [self._ranks[each] for each in sorted(self._ranks)]
        dead = [each for each in ranks if each.state == "dead"]
        if self.report is not None or self.is_asked_to_end or not dead or self._has_gap():
            return None
        # A rank that exits early makes the launcher kill the others, whose ends are not deaths.
        if any(each.left and each.left[0] in ("abort", "exit") for each in ranks):
            return None
        died_s = min(each.lost_s for each in dead if each.lost_s is not None)
        if any(each.changed_s > died_s + _TOLERATED_S and each.left for each in ranks):
            return None
        found = frozenset(each.number for each in dead)
        self.report = Report(deaths_cause(dead, len(ranks)), ranks, found, 0.0, False, bracket)
        write_report(self.report, self._limits.watch_json)
        return self.report


def _is_over(since_s: float, limit_s: float) -> bool:
    return time.monotonic() - since_s > limit_s


def write_report(report: Report, path: str | None, is_first: bool = True) -> None:
    """Print a report, and write it to a file. No full disk or closed stderr stops the end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(report.text() if is_first else report.last_line())
        sys.stderr.flush()
    if path is not None:
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(report.json(), indent=1) + "\n")


def _end_from_below(collector: Collector) -> None:
    """End a job whose launcher is somewhere above: with the exit code of its ranks."""
    # MPI_Abort comes first: only that gives the launcher the exit code for certain. If ranks exit
    # instead, the launcher kills the others, and may return the exit code of any of them.
    collector.tell_one_to_abort()
    _wait_for_end(collector)
    collector.tell_ranks_to_end()
    _wait_for_end(collector)
    # By now, the number of a rank that has ended may belong to a different process.
    send_signal(signal.SIGKILL, [each for each in collector.pids if _is_python(each)])


def _wait_for_end(collector: Collector) -> None:
    """Wait a moment for the ranks of this machine, so that this process ends with them."""
    end_s = time.monotonic() + _LEAVING_S
    while time.monotonic() < end_s and (
        not collector.is_local or any(_is_python(each) for each in collector.pids)
    ):
        time.sleep(0.05)


def _is_python(pid: int) -> bool:
    """Return whether a process still is one that holds a connection to this one."""
    try:
        return "mpistrat-watch" in os.listdir(f"/proc/{pid}/task") or _has_recorder(pid)
    except OSError:
        return False


def _has_recorder(pid: int) -> bool:
    return "mpistrat/watch/_recorder" in Path(f"/proc/{pid}/maps").read_text(errors="replace")


def main() -> None:
    """Serve the ranks of a job, as a child of rank 0, which reads the address from stdout."""
    limits = settings()
    collector = Collector(limits, 0, is_on_one_node(), _end_from_below)
    print(f"mpistrat-watch {collector.address}", flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # whoever reads the program's output waits for its end
    collector.serve(until_empty=True)
    collector.report_deaths()


if __name__ == "__main__":
    main()
