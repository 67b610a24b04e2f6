"""Sharding arithmetic: how batches, data sets and files are split among ranks.

Pure functions of integers. Every rank computes the same, so nothing here communicates.
"""

from __future__ import annotations

__all__ = [
    "ceil_div",
    "count_partitions",
    "cut",
    "files_of_rank",
    "num_batches",
    "partition_bounds",
    "partition_lengths",
    "shard_length",
    "slice_of_rank",
]

_PARTITION_COUNTS = (1, 2, 4, 12, 24, 60, 120, 240, 720, 2520, 5040)
"""Numbers with many divisors, so that partitions divide evenly over common numbers of ranks."""

_FEW_PARTITIONS = 4
"""Up to so many partitions, so that a few ranks share the work, two pieces for each are enough."""

_MIN_PIECES_PER_PARTITION = 8
"""With fewer pieces a partition would mix badly, and too many pieces would be cut in two."""

_MIN_EXAMPLES_PER_PARTITION = 64
"""In a partition with fewer examples, neighbours would often stay together."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)


def cut(num_elements: int, length: int) -> list[slice]:
    """Divide `num_elements` into slices of `length`, the last one shorter."""
    return [
        slice(start, min(start + length, num_elements)) for start in range(0, num_elements, length)
    ]


def slice_of_rank(num_examples: int, size: int, rank: int) -> slice:
    """Return the contiguous part of a global batch that `rank` gets."""
    # Rank r gets [r c, min((r + 1) c, n)) with c = ceil(n / size): the parts lie in rank order,
    # and the last ranks may get less, or nothing.
    share = ceil_div(num_examples, size)
    start = min(rank * share, num_examples)
    return slice(start, min(start + share, num_examples))


def num_batches(num_examples: int, batch_size: int, drop_remainder: bool) -> int:
    """Return how many batches `num_examples` make."""
    if drop_remainder:
        return num_examples // batch_size
    return ceil_div(num_examples, batch_size)


def shard_length(num_items: int, num_shards: int, index: int) -> int:
    """Return how many of `num_items` have a position p with ``p % num_shards == index``."""
    return len(range(index, num_items, num_shards))


def files_of_rank(num_files: int, size: int, rank: int) -> range:
    """Return the numbers of the files that `rank` reads: file f goes to rank f mod size."""
    return range(rank, num_files, size)


def count_partitions(
    num_pieces: int, num_examples: int, batch_size: int, window_pieces: int
) -> int:
    """Return the number of partitions of a shuffled pass of `num_pieces` chunks."""
    # A partition fills a fixed, contiguous part of every global batch from its own chunks.
    # Their number L does not depend on the number of ranks N, so the order does not either. A
    # chunk is needed by one rank where N divides L, by less than two on average where N is
    # smaller than L, and by about N / L where N is larger: then several ranks share a partition.
    limit = min(
        max(num_pieces // _MIN_PIECES_PER_PARTITION, min(num_pieces // 2, _FEW_PARTITIONS)),
        num_examples // _MIN_EXAMPLES_PER_PARTITION,
        batch_size,
        window_pieces // 2,  # of the pieces in memory at a time a partition needs two to mix
    )
    return max(count for count in _PARTITION_COUNTS if count <= max(limit, 1))


def partition_bounds(num_examples: int, num_partitions: int) -> list[int]:
    """Return the positions in a global batch at which each partition begins, and its end."""
    return [ceil_div(each * num_examples, num_partitions) for each in range(num_partitions + 1)]


def partition_lengths(num_examples: int, batch_size: int, num_partitions: int) -> list[int]:
    """Return how many examples each partition supplies in a pass of `num_examples`."""
    num_full, rest = divmod(num_examples, batch_size)
    full = partition_bounds(batch_size, num_partitions)
    last = partition_bounds(rest, num_partitions)
    return [
        num_full * (full[each + 1] - full[each]) + last[each + 1] - last[each]
        for each in range(num_partitions)
    ]
