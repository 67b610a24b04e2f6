"""Settings from environment variables: the only module that reads `os.environ`.

mpistrat's own settings are variables named ``MPISTRAT_...``. Other modules also read the variables
of launchers through this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

_PREFIX = "MPISTRAT_"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class _Reader:
    """A function that parses the text of a variable, and a sentence that says what it accepts."""

    read: Callable[[str], Any]
    remedy: str


def _seconds_or_none(text: str) -> float | None:
    if text.lower() == "none":
        return None
    seconds = float(text)
    if not seconds > 0:
        raise ValueError
    return seconds


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError
    return seconds


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _on_or_off(text: str) -> bool:
    return {"on": True, "1": True, "off": False, "0": False}[text.lower()]


def _on_off_or_auto(text: str) -> bool | None:
    return None if text.lower() == "auto" else _on_or_off(text)


def positive_integer(text: str) -> int:
    """Return the integer in `text`; ValueError unless it is at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def not_negative_integer(text: str) -> int:
    """Return the integer in `text`; ValueError unless it is at least 0."""
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _positive_integer_or_auto(text: str) -> int | None:
    return None if text.lower() == "auto" else positive_integer(text)


def _integer_or_auto(text: str) -> int | None:
    return None if text.lower() == "auto" else not_negative_integer(text)


def _level(text: str) -> str:
    if text.upper() not in _LEVELS:
        raise ValueError
    return text.upper()


_SECONDS = _Reader(_seconds, "Use a number of seconds, at least 0.")
_SWITCH = _Reader(_on_or_off, "Use on or off.")
_PATH = _Reader(lambda text: text or None, "Use a path.")
_READERS = {
    "timeout_s": _Reader(_seconds_or_none, "Use a number of seconds above 0, or none."),
    "checks": _SWITCH,
    "wait_notice_s": _SECONDS,
    "fast_paths": _SWITCH,
    "watch": _SWITCH,
    "cuda_aware": _Reader(_on_off_or_auto, "Use on, off or auto."),
    "shared_min_bytes": _Reader(_integer_or_auto, "Use a number of bytes, at least 0, or auto."),
    "exit_grace_s": _SECONDS,
    "full_traceback": _SWITCH,
    "log": _Reader(_level, f"Use one of {', '.join(_LEVELS)}."),
    "flight_dir": _PATH,
    "flight_length": _Reader(positive_integer, "Use a whole number, at least 1."),
    "timeline": _PATH,
    "oversubscribe": _SWITCH,
    "share_gpus": _SWITCH,
    "data_threads": _Reader(_positive_integer_or_auto, "Use a whole number, at least 1, or auto."),
    "restart": _Reader(not_negative_integer, "Use a whole number, at least 0."),
    "fault": _Reader(str, ""),
    "watch_after_s": _Reader(_positive_seconds, "Use a number of seconds above 0."),
    "watch_busy_after_s": _Reader(_seconds_or_none, "Use a number of seconds above 0, or none."),
    "watch_report_only": _SWITCH,
    "watch_json": _PATH,
    "watch_address": _Reader(str, ""),
    "gather_limit": _Reader(not_negative_integer, "Use a number of bytes, at least 0."),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the library, each from the variable ``MPISTRAT_<NAME>``."""

    timeout_s: float | None = 1800.0
    """How long a rank waits for ranks that are not in the same collective; ``none``: forever."""
    checks: bool = True
    """Whether ranks compare their calls before they send data. Without, disagreeing ranks hang."""
    fast_paths: bool = True
    """Whether repeated calls skip checks, and ranks of a node reduce in memory that they share."""
    wait_notice_s: float = 60.0
    """Seconds of waiting after which a rank prints one line that says who is missing."""
    watch: bool = True
    """Whether ranks may ask each other over sockets why one does not arrive."""
    cuda_aware: bool | None = None
    """Whether device memory may be passed to MPI; ``None`` (auto): if a test of it succeeds."""
    shared_min_bytes: int | None = None
    """Size from which arrays are reduced in shared memory; ``None`` (auto): it is measured."""
    exit_grace_s: float = 5.0
    """How long a failed rank waits for the others before it ends the job."""
    full_traceback: bool = False
    """Whether tracebacks show the frames of this package."""
    log: str | None = None
    """Level of the ``mpistrat`` logger; ``None``: the program's, or else WARNING."""
    flight_dir: str | None = None
    """Folder for the flight records of a job that fails; ``None``: they are not written."""
    flight_length: int = 256
    """Number of collectives that a flight record keeps."""
    timeline: str | None = None
    """File for the timeline of all ranks; ``None``: no timeline."""
    oversubscribe: bool = False
    """Whether ranks may share cores without a warning."""
    share_gpus: bool = False
    """Whether several ranks may compute on one GPU."""
    data_threads: int | None = None
    """Threads that decode HDF5 chunks; ``None`` (auto): this rank's share of the cores."""
    restart: int = 0
    """Number of this restart of the job; ``mpistrat run --restarts`` counts them from 1."""
    fault: str = ""
    """A fault to inject on purpose, in the notation of `mpistrat.testing.inject`."""
    watch_after_s: float | None = None
    """How long a hang stands still before `mpistrat watch` reports it; ``None``: no watch."""
    watch_busy_after_s: float | None = 1800.0
    """How long the watch lets ranks wait for one that is outside MPI; ``none``: forever."""
    watch_report_only: bool = False
    """Whether the watch reports once and leaves the job alone."""
    watch_json: str | None = None
    """File to which the watch also writes its report."""
    watch_address: str = ""
    """Address and secret of the watch's collector, which ``mpistrat watch`` sets for its ranks."""
    gather_limit: int = 4 << 30
    """Size in bytes of the largest sharded variable that `value` may collect on every rank."""

    @classmethod
    def parse(cls, variables: Mapping[str, str]) -> Settings:
        """Return the settings from the ``MPISTRAT_...`` variables in `variables`."""
        values: dict[str, Any] = {}
        for variable, text in variables.items():
            if not variable.startswith(_PREFIX):
                continue
            name = variable[len(_PREFIX) :].lower()
            # An error, because a misspelt variable would silently have no effect.
            if name not in _READERS:
                known = ", ".join(_PREFIX + field.name.upper() for field in fields(cls))
                raise ValueError(f"Unknown setting {variable}={text!r}. Known settings: {known}.")
            reader = _READERS[name]
            try:
                values[name] = reader.read(text)
            except (ValueError, KeyError):
                raise ValueError(
                    f"The setting {variable} cannot be {text!r}. {reader.remedy}"
                ) from None
        return cls(**values)


def environment() -> Mapping[str, str]:
    """Return the environment of this process, for the modules that look for a launcher."""
    return os.environ


def export_defaults(values: Mapping[str, str]) -> None:
    """Set environment variables that are not set yet, for libraries that read them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def settings() -> Settings:
    """Return the settings of this process from its current environment."""
    # Bytes, because a clean environment is read often, and most of its variables are of others.
    own = [name for name in os.environb if name.startswith(_PREFIX.encode())]
    return Settings.parse({name: os.environ[name] for name in map(os.fsdecode, own)})


def settings_at_the_end() -> Settings:
    """Return the settings at the end of a program; the defaults if a bad setting has ended it."""
    try:
        return settings()
    except ValueError:
        return Settings()
