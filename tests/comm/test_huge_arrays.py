"""Arrays of more than 2**31 bytes and elements: MPI's int ends before them."""

from pathlib import Path

import pytest

from mpistrat.testing import launch

NEEDED_BYTES = 10 * 2**30


def available_bytes():
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


pytestmark = [
    pytest.mark.launches,
    pytest.mark.slow,
    pytest.mark.skipif(available_bytes() < NEEDED_BYTES, reason="needs 10 GiB of memory"),
]

PRELUDE = """
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy(device="cpu")
collectives = strategy.extended._collectives
rank, size = collectives.rank, collectives.size
length = 2**31 // {itemsize} + 5
ends = [0, 2**28, 2**29, 2**30, 2**31, length]
places = np.unique([place + each for place in ends for each in range(-3, 3)])
places = places[(places >= 0) & (places < length)]

def numbers(rank):
    # Pages of zeros that nobody has written to cost no memory.
    array = np.zeros(length, "{dtype}")
    array[places] = places % 50 + 1 + rank
    return array

def check(result, marks, places=places):
    assert result.shape == (length,), result.shape
    np.testing.assert_array_equal(result[places], marks)
    assert np.count_nonzero(result) == len(places)

def replica(fn):
    per_replica = strategy.run(lambda: fn(ms.get_replica_context()))
    return strategy.experimental_local_results(per_replica)[0]

sums = sum(places % 50 + 1 + each for each in range(size))
options = ms.CommunicationOptions({options})
"""

PROGRAMS = {
    "all_reduce": """
check(replica(lambda replica: replica.all_reduce("sum", numbers(rank), options)), sums)
""",
    "start_all_reduce": """
def step(replica):
    array = numbers(rank)
    handle = replica.start_all_reduce("sum", array, options)
    del array
    assert replica.all_reduce("max", rank) == size - 1
    return handle.wait()
check(replica(step), sums)
""",
    "reduce_to one rank": """
device = f"/job:worker/task:{size - 1}/device:CPU:0"
result = strategy.extended.reduce_to("sum", ms.PerReplica(numbers(rank)), device, options)
assert (result is None) == (rank < size - 1)
if rank == size - 1:
    check(result, sums)
""",
}
GATHERS = {
    "gather": """
array = numbers(0)
part = array[:-2] if rank == 0 else array[length - 2 :] if rank == 1 else array[:0]
check(strategy.gather(part, 0), places % 50 + 1)
""",
    "gather of halves": """
array = numbers(0)
part = np.split(array, [length // size * each for each in range(1, size)])[rank]
check(strategy.gather(part, 0), places % 50 + 1)
""",
    "exchange": """
array = numbers(0)
transport = collectives.channel.transport
if rank == 0:
    assert transport.all_to_all(array, [3, length - 3], [3, 5]).size == 8
else:
    found = transport.all_to_all(array[:9], [5, 4], [length - 3, 4])
    check(np.concatenate([array[:3], found[:-4]]), places % 50 + 1)
""",
    "broadcast": """
from mpistrat.collectives.operations.broadcast import broadcast
def whole():
    with collectives.call("broadcast") as call:
        return broadcast(call, numbers(rank), root=size - 1)
check(whole(), places % 50 + size)
""",
}
WAYS = {
    "shared": "implementation=ms.CommunicationImplementation.SHARED",
    "whole": "implementation=ms.CommunicationImplementation.MPI",
    "deterministic": "deterministic=True, implementation=ms.CommunicationImplementation.MPI",
}


def run(tmp_path, program, dtype, itemsize, options=""):
    script = tmp_path / "program.py"
    text = PRELUDE.format(dtype=dtype, itemsize=itemsize, options=options) + program
    script.write_text(text + "\nprint('right')")
    result = launch.run([script], 2, 200)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["right"] * 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["shared", "whole"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_reductions_of_more_than_an_int_of_elements(tmp_path, program, way):
    run(tmp_path, PROGRAMS[program], "u1", 1, WAYS[way])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_a_reduction_of_more_than_an_int_of_bytes(tmp_path, way):
    run(tmp_path, PROGRAMS["all_reduce"], "f4", 4, WAYS[way])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", GATHERS)
def test_what_is_gathered_and_broadcast(tmp_path, program):
    run(tmp_path, GATHERS[program], "u1", 1)
