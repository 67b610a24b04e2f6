"""Objects of an HDF5 file: its datasets and links, also where some of them are damaged."""

from __future__ import annotations

from typing import Any

from mpistrat import hdf5

HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises where an object is damaged."""


def objects_of(file: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the datasets and links of a file, and why other objects cannot be opened.

    Each dataset is under its first name, and a link is the text of its target, not followed.
    """
    h5py = hdf5.h5py()
    seen = {_address(file.id): "/"}
    found: dict[str, Any] = {}
    damaged: dict[str, str] = {}
    # Depth first, by name, as HDF5's tools do: h5repack names an object by the name it meets first.
    # Not by H5Lvisit, which ends at the first object that it cannot open.
    waiting = [(b"", file.id)]
    while waiting:
        prefix, group = waiting.pop()
        if prefix:
            try:
                entry = _entry(group, prefix.rpartition(b"/")[2], seen, _text(prefix))
            except HDF5_ERRORS as reason:
                damaged[_text(prefix)] = hdf5.error_text(reason)
                continue
            if not isinstance(entry, h5py.h5g.GroupID):
                if entry is not None:
                    found[_text(prefix)] = entry
                continue
            group, prefix = entry, prefix + b"/"
        names: list[bytes] = []  # which need not be UTF-8
        try:
            group.links.iterate(names.append)
        except HDF5_ERRORS as reason:
            damaged[_text(prefix) or "/"] = hdf5.error_text(reason)
        waiting += [(prefix + name, group) for name in reversed(names)]
    return found, damaged


def _entry(group: Any, name: bytes, seen: dict[int, str], path: str) -> Any:
    """Return the group, the dataset or the text of a link under a name, ``None`` for a type."""
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
