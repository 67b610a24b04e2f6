"""Who gets what: the integer arithmetic of splitting batches, data sets and files.

Pure functions of integers. Every rank computes them alike, so nothing here communicates.
"""

from __future__ import annotations

__all__ = [
    "ceil_div",
    "cut",
    "files_of_rank",
    "lane_bounds",
    "lane_lengths",
    "num_batches",
    "num_lanes",
    "shard_length",
    "slice_of_rank",
]

_LANE_COUNTS = (1, 2, 4, 12, 24, 60, 120, 240, 720, 2520, 5040)
"""Numbers with many divisors, so that lanes divide evenly over common numbers of ranks."""

_FEW_LANES = 4
"""Up to so many lanes, so that a few ranks share the work, two pieces for each are enough."""

_MIN_PIECES_PER_LANE = 8
"""More lanes with fewer pieces would mix badly, and cutting lanes would split too many pieces."""

_MIN_EXAMPLES_PER_LANE = 64
"""In a lane with fewer examples, neighbours would often stay together."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor`` rounded up. Local."""
    return -(-dividend // divisor)


def cut(num_elements: int, length: int) -> list[slice]:
    """Divide `num_elements` into slices of `length`, the last one shorter. Local."""
    return [
        slice(start, min(start + length, num_elements)) for start in range(0, num_elements, length)
    ]


def slice_of_rank(num_examples: int, size: int, rank: int) -> slice:
    """Return the contiguous part of a global batch that `rank` gets. Local.

    Rank r gets the examples ``[r c, min((r + 1) c, n))`` with ``c = ceil(n / size)``, so the
    parts lie in rank order and the last ranks may get less, or nothing.
    """
    share = ceil_div(num_examples, size)
    start = min(rank * share, num_examples)
    return slice(start, min(start + share, num_examples))


def num_batches(num_examples: int, batch_size: int, drop_remainder: bool) -> int:
    """Return how many batches `num_examples` make. Local."""
    if drop_remainder:
        return num_examples // batch_size
    return ceil_div(num_examples, batch_size)


def shard_length(num_items: int, num_shards: int, index: int) -> int:
    """Return how many of `num_items` have a position p with ``p % num_shards == index``. Local."""
    return len(range(index, num_items, num_shards))


def files_of_rank(num_files: int, size: int, rank: int) -> range:
    """Return the numbers of the files that `rank` reads: file f goes to rank f mod size. Local."""
    return range(rank, num_files, size)


def num_lanes(num_pieces: int, num_examples: int, batch_size: int, window_pieces: int) -> int:
    """Return the number of lanes that a shuffled pass is divided into. Local.

    A lane supplies a fixed, contiguous part of every global batch from pieces (chunks) of its
    own. Their number does not depend on the number of ranks, so the order does not either; and
    because lanes divide evenly over common numbers of ranks, few pieces are needed by two.

    On N ranks a piece is needed about once where N divides the number of lanes L, by less than
    two ranks on average where N is smaller than L, and by about N / L where N is larger: then
    several ranks share a lane.

    Parameters
    ----------
    num_pieces : int
        Pieces in the whole pass.
    num_examples : int
        Examples in the whole pass.
    batch_size : int
        Global batch size.
    window_pieces : int
        Pieces that may be held in memory at a time; a lane needs two to mix.
    """
    limit = min(
        max(num_pieces // _MIN_PIECES_PER_LANE, min(num_pieces // 2, _FEW_LANES)),
        num_examples // _MIN_EXAMPLES_PER_LANE,
        batch_size,
        window_pieces // 2,
    )
    return max(count for count in _LANE_COUNTS if count <= max(limit, 1))


def lane_bounds(num_examples: int, lanes: int) -> list[int]:
    """Return the ``lanes + 1`` positions between which the lanes fill a global batch. Local."""
    return [ceil_div(lane * num_examples, lanes) for lane in range(lanes + 1)]


def lane_lengths(num_examples: int, batch_size: int, lanes: int) -> list[int]:
    """Return how many examples each lane supplies in a pass of `num_examples`. Local."""
    num_full, rest = divmod(num_examples, batch_size)
    full, last = lane_bounds(batch_size, lanes), lane_bounds(rest, lanes)
    return [
        num_full * (full[lane + 1] - full[lane]) + last[lane + 1] - last[lane]
        for lane in range(lanes)
    ]
