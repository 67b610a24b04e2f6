"""Page digests that ranks share: runs of pages, which each rank reads, and their join.

The pages of all arrays are cut, in order, into one run for each rank. Of an array that is divided
by rows a rank gets about the pages that it has written.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpistrat.checkpoint.digests import (
    PAGE_BYTES,
    ArrayDigest,
    digest_of_page_digests,
    page_digests_of,
)
from mpistrat.checkpoint.shards import Extent, Written, digests_in_file
from mpistrat.sharding import ceil_div, cut, part_lengths

__all__ = ["Digested", "PageRun", "digests_of_runs", "join_runs", "runs_of_ranks"]

_PAGES_AT_ONCE = 16
"""What one thread reads, so that all have something to do."""


class PageRun(NamedTuple):
    """Some pages of one array."""

    name: str
    start: int
    stop: int


def runs_of_ranks(sizes: Mapping[str, int], num_ranks: int) -> list[list[PageRun]]:
    """Divide the pages of arrays of these `sizes` in bytes among the ranks, in order."""
    pages = {name: max(1, ceil_div(size, PAGE_BYTES)) for name, size in sizes.items()}
    runs: list[list[PageRun]] = []
    begin = 0  # of a rank's pages among all
    for length in part_lengths(sum(pages.values()), num_ranks):
        runs.append(list(_between(pages, begin, begin + length)))
        begin += length
    return runs


def _between(pages: Mapping[str, int], begin: int, end: int) -> Iterator[PageRun]:
    first = 0
    for name, number in pages.items():
        start, stop = max(begin, first), min(end, first + number)
        if start < stop:
            yield PageRun(name, start - first, stop - first)
        first += number


Digested = tuple[str, int, Written]
"""An array, the number of its first page that was read, and what was found."""


def digests_of_runs(
    handle: int, extents: Mapping[str, Extent], runs: Iterable[PageRun], num_threads: int
) -> list[Digested]:
    """Read `runs` of the arrays that lie in `extents` of a file, and return what they are."""
    parts = {}
    for name, start, stop in runs:
        whole = extents[name]
        for pages in cut(stop - start, _PAGES_AT_ONCE):
            first, last = (start + each for each in (pages.start, pages.stop))
            begin, end = first * PAGE_BYTES, min(last * PAGE_BYTES, whole.num_bytes)
            parts[name, first] = Extent(whole.offset + begin, end - begin, whole.item_bytes)
    found = digests_in_file(handle, parts, num_threads)
    return [(name, first, each) for (name, first), each in found.items()]


def join_runs(found: Sequence[Digested]) -> dict[str, Written]:
    """Return what whole arrays are, from all runs of their pages."""
    joined = {}
    ordered = sorted(found, key=operator.itemgetter(0, 1))
    for name, runs in itertools.groupby(ordered, key=operator.itemgetter(0)):
        parts = [written for _, _, written in runs]
        pages = b"".join(page_digests_of(ArrayDigest(each.digest, each.pages)) for each in parts)
        joined[name] = Written(
            sum(each.num_items for each in parts),
            functools.reduce(operator.xor, (each.parity for each in parts)),
            *digest_of_page_digests(pages),
        )
    return joined
