"""Agreement of the ranks on files: listings that rank 0 makes, lengths of files that grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpistrat.data.hdf5.source import Hdf5Source

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives
    from mpistrat.data.pipeline import Pipeline

__all__ = ["agree_on_files", "describe_files"]


def _sources(pipeline: Pipeline) -> Iterator[Hdf5Source]:
    """Yield the files that a pipeline reads, also those of data sets that it combines."""
    if isinstance(pipeline.source, Hdf5Source):
        yield pipeline.source
    for child in getattr(pipeline.source, "children", ()):
        yield from _sources(child)


def describe_files(pipeline: Pipeline) -> list[Any]:
    """Return what the ranks compare before they share a listing, as JSON values. Local."""
    # Other ranks of a program may have other files or have looked at them already.
    return [
        [repr(source), source.is_live, source.has_patterns and not source.is_read]
        for source in _sources(pipeline)
        if source.is_live or source.has_patterns
    ]


def agree_on_files(
    pipeline: Pipeline, of_ranks: list[list[Any]], collectives: Collectives, kind: str
) -> Pipeline:
    """Return the pipeline with what all ranks know alike of its files. **Collective**.

    `of_ranks` is what `describe_files` gave on each rank.
    """
    named = [[entry[:2] for entry in entries] for entries in of_ranks]
    if not named[0] or any(each != named[0] for each in named):
        return pipeline  # if they differ, the comparison of data sets says so
    source = pipeline.source
    if isinstance(source, Hdf5Source) and source.is_live:
        # What was seen before may be less than there is now.
        pipeline = dataclasses.replace(pipeline, source=source.anew())
    sources = [each for each in _sources(pipeline) if each.is_live or each.has_patterns]
    for number, each in enumerate(sources):
        is_new = each.is_live and each is pipeline.source
        lacks = [(is_new and each.has_patterns) or entries[number][2] for entries in of_ranks]
        if any(lacks):
            known = collectives.on_root(lambda each=each: each.catalog.listings, kind)  # type: ignore[misc]
            if not each.is_read:
                each.learn_listings(known)
        if each.is_live:
            lengths = collectives.on_all(
                lambda each=each: [file.num_rows for file in each.catalog.files],  # type: ignore[misc]
                kind,
            )
            each.limit_rows([min(of_file) for of_file in zip(*lengths, strict=False)])
    return pipeline
