"""Exchange of rows: each rank sends the pieces of its parts to the owners of their chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpistrat.arrays import host_view
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations.all_gather import gather_flat
from mpistrat.collectives.operations.all_to_all import exchange_flat
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset
from mpistrat.data.hdf5_writer.geometry import Piece
from mpistrat.sharding import consecutive

BYTES_PER_ROUND = 2**24
"""A rank sends about this many bytes at a time, so that messages need little memory."""


@dataclass
class PlacedPart:
    """An array of this rank, and where it belongs."""

    dataset: OutputDataset
    array: Any
    """On the host or a device; of the dataset's dtype, with the rows as first axis."""
    rows: range | np.ndarray
    starts: tuple[int, ...]
    """Where it begins along all axes except the first."""
    is_shared: bool = False
    """Whether all ranks hold it, so that each takes what it owns."""
    keeps_whole: bool = False
    """Whether this rank keeps the chunks of which it has all elements, instead of their owners."""


def not_kept(part: PlacedPart) -> PlacedPart:
    """Return a part whose whole chunks go to their owners."""
    return replace(part, keeps_whole=False)


Put = Callable[[OutputDataset, Piece, np.ndarray], None]


def pieces_of(
    parts: Iterable[PlacedPart], rank: int, size: int
) -> Iterator[tuple[OutputDataset, Piece, np.ndarray, int]]:
    """Yield the pieces of parts, with their elements in host memory and the rank of their owner."""
    for part in parts:
        geometry = part.dataset.geometry
        host: np.ndarray | None = None
        source: Any = None
        for piece in geometry.pieces(part.rows, part.starts, part.array.shape[1:]):
            owner = geometry.owner(piece.block, piece.cell, size)
            if part.keeps_whole and part.dataset.is_whole(piece):
                owner = rank
            if part.is_shared and owner != rank:
                continue
            if isinstance(part.array, np.ndarray):
                index: tuple[Any, ...] = (piece.source_rows, *piece.source)
                host = part.array[index]
            else:
                # From a device, the rows of one block at a time.
                if source is None or source[0] is not piece.source_rows:
                    source = piece.source_rows, host_view(part.array[piece.source_rows])
                index = (slice(None), *piece.source)
                host = source[1][index]
            yield part.dataset, piece, host, owner


def exchange_round(
    call: CollectiveCall,
    datasets: Sequence[OutputDataset],
    pieces: Iterator[tuple[OutputDataset, Piece, np.ndarray, int]],
    put: Put,
) -> bool:
    """Send some pieces to their owners, and `put` those for this rank. **Collective**.

    Returns whether any rank has more. The ranks have agreed already.
    """
    rank, size = call.channel.rank, call.channel.size
    outgoing: list[list[bytes]] = [[] for _ in range(size)]
    sent, is_over = 0, True
    numbers = {dataset.name: number for number, dataset in enumerate(datasets)}
    for dataset, piece, elements, owner in pieces:
        if owner == rank:
            put(dataset, piece, elements)
        else:
            outgoing[owner] += _packed(numbers[dataset.name], piece, elements)
        # Pieces that stay on this rank count, too: complete chunks are written only between two
        # rounds, and until then they fill the memory.
        sent += elements.nbytes
        if sent >= BYTES_PER_ROUND:
            is_over = False
            break
    if size == 1:
        return not is_over
    messages = [b"".join(each) for each in outgoing]
    lengths = [len(each) for each in messages]
    own = np.array([*lengths, not is_over], np.int64)
    (all_lengths,) = gather_flat(call, [own], [[size + 1] * size])
    table = all_lengths.reshape(size, size + 1)
    # All ranks have the whole table, so either all exchange or none.
    if table[:, :size].any():
        incoming = table[:, rank].tolist()
        buffer = np.frombuffer(b"".join(messages), np.uint8)
        received = exchange_flat(call, buffer, lengths, incoming)
        for part in consecutive(incoming):
            _unpack(received[part], datasets, put)
    # If one rank has more, all must come to the next round, those without rows too: the exchange is
    # a collective.
    return bool(table[:, size].any())


def _packed(number: int, piece: Piece, elements: np.ndarray) -> list[bytes]:
    """Return the bytes of a message with one piece."""
    rows = piece.rows
    explicit = b"" if isinstance(rows, slice) else np.asarray(rows, np.int64).tobytes()
    first = rows.start if isinstance(rows, slice) else -1
    head = [number, piece.block, piece.cell, first, *elements.shape[:1]]
    head += [*piece.starts, *elements.shape[1:]]
    data = elements.tobytes()
    padding = bytes(-len(data) % 8)
    return [np.array([len(head), *head], np.int64).tobytes(), explicit, data, padding]


def _unpack(message: np.ndarray, datasets: Sequence[OutputDataset], put: Put) -> None:
    """Pass the pieces of a message to `put`."""
    position, end = 0, len(message)
    data = message.tobytes() if message.ctypes.data % 8 else message
    message = np.frombuffer(data, np.uint8)
    while position < end:
        (count,) = message[position : position + 8].view(np.int64).tolist()
        head = message[position + 8 : position + 8 + 8 * count].view(np.int64).tolist()
        position += 8 + 8 * count
        number, block, cell, first, num_rows = head[:5]
        dataset, num_axes = datasets[number], (count - 5) // 2
        starts, inner = tuple(head[5 : 5 + num_axes]), tuple(head[5 + num_axes :])
        rows: Any = slice(first, first + num_rows)
        if first < 0:
            rows = message[position : position + 8 * num_rows].view(np.int64)
            position += 8 * num_rows
        shape = (num_rows, *inner)
        num_bytes = math.prod(shape) * dataset.dtype.itemsize
        raw = message[position : position + num_bytes]
        elements = np.ndarray(shape, dataset.dtype, raw.data)
        put(dataset, Piece(block, cell, rows, slice(num_rows), starts, ()), elements)
        position += num_bytes + -num_bytes % 8
