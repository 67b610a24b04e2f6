"""Format versions 1 and 2, kept as files: each later version of mpistrat must read them.

``files/v1.h5``, ``files/v1_fixed_texts.h5`` and ``files/v2.h5`` were written once, by
`write_golden`: the first when texts in attributes had a variable length. They are never written
again: a change of the format gets its own number and file.
"""

import hashlib
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

import mpistrat as ms
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.cli import main
from tests.devices import array_equal

FILES = Path(__file__).parent / "files"
GOLDEN = FILES / "v1.h5"
NEWEST = FILES / "v2.h5"
GOLDENS = [GOLDEN, FILES / "v1_fixed_texts.h5", NEWEST]

KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3) / 8
HALF = np.float16([1.5, -2, np.inf])
WAVES = np.array([1 + 2j, -3j], np.complex64)
COUNT = 42
LOSS_TOTAL = 12.0
HISTORY = np.array([3.0, 2.0, 1.5])


class History:
    """An object with a state of arrays and of JSON values that JSON does not have."""

    def __init__(self):
        self.values, self.best = np.zeros(0), 0.0

    def state_dict(self):
        return {"values": self.values, "best": self.best, "text": "Zürich", "list": [None, True]}

    def load_state_dict(self, state):
        self.values, self.best = state["values"], state["best"]


def objects(strategy):
    """Return what the file holds, with other values than there."""
    with strategy.scope():
        kernel = ms.Variable(np.zeros_like(KERNEL), aggregation=ms.VariableAggregation.MEAN)
        variables = {
            "layers": [{"kernel": kernel}],
            "half": ms.Variable(np.zeros_like(HALF), trainable=False),
            "waves": ms.Variable(np.zeros_like(WAVES)),
            "flags": ms.Variable(np.zeros(2, bool)),
        }
        count = ms.Variable(np.int64(0), aggregation=ms.VariableAggregation.ONLY_FIRST_REPLICA)
        loss = ms.Variable(
            0.0,
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    return {
        "model": variables,
        "count": count,
        "loss": loss,
        "history": History(),
        "rng": np.random.default_rng(5),
    }


def write_golden(path):
    """How the file was written, on one rank."""
    found = objects(ms.OneDeviceStrategy("cpu"))
    found["model"]["layers"][0]["kernel"].assign(KERNEL)
    found["model"]["half"].assign(HALF)
    found["model"]["waves"].assign(WAVES)
    found["model"]["flags"].assign([True, False])
    found["count"].assign(COUNT)
    found["loss"].assign(LOSS_TOTAL)
    found["history"].values, found["history"].best = HISTORY, float("nan")
    found["rng"].random(10)
    manager = ms.CheckpointManager(ms.Checkpoint(**found), path.parent)
    shutil.move(manager.save(COUNT), path)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_a_golden_file_is_restored(strategy, size, golden):
    found = objects(strategy)
    ms.Checkpoint(**found).restore(golden).assert_consumed()
    assert array_equal(found["model"]["layers"][0]["kernel"].numpy(), KERNEL)
    assert array_equal(found["model"]["half"].numpy(), HALF)
    assert array_equal(found["model"]["waves"].numpy(), WAVES)
    assert found["model"]["flags"].numpy().tolist() == [True, False]
    assert found["count"].numpy() == COUNT
    assert found["loss"].numpy() == pytest.approx(LOSS_TOTAL)
    (own,) = strategy.experimental_local_results(strategy.run(found["loss"].value))
    assert float(own) == pytest.approx(LOSS_TOTAL / size)
    assert array_equal(found["history"].values, HISTORY)
    assert np.isnan(found["history"].best)
    expected = np.random.default_rng(5)
    expected.random(10)
    assert found["rng"].random() == expected.random()


def plain(value):
    """Return an attribute without the length that its texts have in the file."""
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value]
    return value.decode() if isinstance(value, bytes) else np.asarray(value).tolist()


def format_value(file):
    """Return all that a file says, but when, by whom and by which version it was written.

    Nor with which digests and version of the format.
    """
    nodes = {}

    def take(name, node):
        attributes = {key: plain(value) for key, value in node.attrs.items() if key != "writers"}
        attributes.pop("digest", None)
        if attributes.get("synchronization") == "AUTO":
            attributes["synchronization"] = "ON_WRITE"  # which older files call AUTO
        if isinstance(node, h5py.Dataset):
            values = node[()]
            kind = (node.dtype.str, node.shape, node.chunks)
            nodes[name] = (kind, hashlib.sha256(values).hexdigest(), attributes)
        else:
            nodes[name] = attributes

    file.visititems(take)
    changing = {"created", "format_version", "mpistrat_version", "digest"}
    root = {key: plain(value) for key, value in file.attrs.items() if key not in changing}
    assert changing < set(file.attrs)
    return nodes, root


def digests_of(file):
    found = {}
    file.visititems(lambda name, node: found.update({name: plain(node.attrs.get("digest", b""))}))
    return found


@pytest.mark.launches
def test_what_is_written_today_is_the_golden_file(tmp_path):
    write_golden(tmp_path / "new.h5")
    with h5py.File(tmp_path / "new.h5") as new, h5py.File(NEWEST) as newest:
        assert digests_of(new) == digests_of(newest)
        assert new.attrs["format_version"] == newest.attrs["format_version"] == 2
        for path in GOLDENS:
            with h5py.File(path) as golden:
                assert format_value(new) == format_value(golden)
    assert main(["diff", str(GOLDENS[0]), str(tmp_path / "new.h5")]) == 0


@pytest.mark.launches
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_a_golden_file_is_what_the_document_says(golden):
    with h5py.File(golden) as file:
        header = {key: plain(value) for key, value in file.attrs.items()}
        digest = header.pop("digest")
        text = json.dumps(header, sort_keys=True).encode()
        old, new = hashlib.sha256(text).hexdigest(), xxhash.xxh3_128_hexdigest(text)
        is_old = header["format_version"] == 1
        assert digest == (f"sha256:{old}" if is_old else f"xxh3-128:{new}")
        assert set(file) == {"variables", "state"}
        assert file["variables/loss"][()] == LOSS_TOTAL
        assert plain(file["variables/loss"].attrs["synchronization"]) == "ON_READ"
        assert file["variables/history/values"][()].tolist() == HISTORY.tolist()
        state = json.loads(file["state/history"][()])
        assert state["best"] == {"$float": "nan"}
        assert state["text"] == "Zürich"
        assert plain(file["state/history"].attrs["arrays"]) == ["values"]


RAMP = np.arange(2_500_000, dtype="<u4")
PAGES = [
    "d99178928f9a5460d98a04a884dec370",
    "dab5f525dbfd0cce08823533a75cb432",
    "81bdf976fd5ca3816bbd37140bcf0570",
]
WHOLE = "xxh3-128-4MiB:806c06942224ee5b24ae254a89bf3ec0"


@pytest.mark.launches
def test_a_large_array_has_the_digests_of_its_pages(tmp_path):
    path = tmp_path / "ramp.h5"
    ms.Checkpoint(state={"ramp": ms.Variable(RAMP)}, empty=ms.Variable(np.zeros(0))).write(path)
    with h5py.File(path) as file:
        assert plain(file["variables/state/ramp"].attrs["digest"]) == WHOLE
        pages = file["digests/state/ramp"]
        assert pages.dtype == np.uint8
        assert [bytes(row).hex() for row in pages[()]] == PAGES  # as xxhsum -H2 prints them
        assert set(file["digests"]) == {"state"}
        assert plain(file["variables/empty"].attrs["digest"]) == (
            f"xxh3-128:{xxhash.xxh3_128_hexdigest(b'')}"
        )


@pytest.mark.launches
@pytest.mark.parametrize("where", ["values", "digests"])
def test_damage_of_pages_is_found(tmp_path, where):
    path = tmp_path / "ramp.h5"
    ramp = ms.Variable(RAMP)
    checkpoint = ms.Checkpoint(ramp=ramp)
    checkpoint.write(path)
    data = bytearray(path.read_bytes())
    sought = RAMP[1_500_000:].tobytes() if where == "values" else bytes.fromhex(PAGES[1])
    data[data.index(sought) + 3] ^= 16
    path.write_bytes(data)
    ramp.assign(RAMP * 0)
    if where == "values":
        with pytest.raises(ms.errors.CheckpointCorruptError, match="damaged at ramp: the values"):
            checkpoint.restore(path)
        assert not ramp.numpy().any()
    else:  # the values are as they were, by the digest of the whole
        checkpoint.restore(path).assert_consumed()
        assert array_equal(ramp.numpy(), RAMP)
    with open_checkpoint(path) as reader, pytest.raises(ms.errors.CheckpointCorruptError):
        reader.verify()


@pytest.mark.launches
def test_digests_of_pages_are_there_where_they_must_be(tmp_path):
    path = tmp_path / "ramp.h5"
    checkpoint = ms.Checkpoint(ramp=ms.Variable(RAMP), one=ms.Variable(1.0))
    checkpoint.write(path)
    with h5py.File(path, "r+") as file:
        file["digests"].move("ramp", "one")
    with pytest.raises(
        ms.errors.CheckpointCorruptError, match="damaged at one: .* pages are extra"
    ):
        checkpoint.restore(path)
    with h5py.File(path, "r+") as file:
        del file["digests"]
    with pytest.raises(ms.errors.CheckpointCorruptError, match="at ramp: .* pages are missing"):
        checkpoint.restore(path)


DAMAGED = {
    "v1_flipped_value.h5": "damaged at model/layers/0/kernel: the values do not have the digest",
    "v1_flipped_state.h5": "damaged at history: the text does not have the digest",
    "v1_truncated.h5": "is truncated",
    "v1_other_step.h5": "the attributes of the root group: they do not have the digest",
}


def damage(folder):
    """How the damaged files were made."""
    good = GOLDEN.read_bytes()

    def flipped(at):
        return good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]

    contents = {
        "v1_flipped_value.h5": flipped(good.index(KERNEL.tobytes()) + 9),
        "v1_flipped_state.h5": flipped(good.index(b"rich")),
        "v1_truncated.h5": good[:-100],
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for name, attribute, value in (
        ("v1_other_step.h5", "step", COUNT + 1),
        ("v3.h5", "format_version", 3),
    ):
        shutil.copy(GOLDEN, folder / name)
        with h5py.File(folder / name, "r+", libver=("v110", "v110")) as file:
            file.attrs.modify(attribute, np.int64(value))


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_on_every_rank(strategy, name):
    found = objects(strategy)
    checkpoint = ms.Checkpoint(**found)
    with pytest.raises(ms.errors.CheckpointCorruptError) as caught:
        checkpoint.restore(FILES / name)
    assert DAMAGED[name] in str(caught.value)
    assert name in str(caught.value)
    assert not found["model"]["layers"][0]["kernel"].numpy().any()
    assert found["history"].best == 0


def test_a_newer_version_is_refused_and_named(strategy):
    found = objects(strategy)
    with pytest.raises(ms.errors.CheckpointError) as caught:
        ms.Checkpoint(**found).restore(FILES / "v3.h5")
    assert type(caught.value) is not ms.errors.CheckpointCorruptError
    assert "has format version 3, but this mpistrat reads versions 1 and 2" in str(caught.value)
    with open_checkpoint(GOLDEN) as reader:
        assert repr(reader.header.mpistrat_version) in str(caught.value)
    assert found["count"].numpy() == 0


@pytest.mark.launches
def test_the_commands_know_the_files(capsys, monkeypatch):
    for path in GOLDENS:
        assert main(["verify", str(path)]) == main(["inspect", str(path)]) == 0
    for path in GOLDENS[1:]:
        assert main(["diff", str(GOLDENS[0]), str(path)]) == 0
    assert main(["verify", str(FILES)]) == 1
    captured = capsys.readouterr()
    assert "v3.h5 has format version 3" in captured.err
    lines = captured.out.splitlines()
    verdicts = {Path(x.split(": ")[0]).name: x.split(": ")[1] for x in lines if ": DAMAGED" in x}
    assert verdicts == dict.fromkeys(DAMAGED, "DAMAGED")
    monkeypatch.chdir(FILES)
    assert main(["verify", ""]) == 2, "no name is not the folder that this runs in"
