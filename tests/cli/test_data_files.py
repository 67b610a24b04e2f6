"""``mpistrat inspect`` of files that are no checkpoints."""

import json
import math
import re
import shutil
import subprocess

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import sharding
from mpistrat.cli import main
from mpistrat.cli.data_files import advice


def inspect(path, capsys):
    """Return what the command prints for programs, after a look at what it prints for people."""
    assert main(["inspect", str(path)]) == 0
    people = capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert all(name in people for name in [*content["datasets"], *content["links"]])
    assert all(line in people for line in content["advice"])
    return content


def test_layout_chunks_filters_and_links(tmp_path, capsys):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        image = np.zeros((100, 16, 16), np.uint8)
        file.create_dataset("a/image", data=image, chunks=(32, 16, 16), compression="gzip")
        file.create_dataset("z", data=np.zeros((8, 2)), chunks=(4, 2), **hdf5plugin.Zstd(clevel=5))
        file["label"], file["words"], file["scalar"] = np.arange(100), ["a"], 3.0
        file["soft"], file["hard"] = h5py.SoftLink("/label"), file["label"]
        file["loop"], file["far"] = file["/"], h5py.ExternalLink("x.h5", "/y")
        file.attrs["title"] = "mine"
    content = inspect(path, capsys)
    assert content["attributes"] == ["title"]
    assert content["links"] == {
        "far": "link to /y of x.h5",
        "label": "another name of hard",
        "loop": "another name of /",
        "soft": "link to /label",
    }
    image = content["datasets"]["a/image"]
    expected = {
        "shape": [100, 16, 16],
        "dtype": "uint8",
        "layout": "chunked",
        "chunks": [32, 16, 16],
        "filters": ["gzip 4"],
        "num_chunks": 4,
        "chunk_bytes": 8192,
        "bytes": 25600,
        "is_field": True,
        "decoded_in_threads": True,
        "unreadable": "",
    }
    assert expected.items() <= image.items()
    assert 0 < image["stored_bytes"] < 1000
    assert content["datasets"]["z"]["filters"] == ["zstd 5"]
    assert content["datasets"]["hard"]["layout"] == "contiguous"
    assert content["datasets"]["words"]["dtype"] == "text of any length"
    assert content["advice"][0].startswith("scalar can be read as examples only with a * in")
    assert not any("cannot be read as examples" in line for line in content["advice"])


needs_h5repack = pytest.mark.skipif(shutil.which("h5repack") is None, reason="needs h5repack")


@pytest.fixture
def repack(capsys):
    """Return a function that runs the printed command, and returns the path of what it writes."""

    def run(path):
        command = inspect(path, capsys)["h5repack"]
        assert main(["inspect", str(path)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == command
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return path.with_name(f"{path.stem}-repacked.h5")

    return run


@needs_h5repack
@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((2000, 4), {"chunks": (1, 4)}, "reads 2000 chunks of 16 B"),
        ((300, 64, 64), {"chunks": (10, 8, 64)}, "is split over 8 chunks"),
        (
            (50, 1024, 1024),
            {"chunks": (25, 1024, 1024)},
            "mixes the rows of only 1 chunk at a time",
        ),
        ((200, 1024), {"chunks": (200, 1024)}, "would let more ranks share the work"),
        (
            (99, 8),
            {"chunks": (9, 8), "scaleoffset": 3, "dtype": "i4"},
            "decoded by HDF5 in one thread",
        ),
        ((2000,), {"chunks": (1,), **hdf5plugin.Zstd()}, "reads 2000 chunks of 4 B"),
    ],
)
def test_the_printed_command_mends_the_layout(tmp_path, capsys, repack, shape, options, expected):
    path = tmp_path / "my data.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("a/my x", shape, **{"dtype": "f4"} | options)
        data[: 2**20 // data[:1].nbytes] = 1
        file["a"].attrs["x"], file["a/link"] = data.ref, h5py.SoftLink("/a/my x")
    assert any(expected in line for line in inspect(path, capsys)["advice"])
    better = repack(path)
    content = inspect(better, capsys)
    assert content["h5repack"] is None
    assert all("each chunk is decoded about once" in line for line in content["advice"])
    with h5py.File(path) as old, h5py.File(better) as new:
        assert np.array_equal(old["a/my x"], new["a/my x"])
        assert new[new["a"].attrs["x"]] == new["a/link"]


@needs_h5repack
def test_fields_that_are_read_together_get_chunks_that_begin_together(tmp_path, capsys, repack):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        image = file.create_dataset("z/image", (7000, 3, 32, 32), "u1", chunks=(2500, 1, 4, 8))
        file.create_dataset("label", data=np.arange(7000), chunks=(1,), compression="gzip")
        file["hard"] = file["label"]
        file.create_dataset("z/label", data=np.arange(7000), chunks=(1,), compression="gzip")
        file["b"] = file["z"]
        file["z/whole"], image[5] = np.arange(7000), 3
    content = inspect(repack(path), capsys)
    assert content["h5repack"] is None
    chunks = {name: each["chunks"] for name, each in content["datasets"].items()}
    together = {"b/image": [85, 3, 32, 32], "b/label": [85 * 32], "b/whole": None}
    assert chunks == together | {"hard": [7000]}


@pytest.mark.parametrize(
    ("name", "options"),
    [("lzf", {"compression": "lzf"}), ("a,b", {}), ("n" * 256, {})],
)
def test_there_is_no_command_that_h5repack_would_fail_at(tmp_path, capsys, name, options):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("bad", (2000,), "f4", data=np.zeros(2000), chunks=(1,))
        file.create_dataset(name, (2000,), "i4", chunks=(2000,), **options)
    content = inspect(path, capsys)
    assert content["h5repack"] is None
    assert any(f"h5repack would fail for {name} or leave it" in each for each in content["advice"])
    with h5py.File(path, "a") as file:
        del file["bad"]
    assert not any("h5repack" in line for line in inspect(path, capsys)["advice"])


@st.composite
def described_fields(draw):
    """Return the description of fields of one length with chunks of any shape."""
    num_rows, fields = draw(st.integers(1, 10**7)), {}
    for number in range(draw(st.integers(1, 20))):
        shape = [num_rows, *draw(st.lists(st.integers(1, 3000), max_size=2))]
        chunks = draw(st.none() | st.tuples(*(st.integers(1, length) for length in shape)))
        fields[str(number)] = described(shape, chunks and list(chunks))
    return fields


def described(shape, chunks):
    row_bytes = 8 * math.prod(shape[1:])
    return {
        "shape": shape,
        "layout": "chunked" if chunks else "contiguous",
        "chunks": chunks,
        "filters": [],
        "num_chunks": math.prod(map(sharding.ceil_div, shape, chunks)) if chunks else 0,
        "chunk_bytes": 8 * math.prod(chunks) if chunks else 0,
        "rows_per_chunk": chunks[0] if chunks else 1,
        "row_bytes": row_bytes,
        "bytes": row_bytes * shape[0],
        "is_field": True,
        "decoded_in_threads": True,
        "unreadable": "",
    }


@settings(max_examples=50)
@given(described_fields())
def test_better_chunks_need_no_better_ones(fields):
    lines, command = advice("data.h5", fields)
    assert (command is None) == all("each chunk is decoded about once" in line for line in lines)
    for name, chunk in re.findall(r"-l (\d+):CHUNK=(\S+)", command or ""):
        shape = fields[name]["shape"]
        chunks = [int(length) for length in chunk.split("x")]
        assert chunks[1:] == shape[1:]
        assert 1 <= chunks[0] <= shape[0]
        fields[name] = described(shape, chunks)
    assert advice("data.h5", fields)[1] is None


def test_sound_chunks_get_no_warning(tmp_path, capsys):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((4000, 256), np.uint8), chunks=(64, 256))
        file.create_dataset("y", data=np.zeros(4000), chunks=(64,))
    (line,) = inspect(path, capsys)["advice"]
    assert line.startswith("x, y: good for up to 4 ranks when shuffled in batches of 256 (")


def test_what_cannot_be_read_here_is_named(tmp_path, capsys):
    layout = h5py.VirtualLayout((10,), "f8")
    layout[:] = h5py.VirtualSource("missing.h5", "x", (10,))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_virtual_dataset("joined", layout)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((5,))
        properties.set_filter(31_999, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((10,))
        h5py.h5d.create(file.id, b"odd", h5py.h5t.NATIVE_INT32, space, properties)
        file.create_dataset("outside", (4,), "f4", external=[("bytes.bin", 0, 16)])
    content = inspect(tmp_path / "data.h5", capsys)
    reasons = {name: each["unreadable"] for name, each in content["datasets"].items()}
    assert "needs the file missing.h5" in reasons["joined"]
    assert "filter 31999 is not installed" in reasons["odd"]
    assert "bytes.bin" in reasons["outside"]
    assert content["datasets"]["outside"]["layout"] == "external"
    assert sum("cannot be read here" in line for line in content["advice"]) == 3


def test_arguments_for_checkpoints_alone(tmp_path, capsys):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(3)
    assert main(["inspect", str(tmp_path / "data.h5"), "--stats"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    (tmp_path / "text.h5").write_text("no HDF5")
    assert main(["inspect", str(tmp_path / "text.h5")]) == 2
    assert "not an HDF5 file" in capsys.readouterr().err


def test_names_that_are_not_utf8(tmp_path, capsys):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        h5py.h5g.create(file.id, b"bad\xff")
        file[b"bad\xff/x"] = np.zeros(3)
    assert list(inspect(path, capsys)["datasets"]) == ["bad\\xff/x"]


def test_one_damaged_object_hides_no_other(tmp_path, capsys):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        for number in range(3):
            file[f"group_{number}/x"] = np.arange(5)
        file["y"] = np.arange(3)
    with h5py.File(path) as file:
        places = [h5py.h5o.get_info(file[name].id).addr for name in ("group_1", "group_2/x")]
    content = bytearray(path.read_bytes())
    for place in places:
        content[place : place + 16] = b"\xff" * 16
    path.write_bytes(content)
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["datasets"]) == ["group_0/x", "y"]
    assert list(found["damaged"]) == ["group_1", "group_2/x"]
    assert found["h5repack"] is None
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("group_0/x", "group_1", "group_2/x"))
