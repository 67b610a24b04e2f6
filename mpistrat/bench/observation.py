"""What a collective says of itself: which implementation moved how many bytes, and why.

It is read where the timeline reads it too, from the facts that `CollectiveCall.moved` holds
after the call. So a row shows what was used in this run, and not what a rule would choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat.spans import Recorder, active, record_on

__all__ = ["facts_of_last_collective"]


class _Observer(Recorder):
    """A recorder that keeps what it gets, and writes no file."""

    def __init__(self) -> None:
        self.push = self.pop = None
        self.facts: list[dict[str, Any]] = []

    def add(
        self, category: str, name: str, began_ns: int, ended_ns: int, facts: dict[str, Any]
    ) -> None:
        if category == "collective":
            self.facts.append(facts)


def facts_of_last_collective(call: Callable[[], object]) -> dict[str, str]:
    """Make `call`, and return what its last collective says of itself. Local, as `call` is.

    Returns
    -------
    dict
        ``implementation``: the class that moved the bytes. ``why``: its reason, where it gives
        one. Empty where the ranks compare nothing (``MPISTRAT_CHECKS=off``).
    """
    observer, before = _Observer(), active()
    record_on(observer)
    try:
        call()
    finally:
        record_on(before)
    last = observer.facts[-1] if observer.facts else {}
    return {key: str(last[key]) for key in ("implementation", "why") if key in last}
