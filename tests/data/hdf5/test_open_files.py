"""Files that change, vanish, are locked or too many, and processes that fork."""

import errno
import fcntl
import multiprocessing
import os
import re
import resource
import shutil
import threading

import h5py
import numpy as np
import pytest

from mpistrat import hdf5
from mpistrat.data import Dataset
from mpistrat.data.hdf5 import open_files
from mpistrat.errors import DataError


def replaced(path):
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)


def appended(path):
    with path.open("ab") as file:
        file.write(b"more")


def touched(path):
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (replaced, "data.h5 has changed since"),
        (appended, "data.h5 has changed since"),
        (touched, "data.h5 has changed since"),
        (os.unlink, "data.h5 was removed after the dataset"),
    ],
)
def test_a_file_that_changes_is_noticed(numbered, monkeypatch, happens, message, cache_bytes):
    path = numbered(1000, chunk=10, compression="gzip")
    dataset = Dataset.from_hdf5(path, "image").batch(10)
    monkeypatch.setattr(open_files, "_CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", cache_bytes)
    # As little as possible is read ahead.
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._MIN_CAPACITY_BYTES", 0)
    iterator = iter(dataset)
    next(iterator)
    happens(path)
    with pytest.raises(DataError, match=message):
        list(iterator)
    with pytest.raises(DataError, match=message):
        next(iter(dataset))


@pytest.mark.parametrize("field", ["linked", "virtual", "external"])
def test_a_change_of_another_file_with_the_data_is_noticed(numbered, tmp_path, monkeypatch, field):
    other = numbered(1000, name="other.h5")
    raw = tmp_path / "raw"
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["linked"] = h5py.ExternalLink("other.h5", "label")
        layout = h5py.VirtualLayout((1000,), "i8")
        layout[:] = h5py.VirtualSource("other.h5", "label", (1000,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", data=np.arange(1000), external=[(raw, 0, 8000)])
    dataset = Dataset.from_hdf5(tmp_path / "data.h5", field).batch(10)
    monkeypatch.setattr(open_files, "_CHECK_INTERVAL_S", 0.0)
    assert sum(batch.sum() for batch in dataset) == 499500
    changed = raw if field == "external" else other
    touched(changed)
    with pytest.raises(DataError, match=f"{changed} has changed since"):
        list(dataset)
    changed.unlink()
    with pytest.raises(DataError, match=f"{changed} was removed after the dataset"):
        list(dataset)


def test_files_that_are_being_written(numbered, tmp_path):
    locked = numbered(10)
    handle = os.open(locked, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(DataError, match=r"open for writing in another program.*Wait until"):
        Dataset.from_hdf5(locked).cardinality()
    os.close(handle)
    assert Dataset.from_hdf5(locked).cardinality() == 10

    with h5py.File(tmp_path / "live.h5", "w", libver="latest") as file:
        file.create_dataset("x", (5,), "f4", maxshape=(None,), chunks=(5,))
        file.swmr_mode = True
        file.flush()
        shutil.copy(tmp_path / "live.h5", tmp_path / "left.h5")
    with pytest.raises(DataError, match="being written, or its writer has died.*h5clear -s"):
        Dataset.from_hdf5(tmp_path / "left.h5").cardinality()


def test_a_file_system_that_cannot_lock(numbered, monkeypatch):
    path = numbered(10)

    def refuse(*args, **options):
        raise OSError(errno.ENOLCK, "Unable to open file (unable to lock file, errno = 37)")

    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(DataError, match="No locks available.*HDF5_USE_FILE_LOCKING=FALSE"):
        Dataset.from_hdf5(path).cardinality()


@pytest.mark.usefixtures("streamed")
def test_more_files_than_may_be_open(numbered, tmp_path):
    for number in range(40):
        numbered(4, chunk=2, name=f"part{number:02}.h5", first=4 * number)
    dataset = Dataset.from_hdf5(str(tmp_path / "part*.h5"), "label").shuffle(0).batch(16)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    assert dataset.cardinality() == 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 10, hard))
    try:
        assert hdf5.max_open_files() == in_use + 10
        labels = np.concatenate(list(dataset))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(labels) == list(range(160))


def threads_of_readers():
    return [each for each in threading.enumerate() if each.name.startswith("mpistrat-decode")]


@pytest.mark.usefixtures("streamed")
def test_no_thread_outlives_its_iterator(numbered):
    iterator = iter(
        Dataset.from_hdf5(numbered(10_000, chunk=2000, compression="gzip")).shuffle(0).batch(10)
    )
    next(iterator)
    assert threads_of_readers()
    iterator.close()
    assert not threads_of_readers()


def in_child(dataset, iterator, answers):
    try:
        next(iterator)
    except DataError as error:
        answers.put(str(error))
    answers.put([len(batch["label"]) for batch in dataset])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_a_forked_process_reads_with_an_iterator_of_its_own(numbered, monkeypatch, cache_bytes):
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", cache_bytes)
    path = numbered(10_000, chunk=2000, compression="gzip")
    dataset = Dataset.from_hdf5(path).shuffle(0).batch(1000)
    iterator = iter(dataset)
    next(iterator)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=in_child, args=(dataset, iterator, answers))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "begun in process" in answers.get()
    assert answers.get() == [1000] * 10
    assert len(list(iterator)) == 9  # the fork has not disturbed this one


def test_links_in_a_circle_and_into_nothing(tmp_path):
    path = tmp_path / "data.h5"
    (tmp_path / "text.h5").write_text("no HDF5")
    with h5py.File(path, "w") as file:
        file["x"], file["g/0/x"] = np.arange(5), np.arange(3)
        file["g/0/up"], file["g/0/self"] = file["g"], file["g/0"]
        file["circle"], file["a"], file["b"] = map(h5py.SoftLink, ("/circle", "/b", "/a"))
        file["out"] = h5py.ExternalLink("data.h5", "/out")
        file["text"] = h5py.ExternalLink("text.h5", "/x")
    with pytest.warns(UserWarning, match="'a', 'b', 'circle', 'out', 'text' of .*cannot be read"):
        assert list(Dataset.from_hdf5(path).element_spec) == ["x"]
    assert Dataset.from_hdf5(path, "g/*/up/*/up/0/x").cardinality() == 1
    for name in ("circle", "a", "circle/x", "a/*/x", "out", "text/x"):
        with pytest.raises(DataError, match=rf"The field '{re.escape(name)}'.*data\.h5"):
            Dataset.from_hdf5(path, name).cardinality()


@pytest.mark.parametrize("signature", [b"HEAP", b"TREE", b"SNOD"])
def test_damage_where_hdf5_keeps_names_is_an_error_that_names_the_file(tmp_path, signature):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        for number in range(5):
            file[f"g/{number}/x"] = np.arange(3)
    content = path.read_bytes()
    place = content.rindex(signature)  # of the group that was made last
    path.write_bytes(content[:place] + b"DEAD" + content[place + 4 :])
    for field in ("g/*/x", "g/*/x/y", "g/4/x"):
        with pytest.raises(DataError, match=r"data\.h5"):
            Dataset.from_hdf5(path, field).cardinality()


@pytest.fixture
def opened(monkeypatch):
    """Return a list that grows with the path of each file that h5py opens."""
    paths = []
    begin = h5py.File.__init__

    def noting(self, name, *args, **kwargs):
        if isinstance(name, str | bytes | os.PathLike):
            paths.append(os.fspath(name))
        begin(self, name, *args, **kwargs)

    monkeypatch.setattr(h5py.File, "__init__", noting)
    return paths


def many_files(folder, count, **options):
    for number in range(count):
        with h5py.File(folder / f"part-{number:03}.h5", "w") as file:
            data = np.full((6, 5), number) + np.arange(6)[:, None] / 10
            file.create_dataset("x", data=data, **options)
    return str(folder / "part-*.h5")


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (1, 5), "compression": "gzip"},
        {"chunks": (1, 2), "compression": "gzip", "shuffle": True},
        {"chunks": (2, 5)},
        {"chunks": (2, 2), "compression": "lzf", "fletcher32": True},
        {},
    ],
    ids=str,
)
def test_a_shuffled_pass_opens_each_of_many_files_about_once(tmp_path, opened, options):
    pattern = many_files(tmp_path, 100, **options)
    opened.clear()
    dataset = Dataset.from_hdf5(pattern, "x").shuffle(0)
    assert dataset.cardinality() == 600
    assert len(opened) == 100
    for number in range(2):
        opened.clear()
        rows = np.concatenate(list(dataset.batch(7)))
        assert sorted((rows[:, 0] * 10).round().astype(int).tolist()) == sorted(
            10 * n + k for n in range(100) for k in range(6)
        )
        assert len(opened) <= 200, number


def test_the_number_of_open_files_follows_the_limit_of_the_process(tmp_path, monkeypatch, opened):
    # Chunks that do not hold whole rows are read by HDF5.
    pattern = many_files(tmp_path, 40, chunks=(1, 2), compression="gzip")
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    most = []
    for limit in (20, 1000):
        monkeypatch.setattr(open_files.hdf5, "max_open_files", lambda limit=limit: limit)
        opened.clear()
        dataset = Dataset.from_hdf5(pattern, "x").shuffle(0)
        before, seen = open_files._num_open.total, 0
        for _ in dataset.batch(4):
            seen = max(seen, open_files._num_open.total - before)
        most.append((seen, len(opened)))
        assert open_files._num_open.total == before
    (few, with_few), (many, with_many) = most
    assert few == 10
    assert many == 40
    assert with_many == 80 < with_few


def test_two_readers_share_the_limit(tmp_path, monkeypatch):
    pattern = many_files(tmp_path, 30, chunks=(1, 2), compression="gzip")
    monkeypatch.setattr("mpistrat.data.hdf5.chunk_cache._ROW_CACHE_BYTES", 0)
    monkeypatch.setattr(open_files.hdf5, "max_open_files", lambda: 16)
    data = Dataset.from_hdf5(pattern, "x")
    pairs = Dataset.zip((data.shuffle(0), data.shuffle(1)))
    before, seen = open_files._num_open.total, 0
    for _ in pairs.batch(4):
        seen = max(seen, open_files._num_open.total)
    assert seen <= 9
    assert open_files._num_open.total == before
