"""The textbook says what really travels: Open MPI's monitoring counts each message."""

import json

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = pytest.mark.launches

PROGRAM = """
import dataclasses, json, sys
import numpy as np
from mpi4py import MPI
import mpistrat as ms
from tools.scaling.counting import counted, total_work

calls = []
strategy = ms.MPIStrategy(counted(MPI.COMM_WORLD, calls), device="cpu")
by_mpi = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.MPI)
deterministic = ms.CommunicationOptions(
    deterministic=True, implementation=ms.CommunicationImplementation.MPI
)

def reduce():
    for num_bytes in (1200, 1_200_000):
        array = np.ones(num_bytes // 4, np.float32)
        for options in (by_mpi, deterministic):
            ms.get_replica_context().all_reduce("sum", array, options)

strategy.run(reduce)
calls.clear()
for _ in range(int(sys.argv[1])):
    strategy.run(reduce)
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps(dataclasses.asdict(total_work(calls))))
"""
RANKS = 4


def expected_and_sent(folder, times):
    """Return the work of so many reductions by the textbook, and what each rank has sent."""
    folder.mkdir()
    monitoring = {"enable": "1", "enable_output": "3", "filename": str(folder / "sent")}
    variables = {f"OMPI_MCA_pml_monitoring_{name}": each for name, each in monitoring.items()}
    # Open MPI does what does not block in another way.
    variables["MPISTRAT_CHECKS"] = "off"
    done = launch.run(["-c", PROGRAM, str(times)], RANKS, 60, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stderr
    sent = []
    for rank in range(RANKS):
        (file,) = folder.glob(f"sent.{rank}.*")
        # E <rank> <to> <bytes> bytes <messages> msgs sent ...
        lines = [line.split() for line in file.read_text().splitlines() if line.startswith("E")]
        sent.append((sum(int(line[5]) for line in lines), sum(int(line[3]) for line in lines)))
    return json.loads(done.stdout), sent


@pytest.mark.skipif(not launch.is_open_mpi(), reason="Open MPI alone has the monitoring")
def test_messages_and_bytes_are_those_of_the_textbook(tmp_path):
    _, before = expected_and_sent(tmp_path / "start", 0)
    work, after = expected_and_sent(tmp_path / "all", 10)
    for rank in range(RANKS):
        messages, num_bytes = (a - b for a, b in zip(after[rank], before[rank], strict=True))
        assert messages == work["messages"]
        assert num_bytes == work["bytes_sent"]
