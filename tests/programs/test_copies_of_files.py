"""Ranks that read their own copies of HDF5 files: equal ones, and ones that are out of date."""

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours

pytestmark = pytest.mark.launches

PROGRAM = """
import h5py
os.makedirs(f"node{rank}")
os.chdir(f"node{rank}")
def write(change, **options):
    for number in range(2):
        with h5py.File(f"part{number}.h5", "w") as file:
            x = np.arange(40.0).reshape(20, 2) + 40 * number
            text = [f"text {each}" for each in range(20)]
            if change == "a value":
                x[7] += 1000
            if change == "a text":
                text[7] = "changed"
            if change == "torn":
                x[10:] = 0
            file.create_dataset("x", data=x, chunks=(5, 2), **options)
            file.create_dataset("text", data=text)
dataset = ms.data.Dataset.from_hdf5("part*.h5", ("x", "text")).shuffle(seed=0).batch(8)
"""
SAID = "ranks 0-1 read {0}/node0 on {1}, rank 2 reads {0}/node2 on {1}. Copy the files again"


@pytest.mark.parametrize("change", ["a value", "a text", "torn"])
def test_a_copy_that_differs_is_an_error_on_every_rank(tmp_path, change):
    program = f"""
import socket
write("{change}" if rank == 2 else "")
try:
    strategy.distribute_dataset(dataset)
except ms.errors.DataError as error:
    assert {SAID!r}.format(os.path.dirname(os.getcwd()), socket.gethostname()) in str(error), error
    print("refused")
assert strategy.reduce("sum", 1) == size
"""
    done = launch.run(["-c", PRELUDE + PROGRAM + program], 3, 60, cwd=tmp_path)
    assert (done.returncode, ours(done.stderr)) == (0, "")
    assert done.stdout.split() == ["refused"] * 3


def test_equal_copies_are_read_however_they_are_stored(tmp_path):
    program = """
write("", **{"compression": "gzip"} if rank else {})
seen = np.zeros(80)
def step(x):
    np.add.at(seen, np.asarray(x).astype(int).reshape(-1), 1)
for x, text in strategy.distribute_dataset(dataset):
    strategy.run(step, args=(x,))
assert (strategy.reduce("sum", seen) == 1).all()
print("read")
"""
    done = launch.run(["-c", PRELUDE + PROGRAM + program], 3, 60, cwd=tmp_path)
    assert (done.returncode, ours(done.stderr)) == (0, "")
    assert done.stdout.split() == ["read"] * 3
