"""Spans of time, recorded where a timeline is wanted, and nothing where not.

Whoever does something that takes time says so with `span`. The recorder writes what it gets to
a file of this rank from time to time, so that a job that is killed leaves what it can.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic_ns
from typing import Any, ParamSpec, TypeVar

from mpistrat.arrays import profiler_marks

__all__ = ["Recorder", "active", "mark", "record_on", "span", "spanned"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FLUSH_INTERVAL_S = 1.0


class Recorder:
    """Takes the spans of this rank, and appends them to a file as lines of JSON.

    A thread does so every second: a rank that hangs or is killed has written what came before.
    """

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        self.push: Callable[[str], object] | None
        self.pop: Callable[[], object] | None
        """Mark the same ranges for NVIDIA's profilers, where CuPy is in use."""
        self.push, self.pop = profiler_marks()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write(json.dumps(header) + "\n")
        self._file.flush()
        threading.Thread(target=self._flush_often, name="mpistrat-timeline", daemon=True).start()

    def _flush_often(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the last flush tells what is wrong
            while not self._file.closed:
                time.sleep(_FLUSH_INTERVAL_S)
                self.flush()

    def add(
        self, category: str, name: str, began_ns: int, ended_ns: int, facts: dict[str, Any]
    ) -> None:
        """Take a span between two readings of the monotonic clock, from any thread."""
        thread = threading.get_ident()
        self._waiting.append((category, name, began_ns, ended_ns, thread, facts))

    def flush(self) -> None:
        """Write the spans taken so far."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            # What other threads append meanwhile stays for the next time.
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._file.writelines(json.dumps(each) + "\n" for each in taken)
            self._file.flush()

    def close(self) -> None:
        """Write what is left, and no more."""
        self.flush()
        self._file.close()


class _State:
    recorder: Recorder | None = None


_state = _State()
_NOTHING = contextlib.nullcontext()


def active() -> Recorder | None:
    """Return what takes spans now, ``None`` if nothing does."""
    return _state.recorder


def record_on(recorder: Recorder | None) -> None:
    """Give the spans from now on to `recorder`."""
    _state.recorder = recorder


class _Span:
    def __init__(self, recorder: Recorder, category: str, name: str, facts: dict[str, Any]) -> None:
        self._recorder = recorder
        self._category, self._name, self._facts = category, name, facts

    def __enter__(self) -> None:
        if self._recorder.push is not None:
            self._recorder.push(self._name)
        self._began_ns = monotonic_ns()

    def __exit__(self, *exc_info: object) -> None:
        ended_ns = monotonic_ns()
        self._recorder.add(self._category, self._name, self._began_ns, ended_ns, self._facts)
        if self._recorder.pop is not None:
            self._recorder.pop()


def span(category: str, name: str, **facts: Any) -> AbstractContextManager[None]:
    """Return a context manager around something that takes time."""
    recorder = _state.recorder
    return _NOTHING if recorder is None else _Span(recorder, category, name, facts)


def mark(name: str) -> Callable[[], object] | None:
    """Begin a range for NVIDIA's profilers, and return what ends it, if there are any."""
    recorder = _state.recorder
    if recorder is None or recorder.push is None:
        return None
    recorder.push(name)
    return recorder.pop


def spanned(category: str, name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that puts a `span` around each call of a function."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def inner(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with span(category, name):
                return function(*args, **kwargs)

        return inner

    return decorate
