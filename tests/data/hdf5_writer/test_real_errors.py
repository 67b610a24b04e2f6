"""Full disks, limits of the file size, and folders without permission, in jobs of several ranks."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PROGRAM = """
import os, resource, sys
from pathlib import Path
import h5py
import numpy as np
import mpistrat as ms

folder, mode, how = sys.argv[1:]
folder, rows = Path(folder), 50
path, ballast = folder / "out.h5", folder / "ballast"
strategy = ms.MPIStrategy()
rank, size = strategy.rank, strategy.size
if how == "limit":  # EFBIG, because Python ignores SIGXFSZ
    resource.setrlimit(resource.RLIMIT_FSIZE, (34 * 2**20, resource.RLIM_INFINITY))
    rows = 1000

def become_nobody():
    # root may write everywhere. Python itself may be in a folder of root, so import all before.
    with ms.data.HDF5Writer("first.h5", strategy=strategy) as out:
        out.append(values(0))
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)

def noise(step, shape):
    return np.random.default_rng(step).random(shape)

def values(step):
    whole, plain = noise(step, (rows, 300)), np.arange(rows * 40.0).reshape(rows, 40) + step
    own = slice(*np.array([rank, rank + 1]) * rows // size)
    return {"random": whole[own], "plain": plain[own], "time": step / 2}

def check(steps, file=path):
    if rank == 0:
        with h5py.File(file, "r") as file:
            assert len(file["time"]) == file.attrs["mpistrat_steps"] == steps, steps
            assert (file["time"][:] == np.arange(steps) / 2).all()
            for step in range(steps):
                for name in ("random", "plain"):
                    found = file[name][step * rows : (step + 1) * rows]
                    whole = noise(step, (rows, 300)) if name == "random" else (
                        np.arange(rows * 40.0).reshape(rows, 40) + step)
                    assert (found == whole).all(), (name, step)
            assert len(file["random"]) == len(file["plain"]) == rows * steps
    strategy.barrier()

def make_room():
    strategy.barrier()
    if rank == 0:
        ballast.unlink()
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    strategy.barrier()

def fail(action):
    try:
        action()
    except OSError as error:
        assert str(path) in str(error), error
        return error
    return None

def append_until_it_fails(out):
    for step in range(out.steps, 5000):
        if fail(lambda: out.append(values(step))):
            return step
    raise AssertionError("the disk was not full")

if mode == "a":
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.create_dataset("random", (None, 300), "f8", compression="gzip", shuffle=True)
        out.create_dataset("plain", (None, 40), "f8", chunks=(70, 40))
        steps = append_until_it_fails(out)
        assert out.steps == steps
        check(steps)
        for _ in range(4):
            if fail(lambda: out.append(values(steps))) is None:
                steps += 1
            assert out.steps == steps
            check(steps)
        fail(out.flush)
        check(steps)
        make_room()
        for step in range(steps, steps + 3):
            out.append(values(step))
    check(steps + 3)
    with ms.data.HDF5Writer(path, "a", strategy=strategy) as out:
        out.append(values(steps + 3))
    check(steps + 4)
elif mode == "append":
    before = path.read_bytes()
    strategy.barrier()
    out = ms.data.HDF5Writer(path, strategy=strategy)
    append_until_it_fails(out)
    assert fail(out.close)
    strategy.barrier()
    assert sorted(os.listdir(folder)) == ["ballast", "out.h5"], os.listdir(folder)
    assert path.read_bytes() == before
    make_room()
    with ms.data.HDF5Writer(path, strategy=strategy) as out:
        for step in range(2):
            out.append(values(step))
    check(2)
elif mode == "write":
    before = path.read_bytes()
    strategy.barrier()
    def write(fraction, options):
        with ms.data.HDF5Writer(path, strategy=strategy) as out:
            out.create_dataset("x", (400_000,), "f8", **options)
            numbers = np.random.default_rng(0).permutation(400_000)[: int(400_000 * fraction)]
            for some in np.array_split(numbers, 5):
                own = np.array_split(some, size)[rank]
                out.write({"x": own / 2}, at=own)
    for options in ({}, {"chunks": (1000,)}, {"chunks": (100_000,), "shuffle": True}):
        assert fail(lambda: write(1, options))
        strategy.barrier()
        assert sorted(os.listdir(folder)) == ["ballast", "out.h5"], os.listdir(folder)
        assert path.read_bytes() == before
        strategy.barrier()
elif mode == "denied":
    become_nobody()
    before = os.listdir(folder)
    strategy.barrier()
    for mode in ("a", "w"):
        for name in (path, folder / "new.h5", folder / "missing" / "new.h5"):
            try:
                ms.data.HDF5Writer(name, mode, strategy=strategy)
            except OSError as error:
                assert str(name) in str(error), error
            else:
                raise AssertionError(f"{name} was written")
    assert os.listdir(folder) == before
elif mode == "file":
    become_nobody()
    fail(lambda: ms.data.HDF5Writer(path, "a", strategy=strategy)) or 1 / 0
    assert os.listdir(folder) == ["out.h5"]
print("done")
"""


@pytest.fixture
def small_disk(request, tmp_path):
    """Return a folder of a file system of 3 MB, or skip."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("Only root can mount a file system.")
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder]
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("mkfs.ext4 is not installed.")
        image.write_bytes(b"")
        os.truncate(image, 4 * 2**20)
        options = ["-q", "-m", "0", "-O", "^has_journal", image]
        subprocess.run(["mkfs.ext4", *options], check=True)
        command = ["mount", "-o", "loop", image, folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("A container without the right to mount.")
    yield folder
    subprocess.run(["umount", folder], check=True)


def run(tmp_path, folder, ranks, *arguments):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = launch.Launched([script, folder, *arguments], ranks, cwd=tmp_path).finish(100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks


def prepare(folder, ballast_bytes=2**20):
    (folder / "ballast").write_bytes(os.urandom(ballast_bytes))
    (folder / "out.h5").write_bytes(b"old")


CASES = [
    ("tmpfs", 1, "a"),
    ("tmpfs", 2, "a"),
    ("tmpfs", 2, "append"),
    ("tmpfs", 2, "write"),
    ("ext4", 2, "a"),
]


@pytest.mark.parametrize(("small_disk", "ranks", "mode"), CASES, indirect=["small_disk"])
def test_a_full_disk(tmp_path, small_disk, ranks, mode):
    shutil.rmtree(small_disk / "lost+found", ignore_errors=True)
    prepare(small_disk)
    if mode == "a":
        (small_disk / "out.h5").unlink()
    run(tmp_path, small_disk, ranks, mode, "disk")


@pytest.mark.parametrize("mode", ["a", "append"])
def test_a_limit_of_the_file_size(tmp_path, mode):
    folder = tmp_path / "limited"
    folder.mkdir()
    prepare(folder)
    if mode == "a":
        (folder / "out.h5").unlink()
    run(tmp_path, folder, 2, mode, "limit")


@pytest.fixture
def open_folder():
    """Return a folder that other users can enter, which those of pytest forbid."""
    if os.geteuid():
        pytest.skip("Only root can become a different user.")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("mode", ["denied", "file"])
def test_a_folder_or_file_without_permission(tmp_path, open_folder, mode):
    path = open_folder / "out.h5"
    with h5py.File(path, "w") as file:
        file["x"] = 1
    content = path.read_bytes()
    if mode == "file":
        open_folder.chmod(0o777)
        path.chmod(0o644)
    else:
        path.chmod(0o666)
    run(tmp_path, open_folder, 2, mode, "nobody")
    assert path.read_bytes() == content


DYING = """
import os, signal, sys
import numpy as np
import mpistrat as ms
from mpistrat.data.hdf5_writer import chunk_store, direct_rows, root_file, session

path, mode, victim, where, limit = sys.argv[1:]
strategy = ms.MPIStrategy()
rank, size = strategy.rank, strategy.size
owners = {
    "exchange": [(session.Mover, "finish"), (session.Session, "write_ahead")],
    "chunks": [(chunk_store, "write_all"), (direct_rows, "write_all")],
    "headers": [(root_file, "write_all")],
    "commit": [(root_file.RootFile, "_write_root")],
}

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with ms.data.HDF5Writer(path, mode, strategy=strategy) as out:
    out.create_dataset("rows", (None, 1), "f8", chunks=(50, 1))
    first = out.steps
    for step in range(first, int(limit)):
        if where != "no" and rank == int(victim) and step == first + 3:
            for owner in owners[where]:
                setattr(*owner, die)
        rows = np.arange(90.0).reshape(90, 1) + step
        out.append({"rows": np.array_split(rows, size)[rank], "step": step})
print("done")
"""


@pytest.mark.parametrize(
    ("mode", "victim", "where"),
    [
        ("a", 1, "exchange"),
        ("a", 0, "chunks"),
        ("a", 1, "chunks"),
        ("a", 0, "headers"),
        ("a", 0, "commit"),
        ("w", 1, "exchange"),
    ],
)
def test_a_rank_that_dies_inside_append(tmp_path, mode, victim, where):
    script, folder = tmp_path / "program.py", tmp_path / "out"
    script.write_text(DYING)
    folder.mkdir()
    path = folder / "out.h5"
    if mode == "w":
        path.write_bytes(b"old")
    done = launch.Launched([script, path, mode, str(victim), where, "9"], 2).finish(60)
    assert done.returncode
    assert "done" not in done.stdout
    if mode == "a":
        assert_steps(path, 3)
    else:
        assert path.read_bytes() == b"old"
    # The lock is free, and what the killed job has left is removed or written over.
    done = launch.Launched([script, path, mode, "-1", "no", "5"], 3).finish(60)
    assert done.stdout.count("done") == 3, done.stderr
    assert_steps(path, 5)
    assert os.listdir(folder) == ["out.h5"]


def assert_steps(path, steps):
    with h5py.File(path, "r") as file:
        numbers = np.arange(steps)
        assert file.attrs["mpistrat_steps"] == steps
        assert np.array_equal(file["step"], numbers)
        expected = np.arange(90.0) + numbers[:, None]
        assert np.array_equal(file["rows"], expected.reshape(-1, 1))
