"""Object collectives: barrier, broadcast and gather of Python objects, as pickle.

Objects in messages between two ranks are also converted here; their arrays are sent next to the
pickle.

Pickles are sent only between the ranks of one job, which run the same program as the same user.
They are never written to a file.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mpistrat.arguments import as_integer
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.operations.all_gather import gather_flat
from mpistrat.collectives.operations.broadcast import Broadcast
from mpistrat.sharding import consecutive

_R = TypeVar("_R")


def barrier(collectives: Collectives) -> None:
    """Return when every rank has made this call. **Collective**."""
    with collectives.call("barrier") as call:
        wait_for_all(call)


def wait_for_all(call: CollectiveCall) -> None:
    """Return when every rank is in this `call`. **Collective**."""
    call.agree()
    if not call.channel.checks:  # else the agreement has waited for all
        call.channel.barrier()


def broadcast_object(collectives: Collectives, kind: str, value: Any, root: int) -> Any:
    """Return a copy of the object of `root` on every rank. **Collective**."""
    with collectives.call(kind) as call:
        root = as_integer(f"{kind}: root", root, 0, collectives.size - 1)
        is_root = collectives.rank == root
        own = _pickled(kind, value) if is_root else np.empty(0, np.uint8)
        call.agree(f"from rank {root}")
        # Only the root knows the length of the pickle.
        from_root, length = Broadcast(root), np.array([own.size], np.int64)
        from_root.forward(call, [length], out=[length])
        data = own if is_root else np.empty(int(length[0]), np.uint8)
        from_root.forward(call, [data], out=[data])
    return _on_every_rank(collectives, kind, lambda: pickle.loads(data.data))


def gather_objects(collectives: Collectives, kind: str, value: Any) -> list[Any]:
    """Return copies of the objects of all ranks, in rank order, on every rank. **Collective**."""
    with collectives.call(kind) as call:
        own = _pickled(kind, value)
        call.agree()
        size = np.array([own.size], np.int64)
        # Pickles have different lengths on different ranks, so the lengths are sent first.
        lengths = gather_flat(call, [size], [[1] * collectives.size])[0].tolist()
        (joined,) = gather_flat(call, [own], [lengths])
    parts = consecutive(lengths)
    return _on_every_rank(
        collectives, kind, lambda: [pickle.loads(joined[part].data) for part in parts]
    )


def as_bytes(value: Any) -> bytes:
    """Return an object as bytes for other ranks."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def from_bytes(data: bytes) -> Any:
    """Return the object that a different rank has converted with `as_bytes`."""
    return pickle.loads(data)


def _pickled(kind: str, value: Any) -> np.ndarray:
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects may raise any error
        raise TypeError(
            f"{kind} sends objects as pickle, but the object of type {type(value).__name__} on "
            f"this rank cannot be pickled: {error}. Send what it is made of, such as arrays, "
            "numbers and dicts."
        ) from error
    return np.frombuffer(bytearray(data), np.uint8)


def as_text(kind: str, value: Any) -> str:
    """Return the pickle of an object as a string, which can be sent with other values."""
    return base64.b64encode(_pickled(kind, value).data).decode()


def from_text(text: str) -> Any:
    """Return a copy of the object that a different rank has passed to `as_text`."""
    return pickle.loads(base64.b64decode(text))


def split_object(
    value: Any, substitute: Callable[[Any], Any | None]
) -> tuple[bytes, list[np.ndarray]]:
    """Return the pickle of an object, and copies of its arrays' memory, which are sent separately.

    If `substitute` returns a value other than ``None`` for an object, that value is sent in its
    place.
    """
    file, buffers = io.BytesIO(), []

    def take(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as memory:
            if memory.nbytes < _SMALL_BUFFER:
                return True  # it stays in the pickle
            buffers.append(np.frombuffer(bytearray(memory), np.uint8))
        return False

    _Pickler(file, take, substitute).dump(value)
    return file.getvalue(), buffers


def join_object(data: Any, buffers: Sequence[np.ndarray], find: Callable[[Any], Any]) -> Any:
    """Return the object that `split_object` has split; its arrays keep the `buffers`.

    `find` returns the object of this rank for the value that was sent in its place.
    """
    if not data:
        return None
    # Unpickling may run code of a class that calls this function again.
    outer = _Found.find
    _Found.find = find
    try:
        return pickle.loads(data, buffers=[each.data for each in buffers])
    finally:
        _Found.find = outer


_SMALL_BUFFER = 512
"""Number of bytes up to which copying an array is faster than describing it."""


class _Pickler(pickle.Pickler):
    """A pickler that replaces some objects."""

    def __init__(
        self,
        file: io.BytesIO,
        take: Callable[[pickle.PickleBuffer], bool],
        substitute: Callable[[Any], Any | None],
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=take)
        self._substitute = substitute

    def reducer_override(self, obj: Any) -> Any:
        # Unlike `persistent_id` it is not called for numbers, strings, lists and dicts.
        found = self._substitute(obj)
        return NotImplemented if found is None else (_found, (found,))


class _Found:
    """How this rank finds the objects for values sent in their place, while it unpickles."""

    find: Callable[[Any], Any] = staticmethod(lambda token: token)


def _found(token: Any) -> Any:
    return _Found.find(token)


def _on_every_rank(collectives: Collectives, kind: str, load: Callable[[], _R]) -> _R:
    """Return the result of `load`; if it fails on any rank, it fails on all. **Collective**."""
    # A class may be missing on only one rank, or may fail to load its state there.
    with collectives.common_outcome(kind):
        return load()
