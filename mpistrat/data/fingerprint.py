"""Fingerprint of a dataset, by which ranks check that all distribute the same dataset."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.data.pipeline import Pipeline, Prefetch, numbered_steps
from mpistrat.data.sources.memory import ArraySource
from mpistrat.data.spec import describe
from mpistrat.errors import DataError
from mpistrat.options import AutoShardPolicy
from mpistrat.system.text import rank_list, ranks_by_value
from mpistrat.version import ORDER_VERSION

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives


def _fingerprint(pipeline: Pipeline, policy: AutoShardPolicy) -> list[str]:
    """Return all settings that must be the same on all ranks, one per entry."""
    # The contents of files and generators, and the code of functions, are not compared.
    spec = pipeline.source.element_spec
    return [
        pipeline.source.kind,
        "no examples" if spec is None else f"examples of {describe(spec)}",
        str(AutoShardPolicy.DATA if policy is AutoShardPolicy.AUTO else policy),
        *pipeline.source_entries,
        *numbered_steps(e for e in pipeline.transformations if not isinstance(e, Prefetch)),
    ]


def _contents(pipeline: Pipeline) -> Iterator[str]:
    """Yield a string with a digest of the contents of each source in memory."""
    source = pipeline.source
    if isinstance(source, ArraySource):
        yield f"from_arrays of contents with digest {source.digest():016x}"
    for child in getattr(source, "children", getattr(source, "streamed", ())):
        yield from _contents(child)


def order_digest(pipeline: Pipeline) -> str:
    """Return a digest of everything that decides the order of examples, on any number of ranks."""
    return digest([f"version {ORDER_VERSION}", *pipeline.order_entries])


def position_layout(pipeline: Pipeline) -> dict[str, Any]:
    """Return the settings for which a position among global batches is valid, as JSON values."""
    batch = pipeline.batch
    batches = {} if batch is None else {"global_batch_size": batch.batch_size}
    return batches | {"order": order_digest(pipeline)}


def digest(entries: Sequence[str]) -> str:
    """Return a digest of `entries` as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


_MAX_SHOWN = 4
"""Number of different entries that an error shows."""


def check_same(
    pipeline: Pipeline, policy: AutoShardPolicy, collectives: Collectives, kind: str
) -> None:
    """Make sure that all ranks have the same dataset. **Collective**."""
    with collectives.all_or_none(kind):
        entries = _fingerprint(pipeline, policy)
        if collectives.size > 1:
            entries += _contents(pipeline)
    # The ranks exchange only digests, and entries only if these differ.
    if len(set(collectives.gather_json(digest(entries), kind))) == 1:
        return
    expected = collectives.broadcast_json(list(entries), kind=kind)
    first = min(collectives.gather_json(_num_equal(entries, expected), kind))
    entry = entries[first] if first < len(entries) else "no more steps"
    shown = _by_rank(collectives.gather_json(entry, kind))
    with collectives.common_outcome(kind):  # so that all replicas of a rank raise it together
        raise DataError(
            f"{kind}: all ranks must pass the same dataset, but {shown}. Create it in the same "
            "way on every rank, with the same seed; if each rank has its own data, use "
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
