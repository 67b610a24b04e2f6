"""What a data set is, in words: compared between ranks, and kept with a position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from mpistrat.data.order import ENDLESS, UNKNOWN
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.policy import AutoShardPolicy
from mpistrat.data.spec import describe
from mpistrat.data.transforms import Prefetch, SameOrder

__all__ = ["digest", "order_digest", "position_layout", "signature"]

_ORDER_VERSION = 2
"""Raised whenever an unchanged data set gets another order, so that old positions are refused."""


def signature(pipeline: Pipeline, policy: AutoShardPolicy) -> list[str]:
    """Return all that must be the same on all ranks, one thing an entry. Local.

    What arrays, files and generators contain, and what functions do, is not compared.
    """
    return [
        pipeline.source.kind,
        f"examples of {describe(pipeline.source.element_spec)}",
        str(AutoShardPolicy.DATA if policy is AutoShardPolicy.AUTO else policy),
        *_order(pipeline),
        *_numbered(step for step in pipeline.steps if not isinstance(step, Prefetch)),
    ]


def order_digest(pipeline: Pipeline) -> str:
    """Return a digest of what decides the order of examples. Local.

    It depends neither on the number of ranks nor on what is made of the examples.
    """
    steps = _numbered(step for step in pipeline.steps if not isinstance(step, SameOrder))
    return digest([f"version {_ORDER_VERSION}", *_order(pipeline), *steps])


def position_layout(pipeline: Pipeline) -> dict[str, Any]:
    """Return what a position among global batches belongs to, as JSON values. Local."""
    batch = pipeline.batch
    batches = {} if batch is None else {"global_batch_size": batch.batch_size}
    return batches | {"order": order_digest(pipeline)}


def digest(entries: Sequence[str]) -> str:
    """Return 16 hexadecimal digits that stand for `entries`. Local."""
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def _order(pipeline: Pipeline) -> list[str]:
    """Return the number of examples, and what else of the source decides their order."""
    number = pipeline.source.num_examples
    words = {ENDLESS: "endless", UNKNOWN: "unknown"}.get(number, str(number))
    return [f"{words} examples", *pipeline.source.parts]


def _numbered(steps: Iterable[Any]) -> list[str]:
    return [f"{step!r} as step {number}" for number, step in enumerate(steps, 1)]
