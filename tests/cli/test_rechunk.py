"""``mpistrat rechunk``: everything in a file is kept but for the chunks."""

import re
import resource

import h5py
import hdf5plugin
import numpy as np
import pytest

from mpistrat.cli import main
from mpistrat.data import Dataset, rechunk_rows

NUM_ROWS = 700
RANDOM = np.random.default_rng(0)


def write_everything(path):
    """Write a file with every kind of object that people keep in one."""
    with h5py.File(path, "w") as file:
        image = RANDOM.integers(0, 255, (NUM_ROWS, 16, 8), np.uint8)
        file.create_dataset("image", data=image, chunks=(64, 8, 8), compression="gzip")
        file.create_dataset("label", data=np.arange(NUM_ROWS), chunks=(1,), maxshape=(None,))
        big_endian = np.arange(NUM_ROWS, dtype=">f4")
        file.create_dataset("big", data=big_endian, chunks=(300,), shuffle=True, fletcher32=True)
        file.create_dataset("lzf", data=image, chunks=(50, 16, 8), compression="lzf")
        file.create_dataset("zstd", data=image, chunks=(50, 16, 8), **hdf5plugin.Zstd())
        file.create_dataset("blosc", data=image / 7, chunks=(50, 16, 8), **hdf5plugin.Blosc())
        file.create_dataset("packed", data=image, chunks=(50, 16, 8), scaleoffset=8)
        sparse = file.create_dataset("sparse", (NUM_ROWS, 4), "f4", fillvalue=7, chunks=(10, 4))
        sparse[5] = 1
        pair = np.dtype([("a", "f4"), ("b", "i8")], align=True)
        file["group/inner/pairs"] = np.array([(n / 3, n) for n in range(NUM_ROWS)], pair)
        file["flag"] = np.arange(NUM_ROWS) % 3 == 0
        file["text"] = np.array([b"abc", b"d"] * (NUM_ROWS // 2))
        colour = h5py.enum_dtype({"RED": 0, "BLUE": 1}, basetype="i1")
        file.create_dataset("colour", data=np.arange(NUM_ROWS) % 2, dtype=colour)
        file["words"], file["scalar"], file["null"] = ["ä", "bc"], 3.0, h5py.Empty("i4")
        file["none"], file["narrow"] = np.zeros((0, 3)), np.zeros((3, 0))
        file["kind"] = np.dtype("f4")
        file.create_dataset("of_kind", data=np.arange(7), dtype=file["kind"])
        write_references(file)


def write_references(file):
    file["hard"], file["group/up"] = file["image"], file["/"]
    file["group/soft"] = h5py.SoftLink("/label")
    file["outside"] = h5py.ExternalLink("other.h5", "/x")
    file["dangling"] = h5py.SoftLink("/nowhere")
    file["row"] = np.arange(float(NUM_ROWS))
    file["row"].make_scale("number of the row")
    file["image"].dims[0].attach_scale(file["row"])
    file["image"].attrs["labels"] = file["label"].ref
    file["references"] = np.array([file["image"].ref, file["group"].ref], h5py.ref_dtype)
    file.attrs["title"], file.attrs["sizes"] = "für alle", np.arange(3)
    file.attrs["empty"], file.attrs["fixed"] = h5py.Empty("f4"), np.bytes_(b"x")
    file.attrs["names"] = np.array(["a", "bb"], h5py.string_dtype())
    file["group/inner"].attrs["unit"] = "m"


def names_in(file):
    names = ["/"]
    file.visit_links(names.append)
    return sorted(names)


def check_same(old, new):
    assert names_in(old) == names_in(new)
    for name in names_in(old):
        link = old.get(name, getlink=True) if name != "/" else None
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            assert vars(new.get(name, getlink=True)) == vars(link)
            continue
        check_same_object(old[name], new[name])
    assert new["hard"] == new["image"]
    assert new["group/up"] == new["/"]
    assert new[new["image"].attrs["labels"]] == new["label"]
    assert [new[each].name for each in new["references"]] == ["/hard", "/group"]
    assert new["image"].dims[0][0] == new["row"]


def check_same_object(old, new):
    assert set(old.attrs) == set(new.attrs)
    for key in set(old.attrs) - {"DIMENSION_LIST", "REFERENCE_LIST", "labels"}:
        assert old.attrs.get_id(key).get_type().equal(new.attrs.get_id(key).get_type())
        if not isinstance(old.attrs[key], h5py.Empty):
            assert np.array_equal(old.attrs[key], new.attrs[key])
    if not isinstance(old, h5py.Dataset):
        return
    assert (old.shape, old.maxshape, old.dtype) == (new.shape, new.maxshape, new.dtype)
    assert old.id.get_type().equal(new.id.get_type()) or old.id.get_type().committed()
    if old.shape is not None and old.name != "/references":
        assert np.array_equal(old[()], new[()])
        assert old.dtype.hasobject or np.array_equal(old.fillvalue, new.fillvalue)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    path = tmp_path_factory.mktemp("rechunk") / "in.h5"
    write_everything(path)
    return path


@pytest.mark.parametrize("compression", ["keep", "none", "gzip", "lzf", "zstd", "lz4", "blosc"])
def test_everything_is_kept(everything, tmp_path, capsys, monkeypatch, compression):
    monkeypatch.setattr(rechunk_rows, "_UNIT_BYTES", 2**14)  # several units under way
    target = tmp_path / "out.h5"
    arguments = ["--chunk-bytes", "8KiB", "--compression", compression, "--threads", "3"]
    assert main(["rechunk", str(everything), str(target), *arguments]) == 0
    assert "14 data set(s)" in capsys.readouterr().out
    with h5py.File(everything) as old, h5py.File(target) as new:
        check_same(old, new)
        assert new["blosc"].chunks == (8, 16, 8)
        assert new["image"].chunks == (32, 16, 8)
        assert new["label"].chunks == (512,)
        expected = {"none": None, "gzip": "gzip", "lzf": "lzf"}
        if compression == "keep":
            assert [new[name].compression for name in ("image", "lzf")] == ["gzip", "lzf"]
            assert new["big"].fletcher32
            assert new["packed"].scaleoffset is not None
        elif compression in expected:
            assert new["flag"].compression == expected[compression]
    assert list(tmp_path.iterdir()) == [target]


def test_a_shuffled_pass_has_the_same_examples(everything, tmp_path):
    target = tmp_path / "out.h5"
    assert main(["rechunk", str(everything), str(target), "--compression", "zstd"]) == 0
    for path in (everything, target):
        order = [
            (int(label), image.tobytes())
            for image, label in Dataset.from_hdf5(path, ("image", "label")).shuffle(0)
        ]
        with h5py.File(everything) as file:
            expected = [(n, image.tobytes()) for n, image in enumerate(file["image"][()])]
        assert sorted(order) == expected


def test_a_huge_row_is_cut(tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["volume"] = np.arange(3 * 40 * 50 * 8.0).reshape(3, 40, 50, 8)
    paths = [str(tmp_path / "in.h5"), str(tmp_path / "out.h5")]
    assert main(["rechunk", *paths, "--chunk-bytes", "6400", "--compression", "lz4"]) == 0
    with h5py.File(paths[0]) as old, h5py.File(paths[1]) as new:
        assert new["volume"].chunks == (1, 2, 50, 8)
        assert np.array_equal(old["volume"], new["volume"])


def test_arguments_that_cannot_be_used(everything, tmp_path, capsys):
    there = tmp_path / "there.h5"
    there.write_text("mine")
    cases = [
        ([everything, there], "there.h5 exists"),
        ([tmp_path / "gone.h5", tmp_path / "x.h5"], "no file .*gone"),
        ([everything, tmp_path / "x.h5", "--chunk-bytes", "3X"], "256KiB"),
        ([everything, tmp_path / "x.h5", "--chunk-bytes", "0"], "1 B to"),
        ([everything, tmp_path / "x.h5", "--threads", "0"], "at least 1"),
        ([everything, tmp_path / "x.h5", "--compression", "lzf", "--level", "3"], "no levels"),
    ]
    for arguments, message in cases:
        assert main(["rechunk", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.search(message, captured.err)
    assert list(tmp_path.iterdir()) == [there]
    assert there.read_text() == "mine"
    assert main(["rechunk", str(everything), str(there), "--overwrite"]) == 0
    with h5py.File(there) as file:
        assert len(file["image"]) == NUM_ROWS


def test_what_fails_leaves_the_target_as_it_was(everything, tmp_path, capsys, monkeypatch):
    target = tmp_path / "out.h5"
    target.write_text("before")
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(everything.read_bytes())
    with h5py.File(damaged) as file:
        chunk = file["big"].id.get_chunk_info(1)
    content = bytearray(damaged.read_bytes())
    content[chunk.byte_offset + 5] ^= 0xFF
    damaged.write_bytes(content)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((10,), "f8")
        layout[:] = h5py.VirtualSource("missing.h5", "x", (10,))
        file.create_virtual_dataset("x", layout)
    (tmp_path / "text.h5").write_text("no HDF5")
    for name, message in (
        ("damaged.h5", "damaged.h5: /big cannot be copied"),
        ("virtual.h5", "needs the file missing.h5"),
        ("text.h5", "text.h5 is not an HDF5 file"),
    ):
        assert main(["rechunk", str(tmp_path / name), str(target), "--overwrite"]) == 1
        assert message in capsys.readouterr().err
        assert target.read_text() == "before"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # as where a disk is full
    try:
        assert main(["rechunk", str(everything), str(target), "--overwrite"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    words = "cannot be written anew: File too large"
    assert f"{words}. {target} is as it was.\n" in capsys.readouterr().err
    assert target.read_text() == "before"
    checksums = iter(range(10**6))
    monkeypatch.setattr(rechunk_rows, "_checksum", lambda rows: next(checksums))
    assert main(["rechunk", str(everything), str(target), "--overwrite"]) == 1
    assert "are not what was written" in capsys.readouterr().err
    assert target.read_text() == "before"
    names = {"out.h5", "damaged.h5", "virtual.h5", "text.h5"}
    assert {path.name for path in tmp_path.iterdir()} == names
