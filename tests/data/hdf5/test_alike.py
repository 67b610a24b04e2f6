"""Files like the first one are looked at less; what is found must be the same."""

import h5py
import numpy as np
import pytest

from mpistrat.data.hdf5 import alike
from mpistrat.data.hdf5.catalog import read_catalog
from mpistrat.errors import DataError


def plain(file, dtype="f4", rows=10, **options):
    file.create_dataset("x", data=np.arange(4 * rows).reshape(rows, 4).astype(dtype), **options)
    file["y"] = np.arange(rows)


def linked(file, kind):
    plain(file)
    file.move("x", "there")
    file["x"] = h5py.SoftLink("/there") if kind == "soft" else file["there"]


def outside(file):
    with h5py.File(file.filename + ".other", "w") as other:
        plain(other)
    file["x"], file["y"] = h5py.ExternalLink(file.filename + ".other", "x"), np.arange(10)


def unwritten(file, chunks=None):
    file.create_dataset("x", (10, 4), "f4", chunks=chunks)
    file["y"] = np.arange(10)


def named_type(file):
    file["type"] = np.dtype("f4")
    file.create_dataset("x", (10, 4), file["type"], data=np.ones((10, 4)))
    file["y"] = np.arange(10)


def compact(file):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((10, 4))
    h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
    file["y"] = np.arange(10)


def external(file):
    plain(file)
    del file["x"]
    file.create_dataset("x", (10, 4), "f4", external=[(file.filename + ".raw", 0, 160)])
    file["x"][...] = 1


def virtual(file):
    plain(file)
    layout = h5py.VirtualLayout((10, 4), "f4")
    file.move("x", "source")
    layout[...] = h5py.VirtualSource(".", "source", (10, 4))
    file.create_virtual_dataset("x", layout)


KINDS = {
    "contiguous": plain,
    "longer": lambda f: plain(f, rows=40_000),
    "one row": lambda f: plain(f, rows=1),
    "no rows": lambda f: plain(f, rows=0),
    "chunks": lambda f: plain(f, chunks=(3, 4)),
    "other chunks": lambda f: plain(f, chunks=(5, 4)),
    "cut chunks": lambda f: plain(f, chunks=(5, 2)),
    "gzip": lambda f: plain(f, chunks=(3, 4), compression="gzip"),
    "shuffled gzip": lambda f: plain(f, chunks=(3, 4), compression="gzip", shuffle=True),
    "lzf": lambda f: plain(f, chunks=(3, 4), compression="lzf"),
    "big-endian": lambda f: plain(f, ">f4"),
    "wider": lambda f: plain(f, "f8"),
    "integers": lambda f: plain(f, "i4"),
    "soft link": lambda f: linked(f, "soft"),
    "hard link": lambda f: linked(f, "hard"),
    "external link": outside,
    "unwritten": unwritten,
    "unwritten chunks": lambda f: unwritten(f, (3, 4)),
    "named type": named_type,
    "compact": compact,
    "external storage": external,
    "virtual": virtual,
    "missing": lambda f: f.create_dataset("y", data=np.arange(10)),
    "a group": lambda f: f.create_group("x"),
    "a scalar": lambda f: [f.create_dataset(n, data=1.0) for n in "xy"],
    "other rows": lambda f: [f.create_dataset(n, data=np.ones((10, 3), "f4")) for n in "xy"],
    "lengths differ": lambda f: [
        f.create_dataset("x", data=np.ones((9, 4), "f4")),
        f.create_dataset("y", data=np.arange(10)),
    ],
    "text": lambda f: [
        f.create_dataset("x", data=["a"] * 10),
        f.create_dataset("y", data=np.arange(10)),
    ],
}


def described(paths):
    """Return all that a catalog says of files, or its error."""
    try:
        catalog = read_catalog(paths, ("x", "y"))
    except DataError as error:
        return str(error)
    files = [
        (each.path, each.num_rows, each.stamps, [repr(layout) for layout in each.layouts])
        for each in catalog.files
    ]
    return files, catalog.columns, catalog.singles, [str(o.spec) for o in catalog.outputs]


@pytest.mark.filterwarnings("ignore:The dataset:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["contiguous", "chunks", "gzip", "big-endian", "compact"])
def test_what_is_known_of_a_file_does_not_depend_on_the_first(tmp_path, monkeypatch, first, kind):
    paths = [str(tmp_path / name) for name in ("first.h5", "other.h5")]
    for path, each in zip(paths, (first, kind), strict=True):
        with h5py.File(path, "w", userblock_size=512 if kind == "one row" else 0) as file:
            KINDS[each](file)
    found = described(paths)
    monkeypatch.setattr(alike.Template, "of", lambda *_: None)
    assert found == described(paths)


@pytest.mark.parametrize("kind", ["contiguous", "longer", "chunks", "gzip"])
def test_like_files_are_not_looked_at_again(tmp_path, monkeypatch, kind):
    paths = [str(tmp_path / f"{number}.h5") for number in range(20)]
    for path in paths:
        with h5py.File(path, "w") as file:
            KINDS[kind](file)
    calls = []
    located = alike.Template.entry

    def entry(*args):
        calls.append(located(*args))
        return calls[-1]

    monkeypatch.setattr(alike.Template, "entry", entry)
    read_catalog(paths, ("x", "y"))
    assert len(calls) == 19
    assert None not in calls
