"""Object collectives: barrier, broadcast and gather of Python objects, as pickle.

Pickle travels between the ranks of one job, which run the same program as the same user. It never
reaches a file.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpistrat.arguments import as_integer
from mpistrat.collectives.collectives import Collectives

__all__ = ["as_text", "barrier", "broadcast_object", "from_text", "gather_objects"]

_R = TypeVar("_R")


def barrier(collectives: Collectives) -> None:
    """Return when every rank has made this call. **Collective**."""
    with collectives.call("barrier") as call:
        call.agree()
        if not call.channel.checks:  # else the agreement has waited for all
            call.channel.exchange(None)


def broadcast_object(collectives: Collectives, kind: str, value: Any, root: int) -> Any:
    """Return a copy of the object of `root` on every rank. **Collective**."""
    with collectives.call(kind) as call:
        root = as_integer(f"{kind}: root", root, 0, collectives.size - 1)
        is_root = collectives.rank == root
        own = _pickled(kind, value) if is_root else np.empty(0, np.uint8)
        call.agree(f"from rank {root}")
        transport = call.channel.transport
        with call.moving():
            # Only the root knows how long the pickle is.
            length = np.array([own.size], np.int64)
            transport.broadcast(length, root)
            data = own if is_root else np.empty(int(length[0]), np.uint8)
            call.note_moved(data.nbytes, "broadcast")
            transport.broadcast(data, root)
        call.show_received([data])
    return _on_every_rank(collectives, kind, lambda: pickle.loads(data.data))


def gather_objects(collectives: Collectives, kind: str, value: Any) -> list[Any]:
    """Return copies of the objects of all ranks, in rank order, on every rank. **Collective**."""
    with collectives.call(kind) as call:
        own = _pickled(kind, value)
        call.agree()
        transport = call.channel.transport
        with call.moving():
            lengths = transport.all_gather(np.array([own.size], np.int64), [1] * collectives.size)
            call.note_moved(own.nbytes, "all_gather")
            joined = transport.all_gather(own, lengths.tolist())
        call.show_received([joined])
    parts = np.split(joined, np.cumsum(lengths)[:-1])
    return _on_every_rank(collectives, kind, lambda: [pickle.loads(part.data) for part in parts])


def _pickled(kind: str, value: Any) -> np.ndarray:
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects raise what they like
        raise TypeError(
            f"{kind} sends objects as pickle, but the object of type {type(value).__name__} on "
            f"this rank cannot be pickled: {error}. Send what it is made of, such as arrays, "
            "numbers and dicts."
        ) from error
    return np.frombuffer(bytearray(data), np.uint8)


def as_text(kind: str, value: Any) -> str:
    """Return the pickle of an object as text, which may travel with other values."""
    return base64.b64encode(_pickled(kind, value).data).decode()


def from_text(text: str) -> Any:
    """Return a copy of the object that another rank has given to `as_text`."""
    return pickle.loads(base64.b64decode(text))


def _on_every_rank(collectives: Collectives, kind: str, load: Callable[[], _R]) -> _R:
    """Return what `load` returns; where it fails on any rank, it fails on all. **Collective**."""
    # A class may be missing on one rank alone, or refuse its state there.
    with collectives.common_outcome(kind):
        return load()
