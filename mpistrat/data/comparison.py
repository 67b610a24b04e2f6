"""The proof that all ranks distribute the same data set."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.data.signature import digest
from mpistrat.epochs.report import rank_list
from mpistrat.errors import DataError

if TYPE_CHECKING:
    from mpistrat.collectives import Collectives
from mpistrat.spelling import ranks_by_value

__all__ = ["check_same"]

_MAX_SHOWN = 4
"""Different entries that an error shows."""


def check_same(entries: Sequence[str], collectives: Collectives, kind: str) -> None:
    """Make sure that all ranks have the same signature. **Collective**.

    Only digests travel unless they differ.

    Parameters
    ----------
    entries : sequence of str
        From `signature`.
    collectives : Collectives
    kind : str
        Name of the public function.

    Raises
    ------
    DataError
        On every rank, if they differ. It names the first entry that does, and the ranks.
    """
    if len(set(collectives.gather_json(digest(entries), kind))) == 1:
        return
    expected = collectives.broadcast_json(list(entries), kind=kind)
    first = min(collectives.gather_json(_num_equal(entries, expected), kind))
    entry = entries[first] if first < len(entries) else "no more steps"
    shown = _by_rank(collectives.gather_json(entry, kind))
    raise DataError(
        f"{kind}: all ranks must bring the same data set, but {shown}. Make it in the same way on "
        "every rank, from the same seed; for data of each rank's own use "
        "distribute_datasets_from_function."
    )


def _num_equal(entries: Sequence[str], expected: Sequence[str]) -> int:
    """Return how many entries at the beginning are equal."""
    pairs = zip(entries, expected, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _by_rank(entries: Sequence[str]) -> str:
    ranks_of = ranks_by_value(enumerate(entries))
    shown = [
        f"{rank_list(ranks)} {'has' if len(ranks) == 1 else 'have'} {entry}"
        for entry, ranks in list(ranks_of.items())[:_MAX_SHOWN]
    ]
    rest = len(ranks_of) - len(shown)
    return ", ".join(shown) + (f", and others {rest} more" if rest else "")
