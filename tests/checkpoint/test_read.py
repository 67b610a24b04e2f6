"""The ranks of one node read a file together: each byte once, and one verdict for all."""

import itertools
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import async_save, raw_io, read

LARGE = 2**16
"""Elements of the variables that ranks share: 256 KiB of float32."""
NAMES = [f"weight{i}" for i in range(5)]


@pytest.fixture
def strategy():
    return ms.MPIStrategy(device="cpu")


@pytest.fixture
def blocks_read(monkeypatch):
    """Return the list of the files' bytes that this rank reads from now on."""
    found = []
    read_at = raw_io.read_at

    def spy(handle, offset, piece):
        found.append((offset, piece.nbytes))
        read_at(handle, offset, piece)

    for module in (read, raw_io):
        monkeypatch.setattr(module, "read_at", spy)
    return found


def make(strategy, number):
    with strategy.scope():
        variables = {
            name: ms.Variable(np.full(LARGE + i, number + i, np.float32), name=name)
            for i, name in enumerate(NAMES)
        }
        small = ms.Variable(np.full(3, number), name="small")
    return ms.Checkpoint(**variables, small=small, moved=np.random.default_rng(number)), variables


def holds(variables, number):
    return all(np.all(variables[name].numpy() == number + i) for i, name in enumerate(NAMES))


@pytest.mark.mpi
def test_every_byte_is_verified_by_one_rank_and_read_in_place_by_all(
    strategy, mpi_tmp_path, blocks_read, monkeypatch
):
    size = strategy.num_replicas_in_sync
    path = make(strategy, 1)[0].write(mpi_tmp_path / "run.h5")
    checkpoint, variables = make(strategy, 20)
    verified = []
    read_through = read.read_through

    def noting(handle, extent):
        verified.append((extent.offset, extent.num_bytes))
        return read_through(handle, extent)

    monkeypatch.setattr(read, "read_through", noting)
    memory = {name: variable._storage.ctypes.data for name, variable in variables.items()}
    checkpoint.restore(path).assert_consumed()
    assert holds(variables, 1)
    assert {name: each._storage.ctypes.data for name, each in variables.items()} == memory
    by_rank = strategy.extended._collectives.gather_json(verified)
    assert sum(map(bool, by_rank)) == min(size, len(NAMES))
    blocks = sorted(itertools.chain.from_iterable(by_rank))
    assert sum(num_bytes for _, num_bytes in blocks) == sum(
        variable._storage.nbytes for variable in variables.values()
    )
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(blocks))
    in_place = [tuple(each) for each in blocks]
    assert sorted(map(tuple, blocks_read)) == sorted(in_place + verified)


@pytest.mark.mpi
def test_a_rank_that_does_not_see_the_file_gets_its_values(
    strategy, mpi_tmp_path, blocks_read, monkeypatch
):
    collectives = strategy.extended._collectives
    rank, size = collectives.rank, collectives.size
    path = Path(make(strategy, 1)[0].write(mpi_tmp_path / "run.h5"))
    other = mpi_tmp_path / f"of-rank-{rank}"
    other.mkdir()
    if rank:
        if rank % 2:
            (other / "run.h5").write_bytes(path.read_bytes())  # another file of that name
        monkeypatch.chdir(other)
    else:
        monkeypatch.chdir(mpi_tmp_path)
    checkpoint, variables = make(strategy, 20)
    checkpoint.restore("run.h5").assert_consumed()
    assert holds(variables, 1)
    by_rank = collectives.gather_json(len(blocks_read))
    assert by_rank == [by_rank[0]] + [0] * (size - 1)
    assert by_rank[0] > 0


@pytest.mark.mpi
@pytest.mark.parametrize("damage", ["flips", "ends"])
def test_damage_that_several_ranks_find_is_one_error(strategy, mpi_tmp_path, monkeypatch, damage):
    rank = strategy.extended._collectives.rank
    path = Path(make(strategy, 1)[0].write(mpi_tmp_path / "run.h5"))
    checkpoint, variables = make(strategy, 20)
    numbers = (1, 2, 4)
    if damage == "flips":
        if rank == 0:
            data = bytearray(path.read_bytes())
            for i in numbers:
                values = np.full(LARGE + i, 1 + i, np.float32).tobytes()
                data[data.find(values) + 5 * LARGE // 2] ^= 1
            path.write_bytes(data)
        reason = "digest"
    else:  # after HDF5 has looked at the file
        reason = "ends at byte"
        first = {np.float32(1 + i).tobytes() * 9: i for i in numbers}
        data = path.read_bytes()
        begins = {data.find(values): i for values, i in first.items()}
        read_at = read.read_at

        def cut(handle, offset, piece):
            if any(begin <= offset < begin + 4 * LARGE for begin in begins):
                offset += 2**40
            read_at(handle, offset, piece)

        for module in (raw_io, read):
            monkeypatch.setattr(module, "read_at", cut)
    strategy.extended._collectives.gather_json(None)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ms.errors.CheckpointCorruptError) as caught:
        checkpoint.restore(path)
    found = re.findall(rf"damaged at (\w+): [^\n]*{reason}", str(caught.value))
    assert found == [NAMES[i] for i in numbers]
    assert holds(variables, 20)
    assert len(os.listdir("/proc/self/fd")) == open_before
    monkeypatch.undo()
    checkpoint.write(path)
    checkpoint.restore(path).assert_consumed()


@pytest.mark.mpi
def test_a_file_is_brought_into_memory_in_order_until_the_body_ends(
    mpi_tmp_path, monkeypatch, rank
):
    monkeypatch.setattr(raw_io, "_BYTES_AHEAD", 4 * raw_io._BYTES_AT_ONCE)
    path = mpi_tmp_path / f"file-{rank}"
    path.write_bytes(bytes(10 * raw_io._BYTES_AT_ONCE + 3))
    asked = []
    has_come = threading.Event()

    def note(handle, offset):
        asked.append(offset)
        if len(asked) == 3:
            has_come.set()
        return False

    monkeypatch.setattr(raw_io, "_is_in_memory", note)
    with raw_io.reading_ahead(str(path)):
        assert has_come.wait(60)
    assert asked == [0, raw_io._BYTES_AHEAD, 2 * raw_io._BYTES_AHEAD]
    with raw_io.reading_ahead(str(mpi_tmp_path / "missing")):
        pass


@pytest.mark.mpi
@pytest.mark.parametrize("cores", [1, 3])
def test_copies_that_threads_help_with_are_complete(monkeypatch, cores):
    monkeypatch.setattr(async_save, "num_cores", lambda: cores)
    rng = np.random.default_rng(0)
    sources = [rng.random(size) for size in (0, 1, 1000, 100_000, 300_001, 65_536)]
    sources += [rng.random((300, 400)).T, np.float32(3) * np.ones(()), rng.random(90_000) > 0.5]
    for _ in range(20):
        copies = async_save.SharedCopies()
        targets = [np.zeros(each.shape, each.dtype) for each in sources]
        for target, source in zip(targets, sources, strict=True):
            copies.begin(target, source)
        copies.finish()
        assert all(map(np.array_equal, targets, sources))
