"""What one rank has written of the timeline: a file of JSON lines, whole or broken off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FORMAT", "FORMAT_VERSION", "Part", "Span", "part_of", "parts_of"]

FORMAT = "mpistrat-timeline-part"
FORMAT_VERSION = 1


class Span(NamedTuple):
    """Something that took time on one rank."""

    category: str
    """``collective``, or what `mpistrat.spans.span` was given."""
    name: str
    began_ns: int
    """By the clock of the rank's node."""
    ended_ns: int
    thread: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The spans of one rank."""

    path: Path
    header: dict[str, Any]
    """Rank, size, host, process and clock."""

    @classmethod
    def open(cls, path: Path) -> Part:
        """Return the part in the file `path`. Local.

        Raises
        ------
        ValueError
            If it is no such file.
        OSError
            If it cannot be read.
        """
        with open(path, encoding="utf-8") as file:
            header = _parsed(file.readline())
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f"{path} is no part of a timeline.")
        if header.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has version {header.get('format_version')} of the format; this is for "
                f"version {FORMAT_VERSION}."
            )
        return cls(path, header)

    @property
    def rank(self) -> int:
        """The rank in the world."""
        return int(self.header["rank"])

    def spans(self) -> Iterator[Span]:
        """Yield the spans in the order in which they ended. Local."""
        with open(self.path, encoding="utf-8") as file:
            next(file, None)
            for line in file:
                fields = _parsed(line)
                if isinstance(fields, list) and len(fields) == len(Span._fields):
                    yield Span(*fields)


def part_of(path: Path, rank: int) -> Path:
    """Return where `rank` writes its part of the timeline `path`. Local."""
    return path.with_name(f"{path.name}.rank{rank}.part")


def parts_of(path: Path) -> list[Path]:
    """Return the parts of the timeline `path` that are there, in rank order. Local."""
    found = path.parent.glob(f"{path.name}.rank*.part")
    return sorted(found, key=lambda each: (len(each.name), each.name))


def _parsed(line: str) -> Any:
    """Return the JSON in `line`, ``None`` where a killed rank has written half of it."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
