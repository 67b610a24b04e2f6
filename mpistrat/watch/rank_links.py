"""State of each rank, as its messages tell the collector."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpistrat.system.callsite import CodeOwner, code_owners

CLASSES = (
    *("send", "receive", "sendrecv", "local", "poll", "isend", "ireceive", "iother", "wait"),
    *("collective", "icollective", "make", "make group", "free", "outside", "make window"),
    *("window collective", "window group", "window", "make file", "file collective", "abort"),
    *("finalize", "init", "start", "request free", "ready"),
)
"""Classes of functions, in the order of the enumeration in ``native/recorder/recorder.h``."""

SENDS = ("send", "isend")
RECEIVES = ("receive", "ireceive")
COLLECTIVES = (
    *("collective", "icollective", "make", "make window", "window collective", "make file"),
    "file collective",
)
AT_THE_END = "agreement on the end of the program"
"""Call of a rank that has left the program, and tells the others so."""
ANY = -1
"""World rank of MPI_ANY_SOURCE, and MPI_ANY_TAG."""
NOBODY = -2
"""World rank of MPI_PROC_NULL."""

_MAX_TEXT = 200


def _text(value: object) -> str:
    return str(value)[:_MAX_TEXT]


@dataclass(frozen=True)
class Wait:
    """What a call waits for: a message, or one collective of a communicator."""

    function: str
    kind: str
    """One of `CLASSES`."""
    group: str | None
    """Key of the communicator, window or file; ``None`` if it is not known."""
    number: int = 0
    peer: int = NOBODY
    tag: int = ANY
    shown: int = NOBODY
    """The peer as the program passes it: a rank of the communicator."""
    root: int | None = None
    peer2: int = NOBODY
    tag2: int = ANY
    is_open: bool = False
    """Whether it is a partitioned send of which the program has not filled all partitions."""


@dataclass(frozen=True)
class Call:
    """A call of a thread that has not returned."""

    thread: int
    function: str
    kind: str
    waits: tuple[Wait | None, ...] = ()
    """``None`` for a request that is not known."""
    limit_s: float | None = None
    """Time limit after which mpistrat itself ends the wait."""


@dataclass(frozen=True)
class Made:
    """A collective that a rank has begun."""

    function: str
    root: int
    bytes: int

    def differs(self, other: Made) -> str | None:
        """Return which kind of cause a difference of the two is, ``None`` if they match."""
        if self.function != other.function:
            return "different collectives"
        if self.root != other.root:
            return "different roots"
        if min(self.bytes, other.bytes) >= 0 and self.bytes != other.bytes:
            return "different lengths"
        return None


@dataclass
class History:
    """Collectives of a rank on one communicator: their number, and the last of them."""

    made: int
    last: dict[int, Made]


@dataclass(frozen=True)
class Place:
    """Where a thread is in the program."""

    file: str | None = None
    line: int | None = None
    expression: str | None = None
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "unknown place"


@dataclass
class Rank:
    """What is known of one rank."""

    number: int
    pid: int = 0
    host: str = ""
    is_connected: bool = False
    has_state: bool = False
    in_world: bool = False
    """Whether MPI_Init has returned."""
    done: int = 0
    calls: tuple[Call, ...] = ()
    polls: dict[int, str] = field(default_factory=dict)
    """Function with which each thread polls, by thread."""
    lines: dict[int, Place] = field(default_factory=dict)
    is_at_end: bool = False
    after: str | None = None
    """Exception that has ended the program."""
    history: dict[str, History] = field(default_factory=dict)
    pending: tuple[Wait, ...] = ()
    computes: bool = True
    tracer: int = 0
    left: tuple[str, int] | None = None
    """How the rank has said that it ends, and its exit code."""
    lost_s: float | None = None
    """When its connection broke without a word."""
    is_first_lost: bool = False
    is_stopped: bool = False
    changed_s: float = 0.0
    version: int = 0
    """Calls that have begun and ended."""
    history_version: int = -1
    """`version` to which `history` belongs."""
    lines_version: int = -1
    """`version` to which `lines` belong."""
    answer: int = 0
    """Number of the last question that it has answered."""
    is_bare: bool = False
    """Whether its calls of MPI cannot be seen."""
    agreed: dict[str, History] = field(default_factory=dict)
    """Collectives of mpistrat's strategies so far, by the key of their channel."""

    @property
    def main_call(self) -> Call | None:
        """The call of the main thread."""
        return next((each for each in self.calls if each.thread == self.pid), None)

    @property
    def state(self) -> str:
        """One of the states of the report."""
        if self.left is not None:
            return "ended"
        if self.lost_s is not None:
            return "dead" if self.is_first_lost else "killed"
        if self.is_stopped:
            return "stopped"
        if not self.has_state:
            return "absent"
        main = self.main_call
        # Other threads do not count here: they may serve a main thread that computes for hours.
        if main is None and self.pid not in self.polls:
            return "outside" if self.in_world else "absent"
        return "polls" if self.polls or main is None else "waits"

    def history_of(self, group: str) -> History | None:
        """Return the collectives so far on a communicator, or of a channel of mpistrat."""
        return self.agreed.get(group) or self.history.get(group)

    @property
    def place(self) -> Place:
        """Where the main thread is."""
        return self.lines.get(self.pid, Place())

    def note_state(self, state: Mapping[str, Any], groups: Mapping[int, str], now_s: float) -> None:
        """Take a message on calls and lines."""
        calls, polls = [], {}
        for each in state["calls"]:
            if "poll" in each:
                polls[int(each["tid"])] = _text(each["poll"])
                continue
            waits = tuple(_wait(one, groups) for one in each["waits"])
            calls.append(Call(int(each["tid"]), _text(each["f"]), CLASSES[int(each["c"])], waits))
        lines = state.get("lines") or {}
        self._note_agreements(lines.get("agreements", ()), calls, polls)
        before = (self.done, self.calls, set(self.polls), self.in_world, self.has_state)
        self.done, self.calls, self.polls = int(state["done"]), tuple(calls), polls
        self.version, self.lines_version = int(state["v"]), int(state["lv"])
        self.is_bare = bool(lines.get("bare")) or "bare" in state
        self.has_state, self.in_world = True, int(state["rank"]) >= 0 or self.is_bare
        # For polls, only the threads count: a poll that finds nothing is not progress, and must not
        # start the limit again.
        if before != (self.done, self.calls, set(polls), self.in_world, True):
            self.changed_s = now_s
        if lines.get("end"):
            self.is_at_end = True
            self.after = _text(lines["after"]) if lines.get("after") else None
            self.lines = {}
        else:
            found = {
                int(thread): _place(where)
                for thread, where in lines.items()
                if thread.isdigit() and where is not None
            }
            # Without the recorder, a line that changes is the only sign of progress.
            if self.is_bare and found != self.lines:
                self.changed_s = now_s
            self.lines = found
        # The sampler does not get Python's lock in this case, so its lines are older than the dump.
        if state.get("dump"):
            self.lines[self.pid] = _place_in_dump(str(state["dump"]), state.get("source"))

    def _note_agreements(
        self, channels: Sequence[Mapping[str, Any]], calls: list[Call], polls: dict[int, str]
    ) -> None:
        """Take the agreements of mpistrat. A thread that waits in one polls, but is waiting."""
        self.agreed = {}
        for each in channels:
            key, number = agreement_key(each), int(each["n"])
            self.agreed[key] = History(number, {})
            if each.get("tid") is None:
                continue
            thread, what = int(each["tid"]), _text(each["what"])
            wait = Wait(f"agreement on {what}", "collective", key, number)
            limit_s = None if each.get("limit") is None else float(each["limit"])
            polls.pop(thread, None)
            calls[:] = [call for call in calls if call.thread != thread]
            calls.append(Call(thread, wait.function, "agreement", (wait,), limit_s))

    def note_history(self, message: Mapping[str, Any], groups: Mapping[int, str]) -> None:
        """Take a message on the collectives so far and the pending requests."""
        self.computes, self.tracer = bool(message["computes"]), int(message["tracer"])
        self.history = {}
        for group, made, entries in message["made"]:
            first = int(made) - len(entries) + 1
            last = {
                first + i: Made(_text(name), int(root), int(size))
                for i, (name, root, size) in enumerate(entries)
            }
            self.history[groups[int(group)]] = History(int(made), last)
        waits = (_wait(each, groups) for each in message["pending"])
        self.pending = tuple(each for each in waits if each is not None)
        self.history_version = int(message["v"])


def agreement_key(channel: Mapping[str, Any]) -> str:
    """Return the key of a channel of mpistrat, as of a communicator."""
    return f"3:{_text(channel['key'])}"


def _wait(found: Mapping[str, Any] | None, groups: Mapping[int, str]) -> Wait | None:
    if found is None:
        return None
    return Wait(
        _text(found["f"]),
        CLASSES[int(found["c"])],
        groups.get(int(found["g"])),
        int(found.get("n", 0)),
        int(found.get("p", NOBODY)),
        int(found.get("t", ANY)),
        int(found.get("shown", NOBODY)),
        int(found["root"]) if "root" in found else None,
        int(found.get("p2", NOBODY)),
        int(found.get("t2", ANY)),
        bool(found.get("open")),
    )


def _place(where: Mapping[str, Any]) -> Place:
    expression = where.get("expression")
    return Place(
        _text(where["file"]),
        int(where["line"]),
        _text(expression) if expression else None,
        tuple(_text(each) for each in where["stack"]),
    )


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)


def _place_in_dump(dump: str, source: object) -> Place:
    """Return the place of the main thread, which is the last one, in a dump of faulthandler."""
    last = dump.rpartition("(most recent call first)")[2]
    stack = [
        (name.rpartition("/")[2], int(line))
        for name, line in _FRAME.findall(last)
        if code_owners[name] is CodeOwner.USER
    ]
    if not stack:
        return Place()
    (file, line), texts = stack[0], tuple(f"{name}:{number}" for name, number in stack)
    return Place(file, line, _callee(_text(source)) if source else None, texts)


def _callee(line: str) -> str:
    """Return the last name that a line of source calls: ``comm.bcast`` of ``x = comm.bcast(1)``."""
    found = re.findall(r"([A-Za-z_][\w.]*)\(", line)
    return str(found[-1]) if found else line.strip()
