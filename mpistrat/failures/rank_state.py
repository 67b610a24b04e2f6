"""Rank states: what a rank that others wait for is doing, for their reports."""

from __future__ import annotations

import enum
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpistrat.agreement.channel import Channel
from mpistrat.system.callsite import (
    UNKNOWN_PLACE,
    CodeOwner,
    code_owners,
    frame_of_thread,
    site_of_thread,
)
from mpistrat.system.exit_hooks import is_at_work

_MAX_FRAMES = 4

Answer = dict[str, Any]
"""JSON: the ``state`` of a rank, and details for `describe_rank_state`."""


class RankState(str, enum.Enum):
    """The state of a rank that others wait for."""

    HERE = "waiting here"
    """In the same collective."""
    ELSEWHERE = "elsewhere"
    """In a collective of other ranks."""
    LATE = "late"
    """Alive, between two collectives."""
    FINISHED = "finished"
    """Has left the program."""
    STOPPED = "stopped"
    """Its process is suspended."""
    SILENT = "silent"
    """Its process is there but does not answer."""
    GONE = "gone"
    """Its process has ended without an exit announcement."""
    UNKNOWN = "unknown"
    """It cannot be asked."""


NEVER_COMES = (RankState.STOPPED, RankState.SILENT, RankState.GONE)


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
    # Before `has_left`: ranks that are stuck in one round and have left the program learn by this
    # which of them is the lowest, and ends the job (`_extra_s` in shutdown.py).
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
        RankState.STOPPED: f"stopped: {where} is suspended (SIGSTOP); SIGCONT lets it go on",
        RankState.SILENT: f"silent: {where} does not answer: stopped, or in code that lets no "
        "other thread run",
        RankState.GONE: f"gone: {where} has ended without a word",
        RankState.UNKNOWN: f"unknown: {where} cannot be asked",
    }[state]


def is_suspended(pid: int) -> bool:
    """Return whether a process of this host is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name of the program, in parentheses, may contain blanks and parentheses itself (proc(5)).
    return stat.rpartition(")")[2].split()[0] in "Tt"
