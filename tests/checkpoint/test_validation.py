"""Damaged and hostile files: never wrong values, never an error without the path."""

import h5py
import numpy as np
import pytest

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.checkpoint.writer import create_checkpoint, state_item, variable_item
from mpistrat.errors import CheckpointCorruptError, CheckpointError

KERNEL = np.arange(1000, dtype=np.float32)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.h5"
    with create_checkpoint(path, Header(step=1)) as writer:
        writer.add(variable_item("model/kernel", KERNEL, aggregation="MEAN"))
        writer.add(variable_item("model/bias", KERNEL[:3]))
        writer.add(variable_item("data/mean", KERNEL[:2]))
        writer.add(state_item("data", {"pass": 2}, ["mean"]))
    return path


def read(path):
    with open_checkpoint(path) as reader:
        reader.verify()
        values = {("variables", name): reader.read_variable(name) for name in reader.variables}
        return values | {("state", name): reader.read_state(name) for name in reader.state_paths}


def change(path, edit):
    with h5py.File(path, "r+") as opened:
        edit(opened)


KERNEL_PATH = "variables/model/kernel"


def attribute(opened, name, texts):
    """Give the kernel an attribute with one text, or with several, of a fixed length."""
    values = np.array(texts, "S")
    opened[KERNEL_PATH].attrs.create(name, values, dtype=h5py.string_dtype("utf-8", 450))


def flip(path, marker):
    data = bytearray(path.read_bytes())
    at = data.find(marker)
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_and_named(file):
    flip(file, KERNEL[500:510].tobytes())
    with pytest.raises(CheckpointCorruptError, match=r"damaged at model/kernel: .*digest"):
        read(file)


def test_all_damage_is_named_at_once(file):
    flip(file, KERNEL[500:510].tobytes())
    flip(file, b'{"pass": 2}')
    with pytest.raises(CheckpointCorruptError) as caught:
        read(file)
    assert "damaged at model/kernel" in str(caught.value)
    assert "damaged at data" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 100, 3000])
def test_a_truncated_file_is_named(file, length):
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointCorruptError, match=r"run\.h5"):
        read(file)


def test_random_flips_never_give_wrong_values(file, tmp_path):
    good = read(file)
    data = file.read_bytes()
    random = np.random.default_rng(0)
    damaged = tmp_path / "damaged.h5"
    for position in random.integers(0, len(data), 150):
        flipped = bytearray(data)
        flipped[position] ^= 1 << int(random.integers(8))
        damaged.write_bytes(flipped)
        try:
            found = read(damaged)
        except CheckpointError:
            continue
        else:
            assert found.keys() == good.keys()
            assert all(np.array_equal(found[key], good[key]) for key in good)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda f: f["variables/model/kernel"].attrs.pop("digest"), "attribute digest"),
        (lambda f: f["variables/model/kernel"].attrs.pop("trainable"), "attribute trainable"),
        (
            lambda f: f["variables/model/kernel"].attrs.modify("aggregation", "SUN"),
            "attribute aggregation is 'SUN'",
        ),
        (lambda f: f.pop("state"), "no group state"),
        (lambda f: f.pop("variables"), "no group variables"),
        (lambda f: f.attrs.pop("created"), "created"),
        (lambda f: f.attrs.create("step", "three"), "step"),
        (lambda f: f.attrs.modify("step", 2), "do not have the digest"),
        (lambda f: f.attrs.modify("mpi_library", "another"), "do not have the digest"),
        (lambda f: f.attrs.modify("digest", "xxh3-128:0"), "do not have the digest"),
        (lambda f: f.attrs.pop("digest") and f.attrs.modify("step", -2), "step is -2"),
        (lambda f: f.attrs.modify("num_replicas", 0), "num_replicas is 0"),
        (lambda f: f.attrs.modify("mpistrat_version", ""), "mpistrat_version"),
        (lambda f: f.attrs.modify("created", "yesterday"), "yesterday"),
        (lambda f: f.attrs.modify("created", "2030-01-02T03:04:05"), "without a time zone"),
        (lambda f: f.create_dataset("extra", data=1.0), "extra does not belong"),
        (lambda f: f.create_group("extra"), "extra does not belong"),
        (lambda f: f["variables/data"].pop("mean"), "damaged at data: the array data/mean is miss"),
        (
            lambda f: f["variables"].move("model/bias", "data/bias"),
            "the array data/bias is too many",
        ),
        (lambda f: f["variables"].create_dataset("bare", data=1.0), "damaged at bare"),
        (lambda f: attribute(f, "digest", f"sha256:{0:064}"), "attribute digest is 'sha256:0"),
        (lambda f: attribute(f, "aggregation", ["MEAN", "SUM"]), "aggregation is 'None'"),
        (lambda f: attribute(f, "aggregation", ["MEAN"] + 400 * [""]), "aggregation is 'None'"),
        (lambda f: attribute(f, "aggregation", "MEAN" + 400 * "x"), "aggregation is 'MEANxxx"),
        (lambda f: attribute(f, "aggregation", ""), "aggregation is ''"),
        (lambda f: f[KERNEL_PATH].attrs.create("aggregation", h5py.Empty("S9")), "is 'None'"),
        (lambda f: f[KERNEL_PATH].attrs.create("aggregation", "é"), "aggregation is 'é'"),
        (lambda f: f[KERNEL_PATH].attrs.create("aggregation", 1), "aggregation is '1'"),
        (lambda f: f[KERNEL_PATH].attrs.create("trainable", np.int8(1)), "trainable is 1"),
        (lambda f: f[KERNEL_PATH].attrs.create("trainable", 2 * [True]), "trainable is None"),
        (lambda f: f[KERNEL_PATH].attrs.create("trainable", h5py.Empty("?")), "trainable is None"),
        (lambda f: f[KERNEL_PATH].attrs.create("trainable", "yes"), "trainable is 'yes'"),
        (lambda f: f["variables"].create_dataset("text", data="x"), "damaged at text"),
        (lambda f: f["state"].create_dataset("number", data=1.0), "damaged at number"),
        (lambda f: f["state"].pop("data") or f["state"].create_group("data"), ""),
    ],
)
def test_what_does_not_belong_there_is_named(file, edit, words):
    change(file, edit)
    if not words:  # an empty group is no damage
        assert ("state", "data") not in read(file)
        return
    with pytest.raises(CheckpointCorruptError, match=words):
        read(file)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda f, o: f["variables"].update({"x": h5py.SoftLink("/state/data")}), "is a link"),
        (lambda f, o: f["variables"].update({"x": h5py.ExternalLink(o, "x")}), "is a link"),
        (lambda f, o: f["variables"].update({"x": f["variables/model/kernel"]}), "second name"),
        (lambda f, o: f["variables/model"].update({"x": f["variables"]}), "second name"),
        (lambda f, o: f["variables"].update({"x": np.dtype("f4")}), "neither a group"),
        (
            lambda f, o: f["variables"].create_dataset(
                "x", shape=(4,), dtype="f4", external=[(o, 0, 16)]
            ),
            "damaged at x",
        ),
        (
            lambda f, o: f["variables"].create_dataset(
                "x", shape=(2**40,), dtype="f8", chunks=(1024,)
            ),
            "more than the file",
        ),
    ],
)
def test_tricks_are_refused(file, tmp_path, edit, words):
    other = tmp_path / "other"
    other.write_bytes(bytes(64))
    with h5py.File(file, "r+") as opened:
        edit(opened, str(other))
        if "x" in opened["variables"] and words not in ("is a link", "neither a group"):
            node = opened["variables/x"]
            for name, value in {
                "synchronization": "AUTO",
                "aggregation": "NONE",
                "trainable": True,
                "digest": f"xxh3-128:{0:032}",
            }.items():
                node.attrs[name] = value
    with pytest.raises(CheckpointCorruptError, match=words):
        read(file)


def test_a_virtual_dataset_is_refused(file, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = KERNEL
    layout = h5py.VirtualLayout(KERNEL.shape, "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", KERNEL.shape)
    with h5py.File(file, "r+", libver="latest") as opened:
        attributes = dict(opened["variables/model/kernel"].attrs)
        del opened["variables/model/kernel"]
        opened["variables/model"].create_virtual_dataset("kernel", layout)
        opened["variables/model/kernel"].attrs.update(attributes)
    with pytest.raises(CheckpointCorruptError, match="other files"):
        read(file)


def test_another_format_is_no_damage(tmp_path, file):
    with pytest.raises(CheckpointError, match="There is no file") as caught:
        read(tmp_path / "absent.h5")
    assert type(caught.value) is CheckpointError
    with pytest.raises(CheckpointError, match="is a folder"):
        read(tmp_path)
    with h5py.File(tmp_path / "data.h5", "w") as other:
        other["image"] = KERNEL
    with pytest.raises(CheckpointError, match="no checkpoint of mpistrat") as caught:
        read(tmp_path / "data.h5")
    assert type(caught.value) is CheckpointError
    for version in (1, 3):
        change(file, lambda f, version=version: f.attrs.modify("format_version", version))
        words = rf"format version {version}, .* reads only version 2\. Install the mpistrat that"
        with pytest.raises(CheckpointError, match=words) as caught:
            read(file)
        assert type(caught.value) is CheckpointError
