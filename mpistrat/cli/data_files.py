"""Inspects data files: shows their contents, and advises on a better layout."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpistrat import hdf5, sharding
from mpistrat.checkpoint.format import FORMAT
from mpistrat.checkpoint.nodes import read_attribute
from mpistrat.cli.output import print_error, print_json, print_line, print_table
from mpistrat.data.hdf5.filters import (
    install_filter,
    make_decoder,
    missing_filters,
    name_of_filter,
)
from mpistrat.data.hdf5.linked_files import check_virtual_sources
from mpistrat.data.hdf5.types import READABLE, dtype_of, is_readable
from mpistrat.data.hdf5_writer.header_image import STEPS
from mpistrat.data.transformations.shuffle import WINDOW_BYTES, Partitions
from mpistrat.errors import DataError
from mpistrat.system.text import counted, readable_size

_COLUMNS = ("dataset", "shape", "dtype", "layout", "chunk", "filters", "size", "stored")

_WITH_LEVEL = {"gzip", "zstd"}

_HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""Errors that h5py raises if an object is damaged."""


def is_data_file(path: str) -> bool:
    """Return whether `path` is an HDF5 file but not a checkpoint."""
    try:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            if read_attribute(file.id, "format") == FORMAT:
                return False
            # A checkpoint with a damaged header still has one of these attributes.
            return not {"format_version", "mpistrat_version"} & set(file.attrs)
    except (DataError, OSError, RuntimeError, UnicodeError):
        return False


def inspect_data(arguments: argparse.Namespace) -> int:
    """Print the contents of a data file, and return the exit code."""
    path = arguments.file
    if arguments.stats or arguments.plot:
        print_error("inspect", f"{path} is not a checkpoint, and --stats and --plot need one.")
        return 2
    try:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            content = _content(path, file)
    except (DataError, OSError, RuntimeError, KeyError) as error:
        print_error("inspect", f"{path}: {error}")
        return 2
    if arguments.json:
        print_json(content)
    else:
        _print_for_people(path, content)
    return 0


def _content(path: str, file: Any) -> dict[str, Any]:
    found, damaged = _objects_of(file)
    datasets = {}
    for name, each in found.items():
        if not isinstance(each, str):
            try:
                datasets[name] = _describe(each)
            except _HDF5_ERRORS as reason:
                damaged[name] = hdf5.error_text(reason)
    lines, command = advice(path, datasets)
    if damaged:
        command = None
    steps = file.attrs.get(STEPS)
    return {
        **({} if steps is None else {"steps": int(steps)}),
        "attributes": sorted(file.attrs),
        "datasets": datasets,
        "links": {name: each for name, each in found.items() if isinstance(each, str)},
        "damaged": damaged,
        "advice": lines,
        "h5repack": command,
    }


def _describe(dataset: Any) -> dict[str, Any]:
    shape, dtype, chunks = dataset.shape, dtype_of(dataset), dataset.chunks
    row_bytes = math.prod(shape[1:]) * dtype.itemsize if shape else 0
    filters = hdf5.filters_of(dataset)
    return {
        "shape": None if shape is None else list(shape),
        "dtype": _format_dtype(dtype),
        "layout": _layout(dataset),
        "chunks": list(chunks) if chunks else None,
        "filters": [_format_filter(*each) for each in filters],
        "num_chunks": dataset.id.get_num_chunks() if chunks else 0,
        "chunk_bytes": math.prod(chunks) * dtype.itemsize if chunks else 0,
        "rows_per_chunk": chunks[0] if chunks else 1,
        "row_bytes": row_bytes,
        "bytes": row_bytes * shape[0] if shape else dtype.itemsize * (shape == ()),
        "stored_bytes": dataset.id.get_storage_size(),
        "is_field": bool(shape) and dtype.kind in "biufcS" and shape[0] > 0,
        "is_readable": shape is not None and is_readable(dtype),
        "decoded_in_threads": chunks is not None and make_decoder(filters) is not None,
        "unreadable": _unreadable(dataset),
    }


def _layout(dataset: Any) -> str:
    h5d = hdf5.h5py().h5d
    if dataset.external:
        return "external"
    names = {
        h5d.COMPACT: "compact",
        h5d.CONTIGUOUS: "contiguous",
        h5d.CHUNKED: "chunked",
        h5d.VIRTUAL: "virtual",
    }
    return names[dataset.id.get_create_plist().get_layout()]


def _format_dtype(dtype: np.dtype) -> str:
    h5py = hdf5.h5py()
    if h5py.check_string_dtype(dtype) is not None and dtype.hasobject:
        return "text of any length"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    inner = h5py.check_vlen_dtype(dtype)
    if inner is not None:
        return f"rows of any length of {inner}"
    if dtype.names:
        return f"compound of {', '.join(dtype.names)}"
    return f"enum of {dtype}" if h5py.check_enum_dtype(dtype) else str(dtype)


def _format_filter(number: int, values: tuple[int, ...]) -> str:
    name = name_of_filter(number)
    return f"{name} {values[0]}" if name in _WITH_LEVEL and values else name


def _unreadable(dataset: Any) -> str:
    """Return why the dataset cannot be read here, or an empty string."""
    for name in missing_filters(dataset):
        return f"{name} is not installed. {install_filter(name)}".rstrip(".")
    try:
        check_virtual_sources(dataset)
    except DataError as error:
        return str(error).rstrip(".")
    missing_files = [name for name, _, _ in dataset.external or () if not _is_there(dataset, name)]
    return f"the file {missing_files[0]} with its bytes is missing" if missing_files else ""


def _is_there(dataset: Any, name: str) -> bool:
    folder = os.path.dirname(dataset.file.filename)
    return os.path.exists(os.path.join(folder, name)) or os.path.exists(name)


def _print_for_people(path: str, content: dict[str, Any]) -> None:
    datasets: dict[str, dict[str, Any]] = content["datasets"]
    steps = f", {counted(content['steps'], 'step')}" if "steps" in content else ""
    print_line(f"{path}: data, {readable_size(os.path.getsize(path))}{steps}")
    if datasets:
        print_table(_COLUMNS, [_row(name, each) for name, each in datasets.items()])
    if content["links"]:
        print_table(("link", "leads to"), content["links"].items())
    if content["damaged"]:
        print_table(("damaged", "reason"), content["damaged"].items())
    size = readable_size(sum(each["bytes"] for each in datasets.values()))
    print_line(f"{counted(len(datasets), 'dataset')}, {size}")
    for line in content["advice"]:
        print_line(f"- {line}")
    if content["h5repack"]:
        print_line(f"To rewrite it with a better layout:\n{content['h5repack']}")


def _row(name: str, dataset: dict[str, Any]) -> list[object]:
    shape, chunks = dataset["shape"], dataset["chunks"]
    chunk = f"{tuple(chunks)}, {readable_size(dataset['chunk_bytes'])}" if chunks else "-"
    return [
        name,
        "empty" if shape is None else tuple(shape),
        dataset["dtype"],
        dataset["layout"],
        chunk,
        " + ".join(dataset["filters"]) or "-",
        readable_size(dataset["bytes"]),
        readable_size(dataset["stored_bytes"]),
    ]


_Described = Mapping[str, Mapping[str, Any]]
"""Datasets by path, as `_describe` returns them."""

_CHUNK_BYTES = 256 * 2**10
"""Size that is small enough to mix well in a window, and large enough to keep a disk busy."""

_MIN_CHUNK_BYTES = 16 * 2**10
"""Finding smaller chunks takes longer than decoding them."""

_MAX_CHUNK_BYTES = 2**32
"""HDF5 allows only smaller chunks."""

_MANY_CHUNKS = 1000
_TYPICAL_BATCH = 256
_FEW_PARTITIONS = 4
"""With fewer partitions, even small jobs cannot share the work."""

_MIN_MIXED = 16
"""With fewer chunks in a window, neighbours stay together."""

_MAX_NAMES = 4
"""Most names that one line shows."""

_OF_HDF5 = {"gzip", "shuffle", "fletcher32", "nbit", "scaleoffset"}
_OF_PLUGINS = {"bitshuffle", "blosc", "blosc2", "bzip2", "lz4", "zfp", "zstd"}
"""Filters that h5repack supports if it finds hdf5plugin. It never supports h5py's lzf."""


def advice(path: str, datasets: _Described) -> tuple[list[str], str | None]:
    """Return advice on reading the file shuffled, and the command that improves its layout."""
    lines, options = list(_non_field_advice(datasets)), []
    fields = {name: each for name, each in datasets.items() if each["is_field"]}
    for name, field in fields.items():
        lines += _reading_advice(name, field)
    for together in _read_together(fields):
        bad = list(_chunk_advice(together))
        lines += [*bad, *_sharing_advice(together)]
        for name, chunk in _better_chunks(together).items() if bad else ():
            options += ["-l", f"{name}:CHUNK={'x'.join(map(str, chunk))}"]
    for name, field in fields.items():
        if _is_slow(field):
            options += ["-f", f"{name}:SHUF", "-f", f"{name}:GZIP=4"]
    lost = [name for name, each in datasets.items() if not _can_be_repacked(name, each)]
    if options and lost:
        lines.append(
            f"h5repack would fail for {_names(lost)} or leave it out, so use h5py instead."
        )
    return lines, _command(path, datasets, options) if options and not lost else None


def _non_field_advice(datasets: _Described) -> Iterator[str]:
    others = {name: each for name, each in datasets.items() if not each["is_field"]}
    scalars = [name for name, each in others.items() if each["shape"] == []]
    if scalars:
        yield f"{_names(scalars)} can be read as examples only with a * in the path (scalars)."
    unreadable = [name for name, each in others.items() if not each["is_readable"]]
    if unreadable:
        yield (
            f"{_names(unreadable)} cannot be read as examples: {READABLE}. Fields can name other "
            "members of a compound type."
        )


def _reading_advice(name: str, field: Mapping[str, Any]) -> Iterator[str]:
    if field["unreadable"]:
        yield f"{name} cannot be read here: {field['unreadable']}."
    if field["layout"] == "virtual":
        yield f"{name} is virtual, so HDF5 reads it in one thread."
    if _is_slow(field):
        yield (
            f"{name} is decoded by HDF5 in one thread. mpistrat decodes gzip, lzf, zstd, lz4 and "
            "blosc in several threads."
        )


def _is_slow(field: Mapping[str, Any]) -> bool:
    return bool(field["chunks"]) and not field["decoded_in_threads"]


def _read_together(fields: _Described) -> Iterable[_Described]:
    """Return sets of fields that may be read together: same group and same length."""
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for name, field in fields.items():
        if field["row_bytes"]:
            found.setdefault((os.path.dirname(name), field["shape"][0]), {})[name] = field
    return found.values()


def _chunk_advice(fields: _Described) -> Iterator[str]:
    """Yield the problems that `_better_chunks` solves. With its chunks, none is left."""
    for name, field in fields.items():
        pieces = math.prod(map(sharding.ceil_div, field["shape"][1:], (field["chunks"] or ())[1:]))
        if pieces > 1 and field["row_bytes"] < _MAX_CHUNK_BYTES:
            yield (
                f"Each row of {name} is split over {pieces} chunks, and reading it decodes them "
                "all. Chunks should contain whole rows."
            )
        if field["chunk_bytes"] < _MIN_CHUNK_BYTES and field["num_chunks"] > _MANY_CHUNKS:
            yield (
                f"An epoch of {name} reads {field['num_chunks']} chunks of "
                f"{readable_size(field['chunk_bytes'])}. Finding them takes longer than decoding."
            )
    widest = _widest_field(fields)
    field = fields[widest]
    if not field["chunks"]:
        return
    num_rows, rows = field["shape"][0], field["rows_per_chunk"]
    in_window = _chunks_in_window(fields)
    if _can_shrink(field) and in_window < min(_MIN_MIXED, sharding.ceil_div(num_rows, rows)):
        yield (
            f"Chunks of {widest} have {readable_size(field['chunk_bytes'])}, so a shuffled epoch "
            f"mixes the rows of only {counted(in_window, 'chunk')} at a time, and neighbours often "
            "stay together."
        )
    is_large = rows > 1 and field["chunk_bytes"] > _CHUNK_BYTES
    if is_large and _num_partitions(fields) < min(_FEW_PARTITIONS, num_rows):
        yield f"Smaller chunks of {widest} would let more ranks share the work."
    for name, other in fields.items():
        is_kept = other["bytes"] <= WINDOW_BYTES  # once decoded
        if _can_shrink(other) and other["rows_per_chunk"] > 2 * rows and not is_kept:
            yield (
                f"A chunk of {name} has {other['rows_per_chunk']} rows, but a chunk of {widest} "
                f"has {rows}. A shuffled epoch decodes chunks of {name} many times."
            )


def _sharing_advice(fields: _Described) -> Iterator[str]:
    if fields[_widest_field(fields)]["chunks"]:
        yield (
            f"{_names(fields)}: good for up to {counted(_num_partitions(fields), 'rank')} when "
            f"shuffled in batches of {_TYPICAL_BATCH} (each chunk is decoded about once per epoch)."
        )


def _widest_field(fields: _Described) -> str:
    return max(fields, key=lambda name: fields[name]["row_bytes"])


def _can_shrink(field: Mapping[str, Any]) -> bool:
    """Return whether chunks of fewer rows would still be large enough."""
    return bool(field["rows_per_chunk"] > 1 and field["chunk_bytes"] >= 2 * _MIN_CHUNK_BYTES)


def _row_bytes(fields: _Described) -> int:
    return sum(field["row_bytes"] for field in fields.values())


def _chunks_in_window(fields: _Described) -> int:
    rows: int = fields[_widest_field(fields)]["rows_per_chunk"]
    return max(WINDOW_BYTES // (_row_bytes(fields) * rows), 1)


def _num_partitions(fields: _Described) -> int:
    widest = fields[_widest_field(fields)]
    num_rows = widest["shape"][0]
    chunks = sharding.ceil_div(num_rows, widest["rows_per_chunk"])
    plan = Partitions.plan(chunks, num_rows, _TYPICAL_BATCH, _chunks_in_window(fields))
    return plan.count


def _better_chunks(fields: _Described) -> dict[str, list[int]]:
    """Return better chunks for fields that need them, with whole rows and aligned boundaries."""
    widest = fields[_widest_field(fields)]["row_bytes"]
    rows = min(_CHUNK_BYTES // widest, WINDOW_BYTES // (_MIN_MIXED * _row_bytes(fields)))
    chunks = {}
    for name, field in fields.items():
        num_rows, *row_shape = field["shape"]
        # The factor is a power of two, so that chunks of narrow and wide fields end at equal rows.
        tiny = sharding.ceil_div(_MIN_CHUNK_BYTES, max(rows, 1) * field["row_bytes"])
        chunk = [min(max(rows, 1) << (tiny - 1).bit_length(), num_rows), *row_shape]
        if field["chunks"] not in (None, chunk) and field["row_bytes"] < _MAX_CHUNK_BYTES:
            chunks[name] = chunk
    return chunks


def _can_be_repacked(name: str, dataset: Mapping[str, Any]) -> bool:
    """Return whether h5repack copies the dataset. It leaves out datasets that it cannot decode."""
    if dataset["unreadable"] or dataset["layout"] == "virtual":  # h5repack 1.10 crashes
        return False
    filters = {each.split()[0] for each in dataset["filters"]}
    # In its arguments a comma ends a name, and a name must be shorter than 256 bytes.
    can_be_named = name.isprintable() and "," not in name and len(name.encode()) < 256
    return can_be_named and filters <= _OF_HDF5 | _OF_PLUGINS


def _command(path: str, datasets: _Described, options: list[str]) -> str:
    used = {each.split()[0] for dataset in datasets.values() for each in dataset["filters"]}
    # This is empty if HDF5_PLUGIN_PATH is already set, because hdf5plugin then registers nothing.
    folders = {os.path.dirname(library) for library in hdf5.plugin_libraries().values()}
    needs_path = bool(folders and used & _OF_PLUGINS)
    variables = [f"HDF5_PLUGIN_PATH={shlex.quote(':'.join(folders))}"] if needs_path else []
    root, extension = os.path.splitext(path)
    command = ["h5repack", *options, path, f"{root}-repacked{extension}"]
    return " ".join([*variables, shlex.join(command)])


def _names(names: Iterable[str]) -> str:
    first, rest = list(names)[:_MAX_NAMES], list(names)[_MAX_NAMES:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


def _objects_of(file: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the datasets and links of a file, and why other objects cannot be opened.

    Each dataset is under its first name, and a link is the text of its target, not followed.
    """
    h5py = hdf5.h5py()
    # Include the root, because a hard link may lead back to it.
    seen = {_address(file.id): "/"}
    found: dict[str, Any] = {}
    damaged: dict[str, str] = {}
    # Walk depth first and by name, like HDF5's tools, because h5repack uses the first name of an
    # object. Do not use H5Lvisit, which stops at the first object that it cannot open.
    waiting = [(b"", file.id)]
    while waiting:
        prefix, group = waiting.pop()
        if prefix:
            try:
                entry = _entry(group, prefix.rpartition(b"/")[2], seen, _text(prefix))
            except _HDF5_ERRORS as reason:
                damaged[_text(prefix)] = hdf5.error_text(reason)
                continue
            if not isinstance(entry, h5py.h5g.GroupID):
                if entry is not None:
                    found[_text(prefix)] = entry
                continue
            group, prefix = entry, prefix + b"/"
        names: list[bytes] = []  # names need not be UTF-8
        try:
            group.links.iterate(names.append)
        except _HDF5_ERRORS as reason:
            damaged[_text(prefix) or "/"] = hdf5.error_text(reason)
        waiting += [(prefix + name, group) for name in reversed(names)]
    return found, damaged


def _entry(group: Any, name: bytes, seen: dict[int, str], path: str) -> Any:
    """Return the group, dataset or text of a link with this name, or ``None`` for a type."""
    h5py, links = hdf5.h5py(), group.links
    kind = links.get_info(name).type
    if kind == h5py.h5l.TYPE_SOFT:
        return f"link to {_text(links.get_val(name))}"
    if kind == h5py.h5l.TYPE_EXTERNAL:
        filename, target_path = map(_text, links.get_val(name))
        return f"link to {target_path} of {filename}"
    target = h5py.h5o.open(group, name)
    address = _address(target)
    if address in seen:
        return f"another name of {seen[address]}"
    seen[address] = path
    if isinstance(target, h5py.h5d.DatasetID):
        return h5py.Dataset(target)
    return target if isinstance(target, h5py.h5g.GroupID) else None


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _address(found: Any) -> int:
    return int(hdf5.h5py().h5o.get_info(found).addr)
