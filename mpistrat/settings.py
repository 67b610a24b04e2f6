"""The process environment: the only module that reads `os.environ`.

mpistrat's own settings are variables named ``MPISTRAT_...``. The variables that launchers
set are read here too, so that every question to the environment passes one door.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Settings", "environment", "settings", "settings_at_the_end"]

_PREFIX = "MPISTRAT_"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _seconds_or_none(text: str) -> float | None:
    if text.lower() == "none":
        return None
    seconds = float(text)
    if not seconds > 0:
        raise ValueError
    return seconds


def _on_or_off(text: str) -> bool:
    return {"on": True, "1": True, "off": False, "0": False}[text.lower()]


def _positive_integer(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _text_or_none(text: str) -> str | None:
    return text or None


class _UnknownChoiceError(ValueError):
    """Says which choices there are."""


def _level(text: str) -> str:
    if text.upper() not in _LEVELS:
        raise _UnknownChoiceError(f"Use one of {', '.join(_LEVELS)}.")
    return text.upper()


def _on_off_or_auto(text: str) -> bool | None:
    if text.lower() == "auto":
        return None
    try:
        return _on_or_off(text)
    except KeyError:
        raise _UnknownChoiceError("Use on, off or auto.") from None


@dataclass(frozen=True)
class Settings:
    """Settings of the library, each from the variable ``MPISTRAT_<NAME>``."""

    timeout_s: float | None = 1800.0
    """How long a rank waits for ranks that are not in the same collective; ``none``: for ever."""
    checks: bool = True
    """Whether ranks compare their calls before data moves. Without, ranks that disagree hang."""
    wait_notice_s: float = 60.0
    """After how long a wait one line says who is missing."""
    watch: bool = True
    """Whether ranks may ask each other over sockets why one does not come."""
    cuda_aware: bool | None = None
    """Whether MPI may be given device memory; ``None`` (auto): where it is proved to work."""
    exit_grace_s: float = 5.0
    """How long a rank that has failed waits for the others before it ends the job."""
    log: str | None = None
    """Level of the ``mpistrat`` logger; ``None``: the program's, or else WARNING."""
    flight_dir: str | None = None
    """Folder for the flight records of a job that fails; ``None``: they are not written."""
    flight_length: int = 256
    """How many collectives a flight record keeps."""
    timeline: str | None = None
    """File for the timeline of all ranks; ``None``: there is none."""
    fault: str = ""
    """What is to go wrong on purpose, as `mpistrat.testing.inject` takes it."""

    @classmethod
    def parse(cls, variables: Mapping[str, str]) -> Settings:
        """Return the settings that the ``MPISTRAT_...`` variables in `variables` give.

        Raises
        ------
        ValueError
            For an unknown name or a value that cannot be read.
        """
        readers: dict[str, Callable[[str], Any]] = {
            "timeout_s": _seconds_or_none,
            "checks": _on_or_off,
            "wait_notice_s": float,
            "watch": _on_or_off,
            "cuda_aware": _on_off_or_auto,
            "exit_grace_s": float,
            "log": _level,
            "flight_dir": _text_or_none,
            "flight_length": _positive_integer,
            "timeline": _text_or_none,
            "fault": str,
        }
        values: dict[str, Any] = {}
        for variable, text in variables.items():
            if not variable.startswith(_PREFIX):
                continue
            name = variable[len(_PREFIX) :].lower()
            if name not in readers:
                known = ", ".join(_PREFIX + field.name.upper() for field in fields(cls))
                raise ValueError(f"Unknown setting {variable}={text!r}. Known settings: {known}.")
            try:
                values[name] = readers[name](text)
            except (ValueError, KeyError) as error:
                remedy = f" {error}" if isinstance(error, _UnknownChoiceError) else ""
                raise ValueError(f"The setting {variable} cannot be {text!r}.{remedy}") from None
        return cls(**values)


def environment() -> Mapping[str, str]:
    """Return the variables of this process, for the modules that look for a launcher. Local."""
    return os.environ


def settings() -> Settings:
    """Return the settings of this process as its environment gives them now. Local."""
    return Settings.parse(os.environ)


def settings_at_the_end() -> Settings:
    """Return the settings, the defaults where one is bad: that is what ends the program. Local."""
    try:
        return settings()
    except ValueError:
        return Settings()
