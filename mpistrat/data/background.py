"""An iterator that runs ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any

__all__ = ["in_background"]

_POLL_S = 0.1


class _End:
    """What the thread sends last."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def in_background(
    elements: Generator[Any, None, None], num_ahead: int
) -> Generator[Any, None, None]:
    """Yield from `elements`, which a thread keeps up to `num_ahead` elements ahead. Local.

    The thread starts with the first element and ends when the iterator is exhausted, closed or
    forgotten. An exception of `elements` is raised in its place.
    """
    ready: queue.Queue[Any] = queue.Queue(num_ahead)
    abandoned = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(elements, ready, abandoned), name="mpistrat-prefetch", daemon=True
    )
    thread.start()
    try:
        while not isinstance(element := ready.get(), _End):
            yield element
        if element.error is not None:
            raise element.error
    finally:
        abandoned.set()
        thread.join()


def _produce(
    elements: Generator[Any, None, None], ready: queue.Queue[Any], abandoned: threading.Event
) -> None:
    error: BaseException | None = None
    try:
        for element in elements:
            if not _put(element, ready, abandoned):
                break
    except BaseException as raised:
        error = raised
    finally:
        elements.close()
    _put(_End(error), ready, abandoned)


def _put(element: Any, ready: queue.Queue[Any], abandoned: threading.Event) -> bool:
    while not abandoned.is_set():
        try:
            ready.put(element, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
