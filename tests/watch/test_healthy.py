"""Programs that end: no report, and output and exit code as without the watch."""

import pytest

from mpistrat.testing.launch import run

pytestmark = pytest.mark.launches

START = "import sys, time, numpy as np\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
PROGRAMS = {
    "master_and_workers": """
if comm.rank == 0:
    for _ in range(20 * (comm.size - 1)):
        status = MPI.Status()
        comm.recv(source=MPI.ANY_SOURCE, status=status)
        comm.send(1, dest=status.source)
else:
    for _ in range(20):
        comm.send(0, dest=0)
        while not comm.iprobe(source=0):
            time.sleep(0.01)
        comm.recv(source=0)
""",
    "one_is_late": "time.sleep(5 * (comm.rank == 1))\ncomm.Barrier()\n",
    "one_computes": """
if comm.rank == 0:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        np.linalg.svd(np.ones((60, 60)))
comm.allreduce(1)
""",
    "waits_for_some": """
requests = [comm.Irecv(np.empty(1), source=r) for r in range(comm.size) if r != comm.rank]
for r in range(comm.size):
    if r != comm.rank:
        time.sleep(1.5 * (comm.rank == 0))
        comm.Send(np.ones(1), dest=r)
MPI.Request.Waitall(requests)
""",
    "splits": """
for _ in range(200):
    half = comm.Split(comm.rank % 2)
    half.allreduce(1)
    half.Free()
time.sleep(3 * (comm.rank == 0))
comm.Barrier()
""",
    "exits_with_3": "comm.Barrier()\nsys.exit(3)\n",
    "aborts": "comm.Barrier()\ncomm.rank == 0 and comm.Abort(5)\ncomm.Barrier()\n",
}
SHORT = ("one_is_late", "exits_with_3")
RARE = {"aborts": pytest.mark.campaign}
"""Once in a while a rank still prints before the launcher ends it."""


@pytest.mark.parametrize(
    "name",
    [
        each if each in SHORT else pytest.param(each, marks=RARE.get(each, pytest.mark.slow))
        for each in PROGRAMS
    ],
)
def test_a_healthy_program_is_left_alone(name, tmp_path):
    program = tmp_path / f"{name}.py"
    program.write_text(START + PROGRAMS[name] + "\nprint('end', comm.rank, flush=True)\n")
    command = ["-n", "3", "--oversubscribe"]
    plain = run(["-m", "mpistrat", "run", *command, str(program)], limit_s=100)
    done = run(["-m", "mpistrat", "watch", *command, "--after", "1", str(program)], limit_s=100)
    assert "mpistrat watch" not in done.stderr
    assert done.returncode == plain.returncode
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines())


def test_arguments_path_and_traceback_are_those_of_python(tmp_path):
    program = tmp_path / "facts.py"
    program.write_text(
        "import os, sys\nfrom mpi4py import MPI\n"
        "print(sys.argv, sys.path[0], __name__, __file__, os.environ.get('PYTHONPATH'))\n"
        "print([k for k in os.environ if 'WATCH' in k], 'numpy' in sys.modules)\n"
        "raise KeyError(1)\n"
    )
    plain = run([program, "--steps", "3"])
    done = run(["-m", "mpistrat", "watch", "-n", "1", str(program), "--steps", "3"])
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr == plain.stderr
