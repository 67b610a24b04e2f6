"""Device strings of the seeds' grammar: ``gpu:0``, ``/job:worker/task:3/device:GPU:0``."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Place", "parse_place", "spell_place"]

_GRAMMAR = re.compile(
    r"(?:/job:worker)?(?:/replica:0)?(?:/task:(?P<task>\d+))?/?(?:device:)?"
    r"(?P<kind>cpu|gpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Place:
    """A device on one rank, or on every rank."""

    task: int | None
    """The rank, ``None`` for every rank."""
    kind: str
    """``"cpu"`` or ``"gpu"``."""
    index: int
    """Number of the device among those of its kind."""


def parse_place(text: str, num_tasks: int) -> Place:
    """Return the place that `text` names among `num_tasks` ranks. Local.

    Raises
    ------
    ValueError
        For another form, or a rank that is not there.
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(
            f'Unknown device {text!r}. Use a form such as "cpu:0", "gpu:0" or '
            '"/job:worker/task:1/device:GPU:0".'
        )
    task = None if match["task"] is None else int(match["task"])
    if task is not None and task >= num_tasks:
        raise ValueError(
            f"The device {text!r} is on task {task}, but the tasks are 0 to {num_tasks - 1}."
        )
    return Place(task, match["kind"].lower(), int(match["index"] or 0))


def spell_place(task: int, kind: str, index: int) -> str:
    """Return the full device string of a device on rank `task`. Local."""
    return f"/job:worker/replica:0/task:{task}/device:{kind.upper()}:{index}"
