"""Checkpoints of sharded variables: one data set each, which any number of parts can take."""

import json
import os
import shutil

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.digests import PAGE_BYTES
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.cli import main
from mpistrat.errors import CheckpointCorruptError, CheckpointError
from mpistrat.partitioners import FixedShardsPartitioner
from mpistrat.testing import launch
from mpistrat.variables.placement import BYTES_PER_PIECE
from tests.devices import array_equal
from tests.helpers import as_bytes

LARGE = (BYTES_PER_PIECE // 64 + 1013, 32)
"""More than one piece, and no whole number of pages, as float32."""
SHAPES = {"small": (7, 3), "large": LARGE}


def rows_from(partition_shape, partition_offset):
    size = partition_shape[1]
    first = partition_offset[0] * size
    numbers = np.arange(first, first + partition_shape[0] * size, dtype=np.float32)
    return numbers.reshape(partition_shape)


def zeros(partition_shape, partition_offset):
    return np.zeros(partition_shape, np.float32)


@pytest.fixture
def owners(strategy):
    """Strategies that cut variables into 1, 2, 3 and as many parts as there are ranks."""
    cutting = [
        ms.MPIStrategy(variable_partitioner=FixedShardsPartitioner(parts)) for parts in (2, 3, 1000)
    ]
    yield [strategy, *cutting]
    for each in cutting:
        each.close()


def make(owner, shape, initial=rows_from):
    with owner.scope():
        table = ms.Variable(initial, shape=shape, dtype=np.float32, name="table")
        sgd = ms.optimizers.SGD(1.0, momentum=0.5)
    return table, sgd, ms.Checkpoint(table=table, sgd=sgd)


def step(table, sgd):
    row = ms.IndexedSlices(np.ones((1, table.shape[1]), np.float32), [table.shape[0] - 1])
    sgd.apply_gradients([(row, table)])


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        pytest.param(SHAPES["small"], False, id="small-serial"),
        pytest.param(SHAPES["small"], True, id="small-parallel"),
        pytest.param(LARGE, False, id="large-serial", marks=pytest.mark.thorough),
        pytest.param(LARGE, True, id="large-parallel"),
    ],
)
def test_any_number_of_parts_writes_and_reads_the_same_file(
    owners, shared_tmp_path, rank, shape, parallel
):
    whole = rows_from(shape, (0, 0))
    whole[-1] -= 1  # by the step
    path = shared_tmp_path / "run.h5"
    for writer in owners:
        table, sgd, checkpoint = make(writer, shape)
        step(table, sgd)
        checkpoint.write(path, parallel=parallel)
        if rank == 0:
            with h5py.File(path) as file:
                assert array_equal(file["variables/table"][()], whole)
                slot = file["variables/sgd/momentum/table"]
                assert slot.shape == shape
                assert slot[-1].tolist() == [1.0] * shape[1]
                assert not slot[:-1].any()
            with open_checkpoint(str(path)) as reader:
                reader.verify()
        for reading in owners:
            other, restored, target = make(reading, shape, zeros)
            target.restore(path).assert_consumed()
            own = other.row_range
            assert array_equal(other.part, whole[own.start : own.stop])
            last = restored.slot(other, "momentum").lookup([shape[0] - 1])
            assert last.tolist() == [[1.0] * shape[1]]
            assert restored.iterations.numpy() == 1


def test_the_program_goes_on_as_if_nothing_had_been_cut(owners, shared_tmp_path, rank):
    found = []
    for first, second in ((owners[0], owners[0]), (owners[1], owners[-1])):
        table, sgd, checkpoint = make(first, (9, 2))
        for _ in range(2):
            first.run(lambda t=table, o=sgd: step(t, o))
        path = checkpoint.write(shared_tmp_path / "go.h5")
        table, sgd, checkpoint = make(second, (9, 2), zeros)
        checkpoint.restore(path).assert_consumed()
        second.run(lambda t=table, o=sgd: step(t, o))
        found.append((as_bytes(table), as_bytes(sgd.slot(table, "momentum"))))
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [0.1, 0.9])
def test_damage_changes_no_row(owners, shared_tmp_path, strategy, rank, place):
    table, _, checkpoint = make(owners[-1], LARGE)
    path = shared_tmp_path / "damaged.h5"
    checkpoint.write(path, parallel=True)
    if rank == 0:
        with h5py.File(path) as file:
            dataset = file["variables/table"]
            offset = dataset.id.get_offset() + int(place * dataset.nbytes)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(b"\xff\x00\xff")
    strategy.barrier()
    other, _, target = make(owners[-1], LARGE, zeros)
    with pytest.raises(CheckpointCorruptError, match="table"):
        target.restore(path)
    assert not other.part.any()
    assert array_equal(table.part, rows_from(LARGE, (0, 0))[table.row_range])


PAGES = (3 * PAGE_BYTES // 16 + 1, 4)
"""Three pages of float32, and 16 bytes of a fourth."""


@pytest.mark.parametrize("damaged", [[0], [2, 3], [0, 2, 3]], ids=str)
def test_verify_names_the_pages_that_are_damaged(owners, shared_tmp_path, strategy, rank, damaged):
    _, _, checkpoint = make(owners[-1], PAGES)
    path = shared_tmp_path / "pages.h5"
    checkpoint.write(path, parallel=True)
    if rank == 0:
        with h5py.File(path) as file:
            offset = file["variables/table"].id.get_offset()
            assert file["digests/table"].shape == (4, 16)
        with open(path, "r+b") as file:
            for page in damaged:
                file.seek(offset + page * PAGE_BYTES + 5)
                file.write(b"\xff\x00\xff")
        numbers = {1: "0", 2: "2-3", 3: "0, 2-3"}[len(damaged)]
        found = f"at table: {numbers} of 4 pages"
        with open_checkpoint(path) as reader, pytest.raises(CheckpointCorruptError, match=found):
            reader.verify()
    strategy.barrier()


def test_files_are_the_same_however_they_are_written(
    owners, shared_tmp_path, strategy, rank, capsys
):
    names = []
    for number, owner in enumerate(owners):
        _, _, checkpoint = make(owner, PAGES)
        for parallel in (False, True):
            names.append(str(shared_tmp_path / f"{number}-{parallel}.h5"))
            checkpoint.write(names[-1], parallel=parallel)
    strategy.barrier()
    if rank == 0:
        inspected = []
        for name in names:
            assert main(["diff", names[0], name]) == 0
            assert main(["verify", name]) == 0
            capsys.readouterr()
            assert main(["inspect", "--json", name]) == 0
            inspected.append(json.loads(capsys.readouterr().out)["variables"])
        assert inspected[0]["table"]["digest"].startswith("xxh3-128-4MiB:")
        assert all(each == inspected[0] for each in inspected)
    strategy.barrier()


@pytest.mark.parametrize("parallel", [False, True], ids=["serial", "parallel"])
def test_a_full_disk_leaves_what_was_there(owners, shared_tmp_path, monkeypatch, rank, parallel):
    table, _, checkpoint = make(owners[-1], LARGE)
    path = shared_tmp_path / "full.h5"
    checkpoint.write(path, parallel=parallel)
    before = path.read_bytes()
    table.assign(np.zeros(LARGE, np.float32), read_value=False)
    calls, num_good = [], 0 if parallel else 3  # one rank writes its rows at once
    pwrite = os.pwrite

    def full(handle, data, offset):
        calls.append(offset)
        if len(calls) > num_good:
            raise OSError(28, "No space left on device")
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.write(path, parallel=parallel)
    monkeypatch.undo()
    owners[0].barrier()  # rank 0 has removed what it began
    assert path.read_bytes() == before
    assert [each for each in os.listdir(shared_tmp_path) if each != "full.h5"] == []
    checkpoint.write(path, parallel=parallel)
    shutil.copy(path, shared_tmp_path / f"copy{rank}.h5")


def test_a_disk_that_is_full_for_one_rank_alone(owners, shared_tmp_path, monkeypatch, rank, size):
    table, _, checkpoint = make(owners[-1], PAGES)
    path = shared_tmp_path / "full.h5"
    checkpoint.write(path, parallel=True)
    before = path.read_bytes()
    table.assign(np.zeros(PAGES, np.float32), read_value=False)
    calls, pwrite = [], os.pwrite

    def full(handle, data, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return pwrite(handle, data[: len(data) // 2], offset)  # and the disk is full then

    if rank == size - 1:
        monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.write(path, parallel=True)
    monkeypatch.undo()
    owners[0].barrier()  # rank 0 has removed what it began
    assert path.read_bytes() == before
    assert os.listdir(shared_tmp_path) == ["full.h5"]
    checkpoint.write(path, parallel=True)


MEMORY = """
import resource, sys
import numpy as np
import mpistrat as ms

strategy = ms.MPIStrategy(variable_partitioner=ms.partitioners.FixedShardsPartitioner(9))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def ones(partition_shape, partition_offset):
    return np.ones(partition_shape, np.float32)

def checkpoint(num_rows):
    with strategy.scope():
        table = ms.Variable(ones, shape=(num_rows, 64), dtype="f4", name="table")
    return ms.Checkpoint(table=table)

large = checkpoint(1 << 19)  # 128 MiB, of which half lies here
for parallel in (False, True):
    checkpoint(1 << 15).write("small.h5", parallel=parallel)  # loads code
    before = peak()
    large.write("large.h5", parallel=parallel)
    large.restore("large.h5").assert_consumed()
    grown = strategy.gather_objects(peak() - before)
    if strategy.rank == 0:
        print(parallel, *grown)
"""


@pytest.mark.launches
def test_no_rank_needs_memory_for_the_whole(tmp_path):
    done = launch.run(["-c", MEMORY], 2, 60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for line in done.stdout.splitlines():
        parallel, *grown = line.split()
        assert parallel in ("False", "True")
        assert all(int(each) < 24 << 20 for each in grown), done.stdout
