"""``mpistrat inspect`` of files that are no checkpoints."""

import json

import h5py
import hdf5plugin
import numpy as np
import pytest

from mpistrat.cli import main


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
    assert content["advice"][0].startswith("scalar, words cannot be read as examples")


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((2000, 4), {"chunks": (1, 4)}, "reads 2000 chunks of 16 B"),
        ((300, 64, 64), {"chunks": (10, 8, 64)}, "lies in 8 chunks"),
        ((50, 1024, 1024), {"chunks": (25, 1024, 1024)}, "mixes the rows of 1 at a time"),
        ((200, 1024), {"chunks": (200, 1024)}, "would let more ranks share the work"),
        ((99, 8), {"chunks": (9, 8), "scaleoffset": 3, "dtype": "i4"}, "decoded by HDF5 itself"),
    ],
)
def test_bad_chunks_get_advice(tmp_path, capsys, shape, options, expected):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", shape, **{"dtype": "f4"} | options)
        if data.nbytes < 2**20:
            data[...] = 1
    advice = inspect(path, capsys)["advice"]
    assert any(expected in line and line.endswith("rechunk.") for line in advice)
    assert advice[-1].startswith("mpistrat rechunk IN OUT")
    if data_is_small(shape):
        target = tmp_path / "better.h5"
        arguments = [str(path), str(target), "--chunk-bytes", "4K", "--compression", "gzip"]
        assert main(["rechunk", *arguments]) == 0
        capsys.readouterr()
        assert not any(expected in line for line in inspect(target, capsys)["advice"])


def data_is_small(shape):
    return np.prod(shape) < 2 * 10**5


def test_sound_chunks_get_no_warning(tmp_path, capsys):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((4000, 256), np.uint8), chunks=(64, 256))
        file.create_dataset("y", data=np.zeros(4000), chunks=(64,))
    (line,) = inspect(path, capsys)["advice"]
    assert line.startswith("Shuffled in batches of 256, x, y can be read by up to 4 rank(s)")


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
    assert "no checkpoint" in capsys.readouterr().err
    (tmp_path / "text.h5").write_text("no HDF5")
    assert main(["inspect", str(tmp_path / "text.h5")]) == 1
    assert "not an HDF5 file" in capsys.readouterr().err
