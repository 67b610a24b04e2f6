"""Spans of time, which are recorded only if the user asks for a timeline.

Code that takes time marks itself with `span`. The recorder writes the spans to a file of this rank
every second, so that a killed job leaves a timeline too.
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

from mpistrat.cuda_api import profiler_marks

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FLUSH_INTERVAL_S = 1.0


class Recorder:
    """Appends the spans of this rank to a file in a thread, as lines of JSON."""

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        self.push: Callable[[str], object] | None
        self.pop: Callable[[], object] | None
        """`push` and `pop` mark the same ranges for NVIDIA's profilers, if CuPy is in use."""
        self.push, self.pop = profiler_marks()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Any thread appends without the lock, because `append` of a deque is atomic in CPython.
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write(json.dumps(header) + "\n")
        self._file.flush()
        threading.Thread(target=self._flush_often, name="mpistrat-timeline", daemon=True).start()

    def _flush_often(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the last flush reports errors
            while not self._file.closed:
                time.sleep(_FLUSH_INTERVAL_S)
                self.flush()

    def add(
        self, category: str, name: str, began_ns: int, ended_ns: int, facts: dict[str, Any]
    ) -> None:
        """Add a span between two readings of the monotonic clock. May be called by any thread."""
        thread = threading.get_ident()
        self._waiting.append((category, name, began_ns, ended_ns, thread, facts))

    def flush(self) -> None:
        """Write the spans so far."""
        # A fork shares the file. It would write the waiting spans of its parent a second time.
        if os.getpid() != self._pid:
            return
        with self._lock:
            # Spans that other threads append in the meantime wait for the next flush.
            taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._file.writelines(json.dumps(each) + "\n" for each in taken)
            self._file.flush()

    def close(self) -> None:
        """Write the remaining spans, and close the file."""
        self.flush()
        self._file.close()


class _State:
    recorder: Recorder | None = None


state_of_recording = _State()
_NOTHING = contextlib.nullcontext()


def active() -> Recorder | None:
    """Return the current recorder, if there is one."""
    return state_of_recording.recorder


def record_on(recorder: Recorder | None) -> None:
    """Record spans on `recorder` from now on."""
    state_of_recording.recorder = recorder


class _Span:
    def __init__(self, recorder: Recorder, category: str, name: str, facts: dict[str, Any]) -> None:
        self._recorder = recorder
        self._category, self._name, self._facts = category, name, facts

    def __enter__(self) -> dict[str, Any]:
        if self._recorder.push is not None:
            self._recorder.push(self._name)
        self._began_ns = monotonic_ns()
        return self._facts

    def __exit__(self, *exc_info: object) -> None:
        ended_ns = monotonic_ns()
        self._recorder.add(self._category, self._name, self._began_ns, ended_ns, self._facts)
        if self._recorder.pop is not None:
            self._recorder.pop()


def span(category: str, name: str, **facts: Any) -> AbstractContextManager[dict[str, Any] | None]:
    """Return a context manager that records a span, with `facts` as JSON values.

    It yields the facts, so that code in the block can add more, or ``None`` if nothing is recorded.
    """
    recorder = state_of_recording.recorder
    return _NOTHING if recorder is None else _Span(recorder, category, name, facts)


def mark(name: str) -> Callable[[], object] | None:
    """Begin a range for NVIDIA's profilers, if any, and return the function that ends it."""
    recorder = state_of_recording.recorder
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
