"""Making distributed data sets: checked on every rank, refused on all if on any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import sharding
from mpistrat.arrays import Device
from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed_dataset import (
    BatchSlices,
    DistributedDataset,
    Feed,
    RankPipeline,
    Take,
)
from mpistrat.data.fingerprint import check_same, digest, order_digest, signature
from mpistrat.data.hdf5.source import Hdf5Source
from mpistrat.data.order import ENDLESS, UNKNOWN
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.spec import ArraySpec, describe_kinds
from mpistrat.errors import DataError
from mpistrat.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

__all__ = ["DistributedDataset", "distribute", "distribute_from_function", "spec_of_any_rank"]

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}


def spec_of_any_rank(spec: Any, collectives: Collectives, kind: str) -> Any:
    """Return `spec`, or that of the first rank that has one. **Collective**.

    Parameters
    ----------
    spec : nest of ArraySpec, or None
        ``None`` where this rank has no example.
    collectives : Collectives
    kind : str
        Name of the public function.

    Returns
    -------
    nest of ArraySpec, or None
        ``None`` where no rank has one.

    Raises
    ------
    DataError
        On every rank, if specs differ in more than lengths, or if there is a rank without a spec,
        and the nest of the other has containers that JSON cannot hold.
    """
    own = None if spec is None else describe_kinds(spec)
    kinds: list[str | None] = collectives.gather_json(own, kind)
    _check_same_kinds(kinds, kind)
    has_spec = [each is not None for each in kinds]
    if all(has_spec) or not any(has_spec):
        return spec
    owner = has_spec.index(True)
    with collectives.all_or_none(kind):
        value = _to_json(spec) if collectives.rank == owner else None
    value = collectives.broadcast_json(value, owner, kind)
    return _from_json(value) if spec is None else spec


def _check_same_kinds(kinds: list[str | None], kind: str) -> None:
    known = {each: rank for rank, each in reversed(list(enumerate(kinds))) if each is not None}
    if len(known) > 1:
        (first, rank), (other, other_rank) = sorted(known.items(), key=lambda pair: pair[1])[:2]
        raise DataError(
            f"{kind}: the elements of all ranks must have one structure and one dtype for each "
            f"leaf, but rank {rank} has {first}, and rank {other_rank} {other}."
        )


def _to_json(node: Any) -> Any:
    """Return ``[kind, ...]``: JSON values for a nest of `ArraySpec`."""
    if isinstance(node, ArraySpec) and np.dtype(node.dtype.str) == node.dtype:
        return ["array", list(node.shape), node.dtype.str]
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return ["dict", {key: _to_json(child) for key, child in node.items()}]
    if type(node) in _SEQUENCES.values():
        return [type(node).__name__, [_to_json(child) for child in node]]
    raise DataError(
        "A rank has no example to find the element_spec by mapping it, and cannot be told of "
        f"{node!r}. Let map return dicts with string keys, tuples or lists of plain arrays, or "
        "give every rank an example."
    )


def _from_json(value: Any) -> Any:
    kind, content, *rest = value
    if kind == "array":
        return ArraySpec(content, *rest)
    if kind == "dict":
        return {key: _from_json(child) for key, child in content.items()}
    return _SEQUENCES[kind](_from_json(child) for child in content)


def distribute(
    dataset: Dataset, options: InputOptions | None, collectives: Collectives, device: Device
) -> DistributedDataset:
    """Divide the batches of `dataset` among the ranks. **Collective**.

    All ranks must bring the same data set.

    Raises
    ------
    TypeError
        If `dataset` is no `Dataset` or `options` no `InputOptions`.
    ValueError
        If `dataset` was not batched, or its policy is FILE and there are fewer files than ranks
        or no files.
    NotImplementedError
        If the replication mode is PER_REPLICA.
    DataError
        If the data do not fit, or differ between ranks.
    """
    kind = "experimental_distribute_dataset"
    with collectives.call(kind) as call:
        options = _checked_options(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function: a "
                "data set given as an object exists once and is split."
            )
        pipeline = _checked_pipeline(dataset, kind)
        call.agree()
    policy = dataset.auto_shard_policy
    with collectives.all_or_none(kind):
        entries = signature(pipeline, policy)
    check_same(entries, collectives, kind)
    with collectives.all_or_none(kind):
        feed = _feed(pipeline, policy, collectives.size, collectives.rank)
    return DistributedDataset(feed, _target(options, device), collectives)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    options: InputOptions | None,
    collectives: Collectives,
    device: Device,
) -> DistributedDataset:
    """Give each rank the data set that `dataset_fn` returns there. **Collective**.

    Parameters
    ----------
    dataset_fn : callable
        Takes an `InputContext`, returns a `Dataset` that is batched per replica.

    Raises
    ------
    TypeError
        If `dataset_fn` does not return a `Dataset`, or `options` are no `InputOptions`.
    ValueError
        If the data set was not batched.
    DataError
        If the elements of the ranks differ in structure or dtype.
    Exception
        On every rank, what `dataset_fn` raises on any.
    """
    size, rank = collectives.size, collectives.rank
    kind = "distribute_datasets_from_function"
    with collectives.call(kind) as call:
        options = _checked_options(options)
        if not callable(dataset_fn):
            raise TypeError(f"{kind} needs a function of an InputContext, not {dataset_fn!r}.")
        call.agree()
    with collectives.all_or_none(kind):
        pipeline = _checked_pipeline(dataset_fn(InputContext(size, rank, size)), kind)
        pipeline = dataclasses.replace(pipeline, branch=rank)
        own = [pipeline.length, _is_certain(pipeline), order_digest(pipeline)]
        own_spec = pipeline.found_spec
    shares = collectives.gather_json(own, kind)
    lengths = [length for length, _, _ in shares]
    surely_endless = any(length == ENDLESS and certain for length, certain, _ in shares)
    is_certain = surely_endless or all(certain for _, certain, _ in shares)

    feed = RankPipeline(
        pipeline,
        size,
        _longest(lengths),
        spec_of_any_rank(own_spec, collectives, kind),
        digest([order for _, _, order in shares]),
        None if is_certain else _take_together(collectives),
    )
    return DistributedDataset(feed, _target(options, device), collectives)


def _checked_options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be InputOptions, not {options!r}.")
    return options or InputOptions()


def _checked_pipeline(dataset: Any, kind: str) -> Pipeline:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{kind} needs a mpistrat.data.Dataset, not {dataset!r}.")
    if dataset.pipeline.batch is None:
        raise ValueError(
            f"{kind} needs a data set of batches, but this one was not batched: call "
            "batch(global_batch_size) on it, with batch(1) for single examples."
        )
    return dataset.pipeline


def _feed(pipeline: Pipeline, policy: AutoShardPolicy, size: int, rank: int) -> Feed:
    """Return the feed of `rank`, once all ranks are known to have the same pipeline."""
    # Here, where an error reaches all ranks, and not with the first element.
    found_spec = pipeline.found_spec
    batch = pipeline.batch
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA) or batch is None:
        return BatchSlices(pipeline, size, rank)
    order = order_digest(pipeline)
    rebatched = pipeline.with_batch_size(sharding.ceil_div(batch.batch_size, size))
    if policy is AutoShardPolicy.OFF:
        take = None if _is_certain(pipeline) else _take_alone
        return RankPipeline(rebatched, size, rebatched.length, found_spec, order, take)
    source = pipeline.source
    if not isinstance(source, Hdf5Source):
        raise ValueError(
            "AutoShardPolicy.FILE needs a data set made by from_hdf5. Use AutoShardPolicy.DATA."
        )
    shares = [
        Pipeline(source.share_of_rank(size, each), rebatched.steps, branch=each)
        for each in range(size)
    ]
    length = _longest([share.length for share in shares])
    return RankPipeline(shares[rank], size, length, found_spec, order, None)


def _is_certain(pipeline: Pipeline) -> bool:
    """Return whether the length holds; of a generator even "endless" is wrong if it is empty."""
    return pipeline.source.num_examples != UNKNOWN


def _take_alone(own: Iterator[Any]) -> tuple[Any, bool]:
    """Take an element where all ranks have the same ones, so that all end together. Local."""
    element = next(own, None)
    return element, element is not None


def _take_together(collectives: Collectives) -> Take:
    """Return how to take elements where ranks may end at different times."""

    def take(own: Iterator[Any]) -> tuple[Any, bool]:
        # Inside the call, so that an error of one rank's data reaches the others.
        with collectives.call("next batch of a distributed data set") as call:
            element = next(own, None)
            return element, any(call.exchange(element is not None))

    return take


def _longest(lengths: list[int]) -> int:
    for special in (ENDLESS, UNKNOWN):
        if special in lengths:
            return special
    return max(lengths)


def _target(options: InputOptions, device: Device) -> Device | None:
    return device if options.experimental_prefetch_to_device else None
