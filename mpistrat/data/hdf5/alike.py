"""Files like the first one, of which only lengths and places are read: there may be thousands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.columns import Column
from mpistrat.data.hdf5.fields import encoded, parts_of
from mpistrat.data.hdf5.layouts import ColumnLayout, contiguous_layout, layout_of
from mpistrat.data.hdf5.located import Kind, Located
from mpistrat.data.hdf5.storage import Storage


@dataclass(frozen=True)
class _Dataset:
    """What is the same in a data set of the first file and of one that is like it."""

    place: str
    links: tuple[bytes, ...]
    """The beginnings of `place`, up to all of it: each must be the name of an object here."""
    type: Any
    """The type of HDF5."""
    row_shape: tuple[int, ...]
    layout: int
    """Such as ``h5d.CONTIGUOUS``."""
    filters: tuple[int, ...]

    @classmethod
    def of(cls, file: Any, place: str) -> _Dataset | None:
        """Return a data set of an open file; ``None`` if others cannot be compared with it."""
        dataset, names = file[place], parts_of(place)
        node = dataset.id
        kind = node.get_type()
        # Text of any length and named types belong to their file.
        if node.dtype.hasobject or kind.committed():
            return None
        properties = node.get_create_plist()
        links = tuple(encoded("/".join(names[: n + 1])) for n in range(len(names)))
        filters = tuple(n for n, _ in hdf5.filters_of(dataset))
        return cls(place, links, kind, node.shape[1:], properties.get_layout(), filters)

    def open(self, file: Any) -> Any:
        """Return the data set of another open file, on the low level; ``None`` if it differs."""
        h5py, links = hdf5.h5py(), file.id.links
        try:
            if any(links.get_info(link).type != h5py.h5l.TYPE_HARD for link in self.links):
                return None
            node = h5py.h5d.open(file.id, self.links[-1])
        except (KeyError, OSError, RuntimeError, ValueError):  # what is wrong is said elsewhere
            return None
        properties, shape = node.get_create_plist(), node.shape
        is_same = (
            bool(shape)
            and shape[1:] == self.row_shape
            and node.get_type().equal(self.type)
            and properties.get_layout() == self.layout
            and not properties.get_external_count()
            and properties.get_nfilters() == len(self.filters)
            and all(properties.get_filter(i)[0] == each for i, each in enumerate(self.filters))
        )
        return node if is_same else None


@dataclass(frozen=True)
class Template:
    """The fields of the first file, where they are plain rows."""

    columns: tuple[Column, ...]
    layouts: tuple[ColumnLayout, ...]
    """Those of the columns in the first file."""
    datasets: tuple[_Dataset, ...]

    @classmethod
    def of(
        cls,
        file: Any,
        located: Sequence[Located],
        columns: Sequence[Column],
        layouts: Sequence[ColumnLayout],
    ) -> Template | None:
        """Return the fields of an open file; ``None`` if others must be looked at as this one."""
        if any(e.kind is not Kind.ROWS or e.axis or e.others or e.left_out for e in located):
            return None
        places = dict.fromkeys(each.path for each in located)
        datasets = tuple(d for place in places if (d := _Dataset.of(file, place)) is not None)
        if len(datasets) < len(places):
            return None
        return cls(tuple(columns), tuple(layouts), datasets)

    def entry(self, file: Any, path: str) -> tuple[int, tuple[ColumnLayout, ...]] | None:
        """Return the number of rows of an open file, and its layouts; ``None`` if it differs."""
        nodes = {}
        for each in self.datasets:
            node = nodes[each.place] = each.open(file)
            if node is None:
                return None
        lengths = {node.shape[0] for node in nodes.values()}
        if len(lengths) > 1:
            return None
        pairs = zip(self.columns, self.layouts, strict=True)
        return lengths.pop(), tuple(_layout(nodes[c.path], path, c, first) for c, first in pairs)


def _layout(node: Any, path: str, column: Column, first: ColumnLayout) -> ColumnLayout:
    length, storage = node.shape[0], first.storage
    if length and storage is not None and storage.row_bytes and not first.is_chunked:
        offset = hdf5.offset_of_block(node, length * storage.row_bytes)
        if offset is not None:
            storage = Storage(np.array([offset]), length, storage.dtype, storage.row_bytes)
            return contiguous_layout(first.spec, length, storage)
    dataset = hdf5.h5py().Dataset(node, readonly=True)
    return layout_of(dataset, path, column.axis, column.dtype, False)
