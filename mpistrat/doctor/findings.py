"""What a check has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Level", "ok", "problem", "warning"]


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Works, but perhaps not as meant."""
    PROBLEM = "problem"
    """A job would fail, or be much slower than it need be."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    """What was looked at."""
    level: Level
    seen: str
    why: str = ""
    """Why it matters; empty where all is well."""
    remedy: str = ""
    """What to type."""


def ok(topic: str, seen: str) -> Finding:
    """Return a finding that needs no attention. Local."""
    return Finding(topic, Level.OK, seen)


def warning(topic: str, seen: str, why: str, remedy: str) -> Finding:
    """Return a finding that may be meant so. Local."""
    return Finding(topic, Level.WARNING, seen, why, remedy)


def problem(topic: str, seen: str, why: str, remedy: str) -> Finding:
    """Return a finding that makes the exit code 1. Local."""
    return Finding(topic, Level.PROBLEM, seen, why, remedy)
