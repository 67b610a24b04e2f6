"""What the layout of a file means for reading it shuffled, in words."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mpistrat import sharding
from mpistrat.data.rechunk_plan import DEFAULT_CHUNK_BYTES
from mpistrat.data.shuffle import WINDOW_BYTES
from mpistrat.spelling import readable_size

__all__ = ["advice"]

_TYPICAL_BATCH = 256
_MIN_CHUNK_BYTES = 16 * 2**10
"""Smaller chunks cost more to find than to decode."""
_MANY_CHUNKS = 1000
_FEW_LANES = 4
"""Fewer keep small jobs from sharing the work."""
_MAX_NAMES = 4
"""That a line shows."""
_MIN_MIXED = 16
"""Fewer chunks in a window leave neighbours together."""


def advice(datasets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what to know before the data sets are read shuffled, worst first. Local.

    Parameters
    ----------
    datasets : mapping of str to mapping
        As `mpistrat.cli.inspect_data` describes them.
    """
    fields = {path: each for path, each in datasets.items() if each["is_field"]}
    lines = list(_of_others(datasets))
    lines += [line for path, each in fields.items() for line in _of_one(path, each)]
    for together in _together(fields):
        lines += _of_lanes(together)
        lines += _of_alignment(together)
    if any("rechunk" in line for line in lines):
        lines.append(
            "mpistrat rechunk IN OUT writes the file anew, with chunks of whole rows and about "
            f"{readable_size(DEFAULT_CHUNK_BYTES)}."
        )
    return lines


def _of_others(datasets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    others = [path for path, each in datasets.items() if not each["is_field"]]
    if others:
        yield (
            f"{_names(others)} cannot be read as examples: these have a first dimension, and are "
            "numbers, bools or strings of a fixed length."
        )


def _of_one(path: str, field: Mapping[str, Any]) -> Iterator[str]:
    chunks, shape = field["chunks"], field["shape"]
    if field["unreadable"]:
        yield f"{path} cannot be read here: {field['unreadable']}."
    if field["layout"] == "virtual":
        yield f"{path} is virtual: HDF5 reads it, in one thread."
    if chunks is None:
        return
    if not field["decoded_in_threads"]:
        yield (
            f"{path} is decoded by HDF5 itself, in one thread. gzip, lzf, zstd, lz4 and blosc "
            "are decoded in several: rechunk."
        )
    pieces = math.prod(map(sharding.ceil_div, shape[1:], chunks[1:]))
    if pieces > 1:
        yield (
            f"Each row of {path} lies in {pieces} chunks, which are all read for it. Better chunks "
            "hold whole rows: rechunk."
        )
    if field["chunk_bytes"] < _MIN_CHUNK_BYTES and field["num_chunks"] > _MANY_CHUNKS:
        yield (
            f"A pass over {path} reads {field['num_chunks']} chunks of "
            f"{readable_size(field['chunk_bytes'])}: finding them costs more than decoding: "
            "rechunk."
        )


def _together(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Mapping[str, Any]]]:
    """Yield the fields that may be read together: of one group and one length."""
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for path, field in fields.items():
        found.setdefault((os.path.dirname(path), field["shape"][0]), {})[path] = field
    yield from found.values()


def _widest(fields: Mapping[str, Mapping[str, Any]]) -> str:
    return max(fields, key=lambda path: fields[path]["row_bytes"])


def _of_lanes(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Say how well a shuffled pass mixes, and over how many ranks it divides."""
    path = _widest(fields)
    field = fields[path]
    num_rows, rows = field["shape"][0], field["rows_per_chunk"]
    if field["chunks"] is None or not num_rows:
        return
    row_bytes = sum(each["row_bytes"] for each in fields.values())
    num_pieces = sharding.ceil_div(num_rows, rows)
    in_window = max(WINDOW_BYTES // max(row_bytes * rows, 1), 1)
    if in_window < min(_MIN_MIXED, num_pieces):
        yield (
            f"Chunks of {path} have {readable_size(field['chunk_bytes'])}: a shuffled pass mixes "
            f"the rows of {in_window} at a time, so neighbours often stay together: rechunk."
        )
    lanes = sharding.num_lanes(num_pieces, num_rows, _TYPICAL_BATCH, in_window)
    yield (
        f"Shuffled in batches of {_TYPICAL_BATCH}, {_names(fields)} can be read by up to {lanes} "
        "rank(s) with each chunk decoded about once over the job."
    )
    if lanes < min(_FEW_LANES, num_rows) and field["chunk_bytes"] > DEFAULT_CHUNK_BYTES:
        yield f"Smaller chunks of {path} would let more ranks share the work: rechunk."


def _of_alignment(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Name the fields whose chunks span many of the widest field's."""
    widest = _widest(fields)
    rows = fields[widest]["rows_per_chunk"]
    for path, field in fields.items():
        is_large = field["bytes"] > WINDOW_BYTES
        if field["chunks"] and is_large and field["rows_per_chunk"] > 2 * rows:
            yield (
                f"A chunk of {path} has {field['rows_per_chunk']} rows, one of {widest} {rows}: a "
                "shuffled pass decodes the first again and again: rechunk."
            )


def _names(paths: Iterable[str]) -> str:
    first, rest = list(paths)[:_MAX_NAMES], list(paths)[_MAX_NAMES:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")
