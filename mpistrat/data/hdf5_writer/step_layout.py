"""Where the parts of all ranks belong, found from what each rank reports about its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpistrat.data.hdf5_writer.coverage import Box
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset
from mpistrat.data.hdf5_writer.exchange import PlacedPart
from mpistrat.data.hdf5_writer.parts import Leaf
from mpistrat.errors import DataError
from mpistrat.layout import Layout
from mpistrat.system.xxh3 import digest_of_values

Reports = Sequence[Mapping[str, Any]]
"""For each rank: for each leaf a list of lengths or places, and a digest."""


_MAX_IMBALANCE = 1.25


class Ranks(NamedTuple):
    """The ranks of a writer, and the replicas that they belong to."""

    layout: Layout

    def reports(self, leaf: Leaf, lengths: list[Any]) -> dict[str, Any]:
        """Return the report about the arrays of this rank."""
        digest = None
        # The ranks of a replica must pass equal parts. Digests show that without sending rows.
        if self.layout.ranks_per_replica > 1 and not leaf.is_shared:
            digest = f"{digest_of_values(leaf.arrays[0]):016x}"
        return {"lengths": lengths, "digest": digest}

    def contributors(self, what: str, name: str, reports: Reports) -> list[int]:
        """Return the ranks whose parts count: one rank of each replica."""
        layout = self.layout
        if layout.ranks_per_replica == 1:
            return list(range(layout.num_ranks))
        found = list(layout.ranks_of_shard(0))
        for first in found:
            for rank in range(first, first + layout.ranks_per_replica):
                if reports[rank] != reports[first]:
                    raise DataError(
                        f"{what}: the parts of {name!r} on ranks {first} and {rank} differ, which "
                        "belong to one replica. The ranks of a replica must pass the same part."
                    )
        return found


def appended(
    what: str, leaf: Leaf, dataset: OutputDataset, reports: Reports, ranks: Ranks
) -> tuple[list[PlacedPart], int]:
    """Return the parts of this rank in a step, and the number of new rows of the dataset."""
    start = dataset.rows
    whole = (0,) * len(dataset.inner)
    if leaf.is_shared:
        row = range(start, start + 1)
        return [PlacedPart(dataset, leaf.arrays[0], row, whole, True)], 1
    own_rank = ranks.layout.rank
    if dataset.split_axis:
        counting = _ranks_of_split(what, leaf, dataset, reports, ranks)
    else:
        counting = ranks.contributors(what, leaf.name, reports)
    lengths = [sum(reports[rank]["lengths"]) for rank in counting]
    before = sum(n for rank, n in zip(counting, lengths, strict=True) if rank < own_rank)
    total, keeps_whole = sum(lengths), _is_balanced(lengths)
    parts: list[PlacedPart] = []
    if own_rank in counting:
        for array, length in zip(leaf.arrays, reports[own_rank]["lengths"], strict=True):
            if dataset.split_axis:
                starts = list(whole)
                starts[dataset.split_axis - 1] = before
                row = range(start, start + 1)
                each = PlacedPart(dataset, array[None], row, tuple(starts), False, keeps_whole)
            else:
                rows = range(start + before, start + before + length)
                each = PlacedPart(dataset, array, rows, whole, False, keeps_whole)
            parts.append(each)
            before += length
    return parts, 1 if dataset.split_axis else total


def _is_balanced(lengths: Sequence[int]) -> bool:
    """Return whether no rank has much more than its share, which others should help to encode."""
    return max(lengths) * len(lengths) <= _MAX_IMBALANCE * sum(lengths)


def _ranks_of_split(
    what: str, leaf: Leaf, dataset: OutputDataset, reports: Reports, ranks: Ranks
) -> list[int]:
    """Return the ranks whose parts form a row along the split axis."""
    length = dataset.inner[dataset.split_axis - 1]
    of_ranks = [sum(report["lengths"]) for report in reports]
    layout = ranks.layout
    counting = list(layout.ranks_of_shard(0))
    if layout.ranks_per_replica > 1 and sum(of_ranks) == length:
        return list(range(layout.num_ranks))  # the ranks of a replica hold different parts
    found = sum(of_ranks[rank] for rank in counting)
    if found != length:
        raise DataError(
            f"{what}: the parts of {leaf.name!r} have the length {found} together along axis "
            f"{dataset.split_axis}, but rows have {length}."
        )
    return ranks.contributors(what, leaf.name, reports)


def written(
    what: str, leaf: Leaf, dataset: OutputDataset, reports: Reports, ranks: Ranks
) -> tuple[list[PlacedPart], list[Box] | None]:
    """Return the parts of this rank in a call of `write`, and the boxes that all ranks write.

    They are ``None`` if only the rank that holds a part knows its rows.
    """
    own_rank = ranks.layout.rank
    whole = (0,) * len(dataset.inner)
    if leaf.is_shared:
        counting = [own_rank]
    elif isinstance(leaf.at[0], tuple) and _boxes_differ(reports, ranks.layout):
        counting = list(range(ranks.layout.num_ranks))  # each rank of a replica holds its box
    else:
        counting = ranks.contributors(what, leaf.name, reports)
    total = sum(sum(reports[rank]["rows"]) for rank in counting)
    if leaf.at[0] is None and not leaf.is_shared and total != dataset.num_rows:
        raise DataError(
            f"{what}: the parts of {leaf.name!r} have {total} rows together, but the dataset has "
            f"{dataset.num_rows}. Pass at= for some of the rows."
        )
    parts: list[PlacedPart] = []
    boxes: list[Box] | None = []
    # What all ranks hold is written by the owners of the chunks alone.
    is_balanced = _is_balanced([sum(reports[rank]["rows"]) for rank in counting])
    keeps_whole = is_balanced and not leaf.is_shared
    before = 0
    for rank in counting:
        described = zip(reports[rank]["lengths"], reports[rank]["rows"], strict=True)
        for number, (at, num_rows) in enumerate(described):
            rows, starts, lengths = range(before, before + num_rows), whole, dataset.inner
            if at is None:
                before += num_rows
            elif at[0] == "range":
                rows = range(*at[1:])
            elif at[0] != "rows":
                rows = range(*at[0])
                starts = tuple(begin for begin, _ in at[1:])
                lengths = tuple(end - begin for begin, end in at[1:])
            is_listed = at is not None and at[0] == "rows"
            if is_listed and len(at[1]) < at[2]:
                boxes = None
            elif boxes is not None:
                runs = [range(row, row + 1) for row in at[1]] if is_listed else [rows]
                boxes += [Box(each.start, each.stop, starts, lengths) for each in runs]
            if rank == own_rank:
                own = leaf.at[number] if is_listed else rows
                array = leaf.arrays[number]
                shared = leaf.is_shared
                parts.append(PlacedPart(dataset, array, own, starts, shared, keeps_whole))
    return parts, boxes


def _boxes_differ(reports: Reports, layout: Layout) -> bool:
    """Return whether some ranks of a replica write different boxes."""
    return any(
        reports[rank]["lengths"]
        != reports[layout.ranks_of_shard(0)[layout.replica_of(rank)]]["lengths"]
        for rank in range(layout.num_ranks)
    )
