"""Agreements of mpistrat's strategies in which this rank waits, for the sampler of the watch.

A rank that waits for others to make the same collective polls, and sleeps outside MPI in between.
Without this it would look like a rank that may always continue.
"""

from __future__ import annotations

import sys
import threading
from typing import Any


def agreements() -> list[dict[str, Any]]:
    """Return the channels of this process: ranks, collectives so far, and who waits in which."""
    # Imported by the program or not at all: this must work in programs without mpistrat.
    module = sys.modules.get("mpistrat.failures.process_state")
    process = getattr(module, "process", None)
    if process is None or process.is_fork:
        return []
    natives = {each.ident: each.native_id for each in threading.enumerate()}
    return [
        _describe(channel, process.has_left, natives)
        for channel in list(process.channels)
        # A closed channel raises an error at once, or ends the job, so nobody waits there.
        if channel.size > 1 and channel.identity and channel.closed is None
    ]


def _describe(channel: Any, has_left: bool, natives: dict[int | None, Any]) -> dict[str, Any]:
    ranks = [int(each) for each in channel.transport.world_ranks]
    number = channel.ledger.sequence
    found = {"key": channel.identity, "ranks": _spans(ranks)}
    if has_left:  # the last round, in which the ranks learn that this one has ended
        main = threading.main_thread().native_id
        return found | {"n": number + 1, "what": "the end of the program", "tid": main}
    waiting = channel.waiting
    if waiting is None:
        return found | {"n": number}
    thread = natives.get(channel.thread)
    return found | {"n": number, "what": waiting[0], "tid": thread, "limit": channel.wait_limit_s}


def _spans(ranks: list[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans
