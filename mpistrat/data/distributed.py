"""Making distributed data sets: checked on every rank, refused on all if on any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpistrat import sharding
from mpistrat.arrays import Device
from mpistrat.data.comparison import check_same
from mpistrat.data.contexts import InputContext
from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed_dataset import DistributedDataset
from mpistrat.data.feeds import Feed, OwnFeed, SplitFeed, Take
from mpistrat.data.hdf5_source import Hdf5Source
from mpistrat.data.order import ENDLESS, UNKNOWN
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.policy import AutoShardPolicy
from mpistrat.data.signature import digest, order_digest, signature
from mpistrat.data.spec_exchange import spec_of_any_rank
from mpistrat.options import InputOptions, InputReplicationMode

if TYPE_CHECKING:
    from mpistrat.collectives import Collectives

__all__ = ["DistributedDataset", "distribute", "distribute_from_function"]


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
    with collectives.together(kind):
        entries = signature(pipeline, policy)
    check_same(entries, collectives, kind)
    with collectives.together(kind):
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
    with collectives.together(kind):
        pipeline = _checked_pipeline(dataset_fn(InputContext(size, rank, size)), kind)
        pipeline = dataclasses.replace(pipeline, branch=rank)
        own = [pipeline.length, _is_certain(pipeline), order_digest(pipeline)]
        own_spec = pipeline.found_spec
    shares = collectives.gather_json(own, kind)
    lengths = [length for length, _, _ in shares]
    surely_endless = any(length == ENDLESS and certain for length, certain, _ in shares)
    is_certain = surely_endless or all(certain for _, certain, _ in shares)

    feed = OwnFeed(
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
        return SplitFeed(pipeline, size, rank)
    order = order_digest(pipeline)
    rebatched = pipeline.with_batch_size(sharding.ceil_div(batch.batch_size, size))
    if policy is AutoShardPolicy.OFF:
        take = None if _is_certain(pipeline) else _take_alone
        return OwnFeed(rebatched, size, rebatched.length, found_spec, order, take)
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
    return OwnFeed(shares[rank], size, length, found_spec, order, None)


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
