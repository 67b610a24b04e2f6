"""Layout advice for data files: what slows shuffled reading, and the `h5repack` that mends it."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mpistrat import hdf5, sharding
from mpistrat.data.shuffle import WINDOW_BYTES
from mpistrat.spelling import readable_size

__all__ = ["advice"]

_Described = Mapping[str, Mapping[str, Any]]
"""Data sets by their path, as `mpistrat.cli.inspect_data` describes them."""

_CHUNK_BYTES = 256 * 2**10
"""Small enough that a window of chunks mixes well, large enough that a disk is kept busy."""
_MIN_CHUNK_BYTES = 16 * 2**10
"""Smaller chunks cost more to find than to decode."""
_MAX_CHUNK_BYTES = 2**32
"""HDF5 has smaller ones only."""
_MANY_CHUNKS = 1000
_TYPICAL_BATCH = 256
_FEW_LANES = 4
"""Fewer keep small jobs from sharing the work."""
_MIN_MIXED = 16
"""Fewer chunks in a window leave neighbours together."""
_MAX_NAMES = 4
"""That a line shows."""

_OF_HDF5 = {"gzip", "shuffle", "fletcher32", "nbit", "scaleoffset"}
_OF_PLUGINS = {"bitshuffle", "blosc", "blosc2", "bzip2", "lz4", "zfp", "zstd"}
"""Filters that h5repack has once it finds hdf5plugin. It never has h5py's lzf."""


def advice(path: str, datasets: _Described) -> tuple[list[str], str | None]:
    """Return what to know before the file is read shuffled, and the command that mends it."""
    lines, options = list(_of_others(datasets)), []
    fields = {name: each for name, each in datasets.items() if each["is_field"]}
    for name, field in fields.items():
        lines += _of_reading(name, field)
    for together in _together(fields):
        bad = list(_of_chunks(together))
        lines += [*bad, *_of_lanes(together)]
        for name, chunk in _better_chunks(together).items() if bad else ():
            options += ["-l", f"{name}:CHUNK={'x'.join(map(str, chunk))}"]
    for name, field in fields.items():
        if _is_slow(field):
            options += ["-f", f"{name}:SHUF", "-f", f"{name}:GZIP=4"]
    lost = [name for name, each in datasets.items() if not _can_be_repacked(name, each)]
    if options and lost:
        lines.append(f"h5repack would fail at {_names(lost)}, or leave it out: use h5py instead.")
    return lines, _command(path, datasets, options) if options and not lost else None


def _of_others(datasets: _Described) -> Iterator[str]:
    others = [name for name, each in datasets.items() if not each["is_field"]]
    if others:
        yield (
            f"{_names(others)} cannot be read as examples: these have a first dimension, and are "
            "numbers, bools or strings of a fixed length."
        )


def _of_reading(name: str, field: Mapping[str, Any]) -> Iterator[str]:
    if field["unreadable"]:
        yield f"{name} cannot be read here: {field['unreadable']}."
    if field["layout"] == "virtual":
        yield f"{name} is virtual: HDF5 reads it, in one thread."
    if _is_slow(field):
        yield (
            f"{name} is decoded by HDF5 itself, in one thread. gzip, lzf, zstd, lz4 and blosc "
            "are decoded in several."
        )


def _is_slow(field: Mapping[str, Any]) -> bool:
    return bool(field["chunks"]) and not field["decoded_in_threads"]


def _together(fields: _Described) -> Iterable[_Described]:
    """Return the fields that may be read together: of one group and one length."""
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for name, field in fields.items():
        if field["row_bytes"]:
            found.setdefault((os.path.dirname(name), field["shape"][0]), {})[name] = field
    return found.values()


def _of_chunks(fields: _Described) -> Iterator[str]:
    """Say what `_better_chunks` mends; it never leaves anything to say here."""
    for name, field in fields.items():
        pieces = math.prod(map(sharding.ceil_div, field["shape"][1:], (field["chunks"] or ())[1:]))
        if pieces > 1 and field["row_bytes"] < _MAX_CHUNK_BYTES:
            yield (
                f"Each row of {name} lies in {pieces} chunks, which are all read for it. Better "
                "chunks hold whole rows."
            )
        if field["chunk_bytes"] < _MIN_CHUNK_BYTES and field["num_chunks"] > _MANY_CHUNKS:
            yield (
                f"A pass over {name} reads {field['num_chunks']} chunks of "
                f"{readable_size(field['chunk_bytes'])}: finding them costs more than decoding."
            )
    widest = _widest(fields)
    field = fields[widest]
    if not field["chunks"]:
        return
    num_rows, rows = field["shape"][0], field["rows_per_chunk"]
    in_window = _chunks_in_window(fields)
    if _can_shrink(field) and in_window < min(_MIN_MIXED, sharding.ceil_div(num_rows, rows)):
        yield (
            f"Chunks of {widest} have {readable_size(field['chunk_bytes'])}: a shuffled pass mixes "
            f"the rows of {in_window} at a time, so neighbours often stay together."
        )
    is_large = rows > 1 and field["chunk_bytes"] > _CHUNK_BYTES
    if is_large and _num_lanes(fields) < min(_FEW_LANES, num_rows):
        yield f"Smaller chunks of {widest} would let more ranks share the work."
    for name, other in fields.items():
        is_kept = other["bytes"] <= WINDOW_BYTES  # once decoded
        if _can_shrink(other) and other["rows_per_chunk"] > 2 * rows and not is_kept:
            yield (
                f"A chunk of {name} has {other['rows_per_chunk']} rows, one of {widest} {rows}: a "
                "shuffled pass decodes the first again and again."
            )


def _of_lanes(fields: _Described) -> Iterator[str]:
    if fields[_widest(fields)]["chunks"]:
        yield (
            f"Shuffled in batches of {_TYPICAL_BATCH}, {_names(fields)} can be read by up to "
            f"{_num_lanes(fields)} rank(s) with each chunk decoded about once over the job."
        )


def _widest(fields: _Described) -> str:
    return max(fields, key=lambda name: fields[name]["row_bytes"])


def _can_shrink(field: Mapping[str, Any]) -> bool:
    """Return whether chunks of fewer rows would not be tiny."""
    return bool(field["rows_per_chunk"] > 1 and field["chunk_bytes"] >= 2 * _MIN_CHUNK_BYTES)


def _row_bytes(fields: _Described) -> int:
    return sum(field["row_bytes"] for field in fields.values())


def _chunks_in_window(fields: _Described) -> int:
    rows: int = fields[_widest(fields)]["rows_per_chunk"]
    return max(WINDOW_BYTES // (_row_bytes(fields) * rows), 1)


def _num_lanes(fields: _Described) -> int:
    widest = fields[_widest(fields)]
    num_rows = widest["shape"][0]
    num_chunks = sharding.ceil_div(num_rows, widest["rows_per_chunk"])
    return sharding.num_lanes(num_chunks, num_rows, _TYPICAL_BATCH, _chunks_in_window(fields))


def _better_chunks(fields: _Described) -> dict[str, list[int]]:
    """Return chunks of whole rows where there are others, beginning with the same rows."""
    widest = fields[_widest(fields)]["row_bytes"]
    rows = min(_CHUNK_BYTES // widest, WINDOW_BYTES // (_MIN_MIXED * _row_bytes(fields)))
    chunks = {}
    for name, field in fields.items():
        num_rows, *row_shape = field["shape"]
        # A power of two, so that the chunks of narrow fields end where those of wide ones do.
        tiny = sharding.ceil_div(_MIN_CHUNK_BYTES, max(rows, 1) * field["row_bytes"])
        chunk = [min(max(rows, 1) << (tiny - 1).bit_length(), num_rows), *row_shape]
        if field["chunks"] not in (None, chunk) and field["row_bytes"] < _MAX_CHUNK_BYTES:
            chunks[name] = chunk
    return chunks


def _can_be_repacked(name: str, dataset: Mapping[str, Any]) -> bool:
    """Return whether h5repack copies the data set: what it cannot decode it leaves out."""
    if dataset["unreadable"] or dataset["layout"] == "virtual":  # of these 1.10 crashes
        return False
    filters = {each.split()[0] for each in dataset["filters"]}
    # In its arguments a comma ends a name, for which it has 256 bytes.
    can_be_named = name.isprintable() and "," not in name and len(name.encode()) < 256
    return can_be_named and filters <= _OF_HDF5 | _OF_PLUGINS


def _command(path: str, datasets: _Described, options: list[str]) -> str:
    used = {each.split()[0] for dataset in datasets.values() for each in dataset["filters"]}
    # None where the variable is set already: hdf5plugin then registers no libraries.
    folders = {os.path.dirname(library) for library in hdf5.plugin_libraries().values()}
    needs_path = bool(folders and used & _OF_PLUGINS)
    variables = [f"HDF5_PLUGIN_PATH={shlex.quote(':'.join(folders))}"] if needs_path else []
    root, extension = os.path.splitext(path)
    words = ["h5repack", *options, path, f"{root}-repacked{extension}"]
    return " ".join([*variables, shlex.join(words)])


def _names(names: Iterable[str]) -> str:
    first, rest = list(names)[:_MAX_NAMES], list(names)[_MAX_NAMES:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")
