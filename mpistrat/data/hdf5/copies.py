"""Copies of files: proof that ranks which read their own copies read the same examples."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from mpistrat import nests
from mpistrat.data.hdf5.source import Hdf5Source, sources_of
from mpistrat.data.random import PassStream
from mpistrat.errors import DataError
from mpistrat.system.digests import digest_of_values, mixed_digest
from mpistrat.system.text import rank_list, ranks_by_value

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives
    from mpistrat.data.pipeline import Pipeline

__all__ = ["check_copies"]

_NUM_COMPARED = 64
"""Examples of a dataset that are compared, spread evenly over its files."""


def check_copies(pipeline: Pipeline, collectives: Collectives, kind: str) -> None:
    """Raise `DataError` if the files of some ranks hold other examples. **Collective**.

    All ranks have the same pipeline, as far as names, lengths and types of examples tell.
    """
    sources = [each for each in sources_of(pipeline) if not each.is_live]
    if not sources or collectives.size == 1:
        return
    # Ranks with the same files need not read them.
    stamps = [str(file.stamp) for source in sources for file in source.catalog.files]
    own = mixed_digest([digest_of_values(np.array(stamps))])
    if len(set(collectives.gather_json(own, kind))) == 1:
        return
    with collectives.all_or_none(kind):
        own = mixed_digest([_digest_of_sample(each) for each in sources])
    digests = collectives.gather_json(own, kind)
    if len(set(digests)) == 1:
        return
    folder = os.path.dirname(os.path.abspath(sources[0].catalog.files[0].path))
    places = collectives.gather_json(f"{folder} on {socket.gethostname()}", kind)
    found = [
        f"{rank_list(ranks)} {'reads' if len(ranks) == 1 else 'read'} {places[ranks[0]]}"
        for ranks in ranks_by_value(enumerate(digests)).values()
    ]
    with collectives.common_outcome(kind):  # so that replicas of one rank raise it together
        raise DataError(
            f"{kind}: all ranks must read the same examples, but their files differ, which "
            f"{sources[0]!r} names: {', '.join(found)}. Copy the files again, or pass a path that "
            "is the same file on every rank. For data of each rank's own use "
            "distribute_datasets_from_function."
        )


def _digest_of_sample(source: Hdf5Source) -> int:
    """Return 64 bits that stand for some of the examples. Local."""
    count = source.num_examples
    numbers = np.unique(np.linspace(0, count - 1, min(count, _NUM_COMPARED)).astype(np.int64))
    with closing(source.open(len(numbers), PassStream())) as reader:
        reader.expect(numbers)
        leaves, _ = nests.flatten(reader.read(numbers))
    return mixed_digest([_digest_of_leaf(np.asarray(leaf)) for leaf in leaves])


def _digest_of_leaf(leaf: np.ndarray) -> int:
    if leaf.dtype == object:  # texts, and rows of different lengths
        return mixed_digest([_digest_of_leaf(np.asarray(each)) for each in leaf.reshape(-1)])
    return digest_of_values(leaf)
