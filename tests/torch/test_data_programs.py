"""HDF5Dataset in whole programs: other numbers of ranks, worker processes, no process group."""

import itertools
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

pytest.importorskip("torch")

from mpistrat.sharding import slice_of_rank
from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PROGRAM = Path(__file__).parent / "programs" / "data_positions.py"
BATCHES = "ms.data.Dataset.range(8).batch(4)"
START = "import mpistrat as ms, mpistrat.torch as mst, torch.utils.data as data\n"


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def shown(action, path, folder, ranks):
    """Return the global batches that the program has printed part by part."""
    result = launch.run([PROGRAM, action, path, folder], ranks)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    for parts in lines:
        whole = joined(parts)
        assert parts == [whole[slice_of_rank(len(whole), ranks, rank)] for rank in range(ranks)]
    return [joined(parts) for parts in lines]


def test_a_position_is_valid_at_another_number_of_ranks(tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("label", data=np.arange(43), chunks=(5,))
    read = shown("read", path, tmp_path, 2)
    assert len(read) == 2 + 5
    resumed = shown("resume", path, tmp_path, 3)
    assert len(resumed) == 3 + 5
    # The pass from which two batches were read, without them.
    first, rest, following = read[:2], resumed[:3], resumed[3:]
    assert sorted(joined(first + rest)) == list(range(43))
    assert following == read[2:]
    assert shown("resume", path, tmp_path, 1) == resumed


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_are_refused(tmp_path, method):
    program = tmp_path / "workers.py"
    program.write_text(
        f"{START}"
        "if __name__ == '__main__':\n"
        "    mst.init()\n"
        f"    dataset = mst.HDF5Dataset({BATCHES})\n"
        f"    loader = data.DataLoader(dataset, None, num_workers=1, "
        f"multiprocessing_context={method!r})\n"
        "    try:\n"
        "        list(loader)\n"
        "    except (TypeError, ValueError) as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    result = launch.run([program], 1)
    assert result.returncode == 0, result.stderr
    assert "num_workers must be 0: mpistrat reads in threads" in result.stdout


def test_a_process_alone_needs_no_group():
    result = launch.run(["-c", f"{START}print(*mst.HDF5Dataset({BATCHES}))"])
    assert result.returncode == 0, result.stderr
    assert result.stdout == "tensor([0, 1, 2, 3]) tensor([4, 5, 6, 7])\n"


def test_one_of_several_processes_needs_a_group():
    """Each would read everything, and no gradient would show it."""
    result = launch.run(["-c", f"{START}mst.HDF5Dataset({BATCHES})"], 2)
    assert result.returncode != 0
    words = "Call mpistrat.torch.init() or torch.distributed.init_process_group(...) first."
    assert words in result.stderr


def test_an_error_of_one_rank_ends_the_job_with_its_words(tmp_path):
    program = tmp_path / "bad_example.py"
    program.write_text(
        f"{START}"
        "import torch.distributed as dist\n"
        "mst.init()\n"
        "def checked(x):\n"
        "    if dist.get_rank() == 1 and x[0] > 2:\n"
        "        raise ValueError('a bad example')\n"
        "    return x\n"
        f"for x in data.DataLoader(mst.HDF5Dataset({BATCHES}.map(checked)), batch_size=None):\n"
        "    dist.all_reduce(x)\n"
    )
    result = launch.run([program], 2)
    assert result.returncode != 0
    assert "rank 1 of 2 failed at bad_example.py:6" in result.stderr
    assert "ValueError: a bad example" in result.stderr
