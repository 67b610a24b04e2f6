"""What a rank is doing just now, as another thread of it sees, in words for the other ranks."""

from __future__ import annotations

import enum
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.epochs.callsite import UNKNOWN_PLACE, is_own_code, site_of
from mpistrat.epochs.leaving import is_at_work

if TYPE_CHECKING:
    from mpistrat.epochs.channel import Channel

__all__ = ["State", "Whereabouts", "describe_whereabouts", "whereabouts"]

_MAX_FRAMES = 4

Whereabouts = dict[str, Any]
"""JSON: ``state`` and what `describe_whereabouts` tells about it."""


class State(str, enum.Enum):
    """What can be said of a rank that others wait for."""

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
    """Its process has ended without a word."""
    UNKNOWN = "unknown"
    """It cannot be asked."""


def whereabouts(channel: Channel, channels: Sequence[Channel], has_left: bool) -> Whereabouts:
    """Return what the thread that uses `channel` is doing. Local, from any thread."""
    now = time.monotonic()
    frame = sys._current_frames().get(channel.thread)
    found: Whereabouts = {
        "sequence": channel.ledger.sequence,
        "site": site_of(frame),
        "at_work": is_at_work(),
    }
    others = (each for each in channels if each is not channel and each.waiting is not None)
    waits_elsewhere = next(others, None)
    if channel.stuck_at is not None:
        return found | {"state": State.HERE, "site": channel.stuck_at}
    if channel.waiting is not None:
        return found | {"state": State.HERE}
    if has_left:
        return found | {"state": State.FINISHED}
    if waits_elsewhere is not None and waits_elsewhere.waiting is not None:
        what, since = waits_elsewhere.waiting
        return found | {"state": State.ELSEWHERE, "what": what, "for_s": now - since}
    stack = [
        f"{each.filename.rpartition('/')[2]}:{each.lineno} in {each.name}"
        for each in (traceback.extract_stack(frame) if frame is not None else ())
        if is_own_code(each.filename)
    ]
    late = {
        "state": State.LATE,
        "for_s": now - channel.flight.last_agreed_s(),
        "stack": stack[-_MAX_FRAMES:],
    }
    return found | late


def describe_whereabouts(found: Whereabouts) -> str:
    """Return one line on a rank: its state, and what others must know of it. Local."""
    state = State(found["state"])
    if state is State.HERE:
        return f"{state.value} at {found['site']}"
    if state is State.ELSEWHERE:
        what, site = found["what"], found["site"]
        return f"{state.value}: in {what} at {site}, with other ranks, for {found['for_s']:.0f} s"
    if state is State.LATE:
        path = ", called from ".join(reversed(found["stack"])) or found["site"]
        return f"{state.value}: computing for {found['for_s']:.0f} s, now at {path}"
    if state is State.FINISHED:
        place = "" if found["site"] == UNKNOWN_PLACE else f" at {found['site']}"
        return f"{state.value}: left the program{place}"
    where = f"process {found['pid']} on {found['host']}" if "pid" in found else "no address"
    return {
        State.STOPPED: f"stopped: {where} is suspended (SIGSTOP); SIGCONT lets it go on",
        State.SILENT: f"silent: {where} does not answer: stopped, or in code that lets no "
        "other thread run",
        State.GONE: f"gone: {where} has ended without a word",
        State.UNKNOWN: f"unknown: {where} cannot be asked",
    }[state]
