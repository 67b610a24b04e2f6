"""Format version 2, kept as a file: each later version of mpistrat must read it.

``files/v2.h5`` was written once, by `write_golden`. It is never written again: a change of the
format gets its own number and file. No version 1 was ever released, and nothing reads it.
"""

import json
import os
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
GOLDEN = FILES / "v2.h5"

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


def filled_objects(strategy):
    """Return what the file holds."""
    found = objects(strategy)
    found["model"]["layers"][0]["kernel"].assign(KERNEL)
    found["model"]["half"].assign(HALF)
    found["model"]["waves"].assign(WAVES)
    found["model"]["flags"].assign([True, False])
    found["count"].assign(COUNT)
    found["loss"].assign(LOSS_TOTAL)
    found["history"].values, found["history"].best = HISTORY, float("nan")
    found["rng"].random(10)
    return found


def write_golden(path):
    """How the file was written, on one rank."""
    found = filled_objects(ms.OneDeviceStrategy("cpu"))
    manager = ms.CheckpointManager(ms.Checkpoint(**found), path.parent)
    shutil.move(manager.save(COUNT), path)


def copy_with_varying_lengths(path):
    """Copy the file, with texts of variable length in attributes, as h5py writes them."""
    shutil.copy(GOLDEN, path)
    with h5py.File(path, "r+") as file:
        nodes = [file]
        file.visititems(lambda _, node: nodes.append(node))
        for node in nodes:
            for name, value in node.attrs.items():
                if np.asarray(value).dtype.kind == "S":
                    texts = np.asarray(plain(value), object)
                    node.attrs.create(name, texts, dtype=h5py.string_dtype())


@pytest.mark.mpi
@pytest.mark.parametrize("lengths", ["fixed", "varying"])
def test_the_golden_file_is_restored(strategy, rank, size, mpi_tmp_path, lengths):
    path = GOLDEN if lengths == "fixed" else mpi_tmp_path / "varying.h5"
    if lengths == "varying" and rank == 0:
        copy_with_varying_lengths(path)
    strategy.barrier()
    found = objects(strategy)
    ms.Checkpoint(**found).restore(path).assert_consumed()
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
    """Return all that a file says, but when and by which version of mpistrat it was written."""
    nodes = {}

    def take(name, node):
        attributes = {key: plain(value) for key, value in node.attrs.items()}
        if isinstance(node, h5py.Dataset):
            values = np.asarray(node[()]).tobytes()
            nodes[name] = (node.dtype.str, node.shape, node.chunks), values, attributes
        else:
            nodes[name] = attributes

    file.visititems(take)
    changing = {"created", "mpistrat_version", "digest"}
    root = {key: plain(value) for key, value in file.attrs.items() if key not in changing}
    assert changing < set(file.attrs)
    return nodes, root


@pytest.mark.launches
def test_what_is_written_today_is_the_golden_file(tmp_path):
    write_golden(tmp_path / "new.h5")
    with h5py.File(tmp_path / "new.h5") as new, h5py.File(GOLDEN) as golden:
        assert format_value(new) == format_value(golden)
    assert main(["diff", str(GOLDEN), str(tmp_path / "new.h5")]) == 0


@pytest.mark.launches
def test_the_golden_file_is_what_the_document_says():
    with h5py.File(GOLDEN) as file:
        assert file.attrs["format_version"] == 2
        header = {key: plain(value) for key, value in file.attrs.items()}
        digest = header.pop("digest")
        text = json.dumps(header, sort_keys=True).encode()
        assert digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(text)}"
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


def flip(path, marker):
    """Change one bit of the bytes `marker` in a file."""
    data = bytearray(path.read_bytes())
    data[data.index(marker) + len(marker) // 2] ^= 1
    path.write_bytes(data)


def change(path, attribute, value):
    """Change an attribute of the root group."""
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        file.attrs.modify(attribute, np.int64(value))


DAMAGE = {
    "flipped_value": (
        lambda path: flip(path, KERNEL.tobytes()),
        "damaged at model/layers/0/kernel: the values do not have the digest",
    ),
    "flipped_state": (
        lambda path: flip(path, b"rich"),
        "damaged at history: the text does not have the digest",
    ),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 100), "is truncated"),
    "other_step": (
        lambda path: change(path, "step", COUNT + 1),
        "the attributes of the root group: they do not have the digest",
    ),
}
OTHER_VERSIONS = [1, 3]
REFUSED = "has format version {}, but this mpistrat reads only version 2"


@pytest.mark.mpi
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_on_every_rank(strategy, rank, mpi_tmp_path, name):
    path, (damage, words) = mpi_tmp_path / f"{name}.h5", DAMAGE[name]
    ms.Checkpoint(**filled_objects(strategy)).write(path)
    if rank == 0:
        damage(path)
    strategy.barrier()
    found = objects(strategy)
    with pytest.raises(ms.errors.CheckpointCorruptError) as caught:
        ms.Checkpoint(**found).restore(path)
    assert words in str(caught.value)
    assert path.name in str(caught.value)
    assert not found["model"]["layers"][0]["kernel"].numpy().any()
    assert found["history"].best == 0


@pytest.mark.mpi
@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_another_version_is_refused_and_named(strategy, rank, mpi_tmp_path, version):
    saved = ms.CheckpointManager(ms.Checkpoint(**filled_objects(strategy)), mpi_tmp_path)
    first, second = Path(saved.save(1)), Path(saved.save(2))

    def give_version(path):
        if rank == 0:
            change(path, "format_version", version)
        strategy.barrier()

    give_version(second)
    found = objects(strategy)
    checkpoint = ms.Checkpoint(**found)
    manager = ms.CheckpointManager(checkpoint, mpi_tmp_path)
    with pytest.raises(ms.errors.CheckpointError) as caught:
        checkpoint.restore(second)
    assert type(caught.value) is not ms.errors.CheckpointCorruptError
    assert f"{second} {REFUSED.format(version)}" in str(caught.value)
    assert f"Install the mpistrat that wrote the file ({ms.__version__!r})." in str(caught.value)
    assert found["count"].numpy() == 0

    with strategy.scope():  # a manager passes over such a file
        assert ms.latest_checkpoint(mpi_tmp_path) == str(first)
    assert manager.restore_or_initialize() == str(first)
    assert found["count"].numpy() == COUNT
    give_version(first)
    with pytest.raises(ms.errors.CheckpointError, match=REFUSED.format(version)):
        manager.restore_or_initialize()


@pytest.mark.launches
def test_the_commands_know_the_files(tmp_path, capsys, monkeypatch):
    assert main(["verify", str(GOLDEN)]) == main(["inspect", str(GOLDEN)]) == 0
    varying = tmp_path / "varying.h5"
    copy_with_varying_lengths(varying)
    assert main(["verify", str(varying)]) == main(["inspect", str(varying)]) == 0
    assert main(["diff", str(GOLDEN), str(varying)]) == 0
    assert main(["verify", str(FILES)]) == 0
    capsys.readouterr()

    write_golden(tmp_path / "good.h5")
    for name, (damage, _) in DAMAGE.items():
        path = tmp_path / f"{name}.h5"
        shutil.copy(tmp_path / "good.h5", path)
        damage(path)
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    verdicts = {Path(x.split(": ")[0]).stem: x.split(": ")[1] for x in lines if ": DAMAGED" in x}
    assert verdicts == dict.fromkeys(DAMAGE, "DAMAGED")
    monkeypatch.chdir(FILES)
    assert main(["verify", ""]) == 2, "no name is not the folder that this runs in"
