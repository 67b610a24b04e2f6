"""Virtual datasets and external links, whose data lie any number of files away."""

import contextlib
import re

import h5py
import numpy as np
import pytest

from mpistrat.cli import main
from mpistrat.data import Dataset, Field
from mpistrat.data.hdf5 import open_files
from mpistrat.errors import DataError
from tests.data.hdf5.test_open_files import touched

VALUES = np.arange(1, 41, dtype="i4").reshape(20, 2)


def virtual(file, name, source, of="x", shape=VALUES.shape):
    layout = h5py.VirtualLayout(shape, "i4")
    layout[:] = h5py.VirtualSource(source, of, shape, dtype="i4")
    file.create_virtual_dataset(name, layout, fillvalue=-7)


def chain(folder, steps):
    """Write files 0.h5, 1.h5 and so on, each of which takes the elements of `x` from the next."""
    for number, step in enumerate((*steps, "values")):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            if step == "values":
                file["x"] = VALUES
                file["x"].attrs["label"] = 3
            elif step == "virtual":
                virtual(file, "x", f"{number + 1}.h5")
            elif step == "link":
                file["x"] = h5py.ExternalLink(f"{number + 1}.h5", "x")
            elif step == "soft":
                file["there"] = h5py.ExternalLink(f"{number + 1}.h5", "/")
                file["x"] = h5py.SoftLink("/there/x")
            else:  # virtual over virtual of the same file
                virtual(file, "inner", f"{number + 1}.h5")
                virtual(file, "x", ".", "inner")
    return folder / "0.h5"


STEPS = [
    ("virtual", "virtual"),
    ("virtual", "link"),
    ("link", "virtual"),
    ("link", "link"),
    ("soft", "virtual", "soft"),
    ("inner",),
    ("link", "inner", "virtual", "virtual"),
]


@pytest.mark.parametrize("field", ["x", "x*"])
@pytest.mark.parametrize("steps", STEPS, ids="-".join)
def test_a_chain_of_files(tmp_path, monkeypatch, steps, field):
    path = chain(tmp_path, steps)
    monkeypatch.setattr(open_files, "_CHECK_INTERVAL_S", 0.0)

    def read():
        return np.concatenate(list(Dataset.from_hdf5(path, field).batch(7))).reshape(20, 2)

    assert (read() == VALUES).all()
    # A change of any file of the chain ends the pass.
    for number in range(len(steps) + 1):
        batches = iter(Dataset.from_hdf5(path, "x").batch(1))
        next(batches)
        touched(tmp_path / f"{number}.h5")
        with pytest.raises(DataError, match=rf"{number}\.h5 has changed since"):
            list(batches)
    for number in range(1, len(steps) + 1):
        (tmp_path / f"{number}.h5").rename(tmp_path / "away.h5")
        with pytest.raises(DataError, match=r"0\.h5") as error:
            read()
        assert f"{number}.h5" in str(error.value) or "a broken link" in str(error.value)
        del error  # or its traceback would keep files open
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["other"] = 0  # the file is there, but not the dataset
        with pytest.raises(DataError, match=r"0\.h5") as error:
            read()
        assert f"{number}.h5" in str(error.value) or "a broken link" in str(error.value)
        del error  # or its traceback would keep files open
        (tmp_path / f"{number}.h5").write_text("no HDF5")
        with pytest.raises(DataError, match=r"0\.h5"):
            read()
        (tmp_path / "away.h5").rename(tmp_path / f"{number}.h5")
    assert (read() == VALUES).all()


def test_the_error_names_the_whole_chain(tmp_path):
    path = chain(tmp_path, ("virtual", "virtual", "virtual"))
    (tmp_path / "3.h5").unlink()
    expected = (
        r"virtual dataset '/x' of .*2\.h5 needs the file 3\.h5, which is missing.*"
        r"'/x' of .*0\.h5 takes elements from '/x' of .*1\.h5, '/x' of .*1\.h5 takes .*2\.h5"
    )
    with pytest.raises(DataError, match=expected):
        Dataset.from_hdf5(path, "x").cardinality()


@pytest.mark.parametrize("attribute", [None, "label"])
def test_a_link_of_a_link_is_watched_for_attributes_too(tmp_path, monkeypatch, attribute):
    monkeypatch.setattr(open_files, "_CHECK_INTERVAL_S", 0.0)
    for name in ("x*", "x"):
        path = chain(tmp_path, ("link", "link"))
        fields = (Field(name, attribute=attribute), "x*" if name == "x*" else "x")
        for number in range(3):
            dataset = Dataset.from_hdf5(path, fields)
            list(dataset)
            touched(tmp_path / f"{number}.h5")
            with pytest.raises(DataError, match=rf"{number}\.h5 has changed since"):
                list(dataset)


def test_circles_end(tmp_path):
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            virtual(file, "x", f"{1 - number}.h5")
            virtual(file, "own", ".", "own")
            file["link"] = h5py.ExternalLink(f"{1 - number}.h5", "link")
            virtual(file, "over_links", ".", "link")
    for name, message in (
        ("x", "refers to itself"),
        ("own", "refers to itself"),
        ("over_links", "a broken link"),
        ("link", "field 'link'"),
    ):
        with pytest.raises(DataError, match=message):
            Dataset.from_hdf5(tmp_path / "0.h5", name).cardinality()
    assert main(["inspect", str(tmp_path / "0.h5")]) == 0


def test_a_diamond_is_no_circle(tmp_path):
    with h5py.File(tmp_path / "0.h5", "w") as file:
        file["x"] = VALUES
        virtual(file, "left", ".")
        virtual(file, "right", ".")
        layout = h5py.VirtualLayout((40, 2), "i4")
        for first, name in ((0, "left"), (20, "right")):
            layout[first : first + 20] = h5py.VirtualSource(".", name, (20, 2), dtype="i4")
        file.create_virtual_dataset("both", layout)
    got = np.concatenate(list(Dataset.from_hdf5(tmp_path / "0.h5", "both").batch(7)))
    assert (got == np.concatenate([VALUES, VALUES])).all()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_data_outside_of_the_folder_are_named_at_any_depth(tmp_path, depth):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    with h5py.File(outside / "far.h5", "w") as file:
        file["x"] = VALUES
    for step in range(depth):
        with h5py.File(inside / f"{step}.h5", "w") as file:
            virtual(file, "x", "../outside/far.h5" if step == depth - 1 else f"{step + 1}.h5")
    with pytest.warns(UserWarning, match=rf"outside .*{re.escape(str(outside / 'far.h5'))}\. Read"):
        Dataset.from_hdf5(inside / "0.h5", "x").cardinality()


@pytest.mark.parametrize("behind", [False, True])
def test_a_series_of_sources_ends_with_the_first_that_is_missing(tmp_path, behind):
    for number in (0, 1, 3):
        with h5py.File(tmp_path / f"part-{number}.h5", "w") as file:
            if behind:
                with h5py.File(tmp_path / f"raw-{number}.h5", "w") as raw:
                    raw["x"] = np.arange(4, dtype="i4") + 10 * number
                virtual(file, "x", f"raw-{number}.h5", shape=(4,))
            else:
                file["x"] = np.arange(4, dtype="i4") + 10 * number
    path, unlimited = tmp_path / "series.h5", h5py.h5s.UNLIMITED
    with h5py.File(path, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple((4,), (unlimited,))
        space.select_hyperslab((0,), (unlimited,), stride=(4,), block=(4,))
        properties.set_virtual(space, b"part-%b.h5", b"x", h5py.h5s.create_simple((4,)))
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, properties)
    dataset = Dataset.from_hdf5(path, "x")
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 10, 11, 12, 13]
    if behind:
        (tmp_path / "raw-1.h5").unlink()
        with pytest.raises(DataError, match=r"part-1\.h5 needs the file raw-1\.h5"):
            Dataset.from_hdf5(path, "x").cardinality()
    else:
        touched(tmp_path / "part-1.h5")
        with pytest.raises(DataError, match=r"part-1\.h5 has changed since"):
            list(dataset)


def test_a_percent_sign_in_a_name_is_no_series(tmp_path):
    with h5py.File(tmp_path / "50%.h5", "w") as file:
        file["x"] = VALUES
    with h5py.File(tmp_path / "data.h5", "w") as file:
        virtual(file, "x", "50%%.h5")
    assert Dataset.from_hdf5(tmp_path / "data.h5", "x").cardinality() == 20
    (tmp_path / "50%.h5").unlink()
    with pytest.raises(DataError, match=r"needs the file 50%\.h5, which is missing"):
        Dataset.from_hdf5(tmp_path / "data.h5", "x").cardinality()


def test_sources_are_looked_for_where_hdf5_looks(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with h5py.File(folder / "data.h5", "w") as file:
        virtual(file, "x", "/not/there/raw.h5")
        file["link"] = h5py.ExternalLink("raw.h5", "x")
    for where, values in ((elsewhere, -VALUES), (folder, VALUES)):
        with h5py.File(where / "raw.h5", "w") as file:
            file["x"] = values
    # The folder of the file comes before the current one, which holds a file that is not read.
    (elsewhere / "raw.h5").write_text("no HDF5")
    for name in ("x", "link"):
        dataset = Dataset.from_hdf5(folder / "data.h5", name)
        assert (np.concatenate(list(dataset.batch(7))) == VALUES).all()
    touched(folder / "raw.h5")
    with pytest.raises(DataError, match=rf"{folder}/raw.h5 has changed"):
        list(dataset)


def test_mappings_of_nothing(tmp_path, capsys):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["raw"] = np.ones(10)
        for name, length in (("empty", 0), ("some", 4)):
            layout = h5py.VirtualLayout((length,), "f8")
            for source in (".", "never_there.h5"):
                layout[0:0] = h5py.VirtualSource(source, "raw", (10,), dtype="f8")[0:0]
            file.create_virtual_dataset(name, layout, fillvalue=-1)
        file.create_virtual_dataset("unmapped", h5py.VirtualLayout((3,), "f8"), fillvalue=-1)
    for name in ("some", "unmapped"):
        with h5py.File(tmp_path / "data.h5") as file:
            expected = file[name][()]
        got = np.concatenate(list(Dataset.from_hdf5(tmp_path / "data.h5", name).batch(2)))
        assert got.tolist() == expected.tolist()
    with pytest.raises(DataError, match="'empty' has length 0"):
        Dataset.from_hdf5(tmp_path / "data.h5", "empty").cardinality()
    assert main(["inspect", str(tmp_path / "data.h5")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("empty", "some", "unmapped", "raw"))


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("mpistrat.data.hdf5.linked_files._MAX_OPEN", 3)
    shape = (30, 2)
    with contextlib.ExitStack() as stack:
        for number in range(15):
            raw = stack.enter_context(h5py.File(tmp_path / f"raw-{number}.h5", "w"))
            raw["x"] = np.full((2, 2), number, "i4")
            file = stack.enter_context(h5py.File(tmp_path / f"part-{number}.h5", "w"))
            virtual(file, "x", f"raw-{number}.h5", shape=(2, 2))
    layout = h5py.VirtualLayout(shape, "i4")
    for number in range(15):
        source = h5py.VirtualSource(f"part-{number}.h5", "x", (2, 2), dtype="i4")
        layout[2 * number : 2 * number + 2] = source
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    got = np.concatenate(list(Dataset.from_hdf5(tmp_path / "data.h5", "x").batch(4)))
    assert got[:, 0].tolist() == np.repeat(np.arange(15), 2).tolist()
