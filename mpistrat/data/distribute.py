"""Distribution of datasets: every rank checks them, and if one raises an error, all do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nests, sharding
from mpistrat.arrays import Device
from mpistrat.data.dataset import Dataset, pipeline_of, policy_of
from mpistrat.data.distributed_dataset import (
    BatchSlices,
    DistributedDataset,
    NextElement,
    RankDataset,
    RankPipeline,
    ReplicaPart,
    memory_for,
)
from mpistrat.data.fingerprint import check_same, digest, order_digest
from mpistrat.data.hdf5.source import Hdf5Source, agree_on_files, check_copies, describe_files
from mpistrat.data.order import ENDLESS, UNKNOWN
from mpistrat.data.pipeline import Pipeline, Prefetch
from mpistrat.data.spec import ArraySpec, holds_ragged
from mpistrat.data.transformations.batch import Batch, WholeBatches
from mpistrat.data.transformations.cache import Cached, share_cache
from mpistrat.data.transformations.filter import Filtered, evaluate_filter
from mpistrat.data.transformations.repeat import Repeat
from mpistrat.data.transformations.shuffle import Shuffle
from mpistrat.data.transformations.take import Shard, Skip, Take
from mpistrat.data.transformations.unbatch import Rows, count_rows
from mpistrat.errors import DataError
from mpistrat.layout import Layout
from mpistrat.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives


def distribute(
    dataset: Dataset, options: InputOptions | None, collectives: Collectives, device: Device
) -> DistributedDataset:
    """Divide the batches of `dataset`, the same on all ranks, among them. **Collective**."""
    kind = "distribute_dataset"
    with collectives.call(kind) as call:
        options = _checked_options(options)
        if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is for distribute_datasets_from_function: a "
                "dataset that is passed as an object exists once and is split."
            )
        pipeline = _checked_pipeline(dataset, kind)
        of_ranks = call.exchange(describe_files(pipeline))
    # The order matters: the lengths of files, the caches and the filters decide the lengths and
    # specs that are compared after them.
    pipeline = agree_on_files(pipeline, of_ranks, collectives, kind)
    policy = policy_of(dataset)
    _prepare(pipeline, policy, collectives, kind)
    check_same(pipeline, policy, collectives, kind)
    check_copies(pipeline, collectives, kind)
    target = _target(options, device)
    with collectives.all_or_none(kind):
        staged = _read_for(target, pipeline)
        rank_dataset = _rank_dataset(staged, policy, collectives.layout)
    part = ReplicaPart(rank_dataset, target, collectives)
    return DistributedDataset([part], collectives)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    options: InputOptions | None,
    collectives: Collectives,
    device: Device,
) -> DistributedDataset:
    """Return this rank's part of the datasets that `dataset_fn` returns. **Collective**."""
    layout = collectives.layout
    size, rank = layout.num_replicas, layout.replica_id
    kind = "distribute_datasets_from_function"
    with collectives.call(kind) as call:
        options = _checked_options(options)
        if not callable(dataset_fn):
            raise TypeError(f"{kind} needs a function of an InputContext, not {dataset_fn!r}.")
        call.agree()

    def pipeline_of(replica: int) -> Pipeline:
        made = _checked_pipeline(dataset_fn(InputContext(size, replica, size)), kind)
        return dataclasses.replace(made, branch=replica)

    def pipeline_again(replica: int) -> Pipeline:
        again = pipeline_of(replica)
        if _described(again) != of_ranks[replica]:
            raise DataError(
                f"{kind}: the dataset of replica {replica}, which was lost with its rank, does not "
                "have the same length or order as before. With elastic=True the function must "
                "return the same elements for the same InputContext, on any rank, in every call."
            )
        return again

    with collectives.all_or_none(kind):
        # `dataset_fn` may fail on one rank. All ranks learn that here, because the gather below
        # would wait for this rank forever.
        pipeline = pipeline_of(rank)
        described = describe_files(pipeline)
    of_all = collectives.gather_json(described, kind)
    pipeline = agree_on_files(pipeline, of_all, collectives, kind)
    with collectives.all_or_none(kind):
        own, own_spec = _described(pipeline), pipeline.found_spec
    gathered = collectives.gather_json(own, kind)
    _check_same_in_replicas(gathered, layout, kind)
    of_ranks = [gathered[first] for first in layout.ranks_of_shard(0)]
    lengths = [length for length, _, _ in of_ranks]
    # If the pass of one rank never ends, none ends, so the ranks need not ask each other.
    surely_endless = any(length == ENDLESS and certain for length, certain, _ in of_ranks)
    is_certain = surely_endless or all(certain for _, certain, _ in of_ranks)
    with collectives.all_or_none(kind):
        if collectives.is_elastic and not is_certain:
            raise NotImplementedError(
                f"{kind} with elastic=True needs datasets of known length, without generators: "
                "after a loss the ranks could not tell when all have ended. Use "
                "distribute_dataset."
            )
    target = _target(options, device)
    rank_dataset = RankPipeline(
        _read_for(target, pipeline),
        size,
        _longest(lengths),
        _spec_of_any_rank(own_spec, collectives, kind),
        digest([order for _, _, order in of_ranks]),
        None if is_certain else _next_together(collectives),
        pipeline_again,
    )
    part = ReplicaPart(rank_dataset, target, collectives)
    return DistributedDataset([part], collectives)


_AS_READ = (Batch, Prefetch, Repeat, Shard, Shuffle, Skip, Take, WholeBatches)
"""If a pipeline has only these, no function of the program has seen the arrays of the reader."""


def _read_for(target: Device | None, pipeline: Pipeline) -> Pipeline:
    """Return `pipeline` with files read into memory from which a copy to `target` is fast."""
    # Not after a map: its function could keep such an array, and write to it during the copy.
    source, empty = pipeline.source, memory_for(target)
    is_as_read = all(type(each) in _AS_READ for each in pipeline.transformations)
    if empty is None or not is_as_read or not isinstance(source, Hdf5Source):
        return pipeline
    return dataclasses.replace(pipeline, source=source.with_memory(empty))


def _prepare(
    pipeline: Pipeline, policy: AutoShardPolicy, collectives: Collectives, kind: str
) -> None:
    """Share caches, evaluate filters and count rows, inner datasets first. **Collective**."""
    # The spec of a cache may need a filter below it, and each rank would evaluate all of it.
    source = pipeline.source
    for child in getattr(source, "children", ()):
        _prepare(child, policy, collectives, kind)
    if isinstance(source, Cached):
        share_cache(source, collectives, kind)
    elif isinstance(source, Filtered):
        evaluate_filter(source, policy, collectives, kind)
    elif isinstance(source, Rows):
        count_rows(source, policy, collectives, kind)


def _checked_options(options: InputOptions | None) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options must be InputOptions, not {options!r}.")
    return options or InputOptions()


def _checked_pipeline(dataset: Any, kind: str) -> Pipeline:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{kind} needs a mpistrat.data.Dataset, not {dataset!r}.")
    pipeline = pipeline_of(dataset)
    if pipeline.batch is None:
        raise ValueError(
            f"{kind} needs a dataset of batches, but this one was not batched: call "
            "batch(global_batch_size) on it, with batch(1) for single examples."
        )
    return pipeline


def _rank_dataset(pipeline: Pipeline, policy: AutoShardPolicy, layout: Layout) -> RankDataset:
    """Return the part of this rank's replica, once all ranks have the same pipeline."""
    size, rank = layout.num_replicas, layout.replica_id
    # The spec is found here, because an error here reaches all ranks before the first element.
    found_spec = pipeline.found_spec
    batch = pipeline.batch
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA) or batch is None:
        return BatchSlices(pipeline, size, rank)
    order = order_digest(pipeline)
    rebatched = pipeline.with_batch_size(sharding.ceil_div(batch.batch_size, size))
    if policy is AutoShardPolicy.OFF:
        next_element = None if _is_certain(pipeline) else _next_alone
        return RankPipeline(
            *(rebatched, size, rebatched.length, found_spec, order, next_element),
            pipeline_of=lambda replica: rebatched,
        )
    source = pipeline.source
    if not isinstance(source, Hdf5Source):
        raise ValueError(
            "AutoShardPolicy.FILE needs a dataset from from_hdf5. Use AutoShardPolicy.DATA."
        )

    def pipeline_of(replica: int) -> Pipeline:
        share = source.share_of_rank(size, replica)
        return Pipeline(share, rebatched.transformations, branch=replica)

    length = _longest([pipeline_of(each).length for each in range(size)])
    return RankPipeline(pipeline_of(rank), size, length, found_spec, order, None, pipeline_of)


def _described(pipeline: Pipeline) -> list[Any]:
    """Return the length, whether it is certain, and the order, as JSON values."""
    return [pipeline.length, _is_certain(pipeline), order_digest(pipeline)]


def _is_certain(pipeline: Pipeline) -> bool:
    """Return whether the length is certain. An endlessly repeated generator may still be empty."""
    return pipeline.source.num_examples != UNKNOWN


def _next_alone(own: Iterator[Any]) -> tuple[Any, bool]:
    """Take the next element. All ranks have the same elements, so all end together."""
    element = next(own, None)
    return element, element is not None


def _next_together(collectives: Collectives) -> NextElement:
    """Return a function that takes elements if the ranks may end at different times."""

    def next_element(own: Iterator[Any]) -> tuple[Any, bool]:
        # The element is read inside the call, so that an error on one rank reaches the others.
        with collectives.call("next batch of a distributed dataset") as call:
            element = next(own, None)
            return element, any(call.exchange(element is not None))

    return next_element


def _check_same_in_replicas(of_ranks: list[Any], layout: Layout, kind: str) -> None:
    """Raise DataError if the datasets differ between the ranks of one replica."""
    for rank, own in enumerate(of_ranks):
        first = rank - layout.shard_of(rank)
        if own != of_ranks[first]:
            raise DataError(
                f"{kind}: ranks {first} and {rank} compute replica {layout.replica_of(rank)} "
                "together, but their datasets differ in length or order. Create them from nothing "
                "but the numbers in the InputContext."
            )


def _longest(lengths: list[int]) -> int:
    for special in (ENDLESS, UNKNOWN):
        if special in lengths:
            return special
    return max(lengths)


def _target(options: InputOptions, device: Device) -> Device | None:
    return device if options.experimental_prefetch_to_device else None


def _spec_of_any_rank(spec: Any, collectives: Collectives, kind: str) -> Any:
    """Return `spec`, or the spec of the first rank that has one. **Collective**."""
    own = None if spec is None else _describe_kinds(spec)
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


def _describe_kinds(spec: Any) -> str:
    """Return structure, dtypes and numbers of dimensions of a nest of specs."""
    paths, leaves, structure = nests.flatten_with_paths(spec)
    kinds = [
        f"{path or 'element'}: {leaf.dtype} of {len(leaf.shape)} dimension(s)"
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return f"{nests.signature(structure)} with {', '.join(kinds)}"


def _check_same_kinds(kinds: list[str | None], kind: str) -> None:
    known = {each: rank for rank, each in reversed(list(enumerate(kinds))) if each is not None}
    if len(known) > 1:
        (first, rank), (other, other_rank) = sorted(known.items(), key=lambda pair: pair[1])[:2]
        raise DataError(
            f"{kind}: the elements of all ranks must have one structure and one dtype for each "
            f"leaf, but rank {rank} has {first}, and rank {other_rank} {other}."
        )


_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}


def _to_json(node: Any) -> Any:
    """Return a nest of `ArraySpec` as JSON values: ``[kind, ...]``."""
    if isinstance(node, ArraySpec) and np.dtype(node.dtype.str) == node.dtype:
        return ["array", list(node.shape), node.dtype.str, holds_ragged(node)]
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return ["dict", {key: _to_json(child) for key, child in node.items()}]
    if type(node) in _SEQUENCES.values():
        return [type(node).__name__, [_to_json(child) for child in node]]
    raise DataError(
        "A rank has no example to find the element_spec by mapping it, and cannot learn "
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
