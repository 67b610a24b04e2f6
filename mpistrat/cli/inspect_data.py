"""Inspecting data files: what they hold, and how that can be read."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.checkpoint.attributes import read_attribute
from mpistrat.checkpoint.format import FORMAT
from mpistrat.cli.data_advice import advice
from mpistrat.cli.output import print_error, print_json, print_line, print_table
from mpistrat.data.filters import make_decoder
from mpistrat.data.virtual_sources import check_virtual_sources
from mpistrat.errors import DataError
from mpistrat.spelling import readable_size

__all__ = ["holds_data", "inspect_data"]

_COLUMNS = ("data set", "shape", "dtype", "layout", "chunk", "filters", "size", "stored")

_FILTERS = {
    1: "gzip",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    307: "bzip2",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}
"""Names in the HDF Group's register of filters."""
_WITH_LEVEL = {"gzip", "zstd"}


def holds_data(path: str) -> bool:
    """Return whether `path` is an HDF5 file, and no checkpoint. Local."""
    try:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            if read_attribute(file, "format") == FORMAT:
                return False
            # A checkpoint that has lost its header is a damaged one, and no data.
            return not {"format_version", "mpistrat_version"} & set(file.attrs)
    except (DataError, OSError, RuntimeError, UnicodeError):
        return False


def inspect_data(arguments: argparse.Namespace) -> int:
    """Print what a file of data holds, and return the exit code. Local."""
    path = arguments.file
    if arguments.stats or arguments.plot:
        print_error("inspect", f"{path} is no checkpoint: --stats and --plot are for those.")
        return 2
    try:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            content = _content(path, file)
    except (DataError, OSError, RuntimeError, KeyError) as error:
        print_error("inspect", f"{path}: {error}")
        return 1
    if arguments.json:
        print_json(content)
    else:
        _print_for_people(path, content)
    return 0


def _content(path: str, file: Any) -> dict[str, Any]:
    found = _objects(file)
    datasets = {name: _describe(each) for name, each in found.items() if not isinstance(each, str)}
    lines, command = advice(path, datasets)
    return {
        "attributes": sorted(file.attrs),
        "datasets": datasets,
        "links": {name: each for name, each in found.items() if isinstance(each, str)},
        "advice": lines,
        "h5repack": command,
    }


def _objects(file: Any) -> dict[str, Any]:
    """Return each data set under its first name, and where links lead, which are not followed."""
    h5py = hdf5.h5py()
    seen = {_address(file): "/"}
    found = {}

    def visit(path: str, link: Any) -> None:
        if isinstance(link, h5py.SoftLink):
            found[path] = f"link to {link.path}"
        elif isinstance(link, h5py.ExternalLink):
            found[path] = f"link to {link.path} of {link.filename}"
        elif (address := _address(target := file[path])) in seen:
            found[path] = f"another name of {seen[address]}"
        else:
            seen[address] = path
            if isinstance(target, h5py.Dataset):
                found[path] = target

    # The order of HDF5's tools: h5repack knows an object by the name that comes first in it.
    file.visititems_links(visit)
    return found


def _address(found: Any) -> int:
    return int(hdf5.h5py().h5o.get_info(found.id).addr)


def _describe(dataset: Any) -> dict[str, Any]:
    shape, dtype, chunks = dataset.shape, dataset.dtype, dataset.chunks
    row_bytes = math.prod(shape[1:]) * dtype.itemsize if shape else 0
    filters = hdf5.filters_of(dataset)
    return {
        "shape": None if shape is None else list(shape),
        "dtype": _spell_dtype(dtype),
        "layout": _layout(dataset),
        "chunks": list(chunks) if chunks else None,
        "filters": [_spell_filter(*each) for each in filters],
        "num_chunks": dataset.id.get_num_chunks() if chunks else 0,
        "chunk_bytes": math.prod(chunks) * dtype.itemsize if chunks else 0,
        "rows_per_chunk": chunks[0] if chunks else 1,
        "row_bytes": row_bytes,
        "bytes": row_bytes * shape[0] if shape else dtype.itemsize * (shape == ()),
        "stored_bytes": dataset.id.get_storage_size(),
        "is_field": bool(shape) and dtype.kind in "biufcS" and shape[0] > 0,
        "decoded_in_threads": chunks is not None and make_decoder(filters) is not None,
        "unreadable": _unreadable(dataset, [number for number, _ in filters]),
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


def _spell_dtype(dtype: np.dtype) -> str:
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


def _spell_filter(number: int, values: tuple[int, ...]) -> str:
    name = _FILTERS.get(number, f"filter {number}")
    return f"{name} {values[0]}" if name in _WITH_LEVEL and values else name


def _unreadable(dataset: Any, filters: list[int]) -> str:
    """Return why the data set cannot be read here, or nothing."""
    missing = [number for number in filters if not hdf5.h5py().h5z.filter_avail(number)]
    if missing:
        return f"{_spell_filter(missing[0], ())} is not installed"
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
    print_line(f"{path}: data, {readable_size(os.path.getsize(path))}")
    if datasets:
        print_table(_COLUMNS, [_row(name, each) for name, each in datasets.items()])
    if content["links"]:
        print_table(("link", "leads to"), content["links"].items())
    size = readable_size(sum(each["bytes"] for each in datasets.values()))
    print_line(f"{len(datasets)} data set(s), {size}")
    for line in content["advice"]:
        print_line(f"- {line}")
    if content["h5repack"]:
        print_line(f"To write it with a better layout:\n{content['h5repack']}")


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
