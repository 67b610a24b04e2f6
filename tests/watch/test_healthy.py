"""Programs that end: no report, and output and exit code as without the watch."""

import pytest

from mpistrat.testing.launch import is_open_mpi, run

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
    "large_decomposition": """
if comm.rank == 0:
    for _ in range(8):
        np.linalg.svd(np.random.default_rng(0).normal(size=(500, 500)))
comm.Barrier()
""",
    "test_loop": """
if comm.rank == 0:
    requests = [comm.irecv(source=r) for r in range(1, comm.size)]
    while not all(each.test()[0] for each in requests):
        pass
else:
    time.sleep(4)
    comm.send(comm.rank, dest=0)
""",
    "ibarrier_with_work": """
time.sleep(4 * (comm.rank == 1))
request = comm.Ibarrier()
while not request.Test():
    np.linalg.svd(np.ones((40, 40)))
""",
    "long_output_of_a_file": """
import os, tempfile
if comm.rank == 0:
    with tempfile.TemporaryFile() as file:
        end = time.monotonic() + 4
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(2**20))
            os.fsync(file.fileno())
comm.bcast(0)
""",
    "file_of_all": """
import tempfile
name = comm.bcast(tempfile.mktemp())
file = MPI.File.Open(comm, name, MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE)
time.sleep(4 * (comm.rank == 1))
file.Write_at_all(8 * comm.rank, np.ones(1))
file.Close()
""",
    "thread_that_serves": """
import threading
def serve():
    for _ in range(comm.size - 1):
        comm.recv(source=MPI.ANY_SOURCE, tag=5)
if comm.rank == 0:
    thread = threading.Thread(target=serve)
    thread.start()
    end = time.monotonic() + 4
    while time.monotonic() < end:
        np.linalg.svd(np.ones((40, 40)))
    thread.join()
else:
    time.sleep(5)
    comm.send(0, dest=0, tag=5)
""",
    "one_sided": """
window = MPI.Win.Allocate(8, comm=comm)
for _ in range(3):
    window.Lock(0, MPI.LOCK_EXCLUSIVE)
    window.Put(np.ones(1), 0)
    time.sleep(1)
    window.Unlock(0)
window.Fence()
time.sleep(3 * (comm.rank == 1))
window.Fence()
window.Free()
""",
    "spawn": """
code = "import time; from mpi4py import MPI; p = MPI.Comm.Get_parent(); time.sleep(4); p.Barrier()"
other = comm.Spawn(sys.executable, ["-c", code + "; p.Disconnect()"], 1)
other.Barrier()
other.Disconnect()
""",
    "child_program": """
import subprocess
code = "import time; time.sleep(4); print('child')"
if comm.rank == 1:
    print(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
comm.Barrier()
""",
    "fork": """
import os
if comm.rank == 1:
    child = os.fork()
    if child == 0:
        time.sleep(4)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
comm.Barrier()
""",
    "pool_of_processes": """
import multiprocessing
if comm.rank == 1:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(time.sleep, [2, 2, 2]))
comm.Barrier()
""",
    "persistent": """
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
values = np.zeros(2)
requests = [comm.Send_init(values[:1], right), comm.Recv_init(values[1:], left)]
for i in range(3):
    time.sleep(2 * (comm.rank == i))
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(requests)
for each in requests:
    each.Free()
""",
    "partitioned": """
values = np.zeros(4)
if comm.rank == 0:
    request = comm.Psend_init(values, 4, 1)
    request.Start()
    for i in range(4):
        time.sleep(1)
        request.Pready(i)
elif comm.rank == 1:
    request = comm.Precv_init(values, 4, 0, 0)
    request.Start()
if comm.rank < 2:
    request.Wait()
    request.Free()
comm.Barrier()
""",
    "asks_for_the_status_of_requests": """
value = np.zeros(1)
requests = [comm.Isend(np.ones(1), (comm.rank + 1) % comm.size), comm.Irecv(value)]
began = time.monotonic()
while time.monotonic() < began + 3 or not all(each.Get_status() for each in requests):
    time.sleep(0.01)
MPI.Request.Waitall(requests)
assert MPI.REQUEST_NULL.Get_status()
""",
    "own_stacks_and_alarms": """
import faulthandler, signal
faulthandler.dump_traceback_later(60)
signal.signal(signal.SIGALRM, lambda *_: print("alarm", comm.rank))
if comm.rank == 1:
    signal.alarm(2)
    time.sleep(4)
comm.allgather(comm.rank)
faulthandler.cancel_dump_traceback_later()
""",
    "exits_with_3": "comm.Barrier()\nsys.exit(3)\n",
    "aborts": "comm.Barrier()\ncomm.rank == 0 and comm.Abort(5)\ncomm.Barrier()\n",
}
SHORT = ("one_is_late", "exits_with_3")
IN_CI = (
    "asks_for_the_status_of_requests",
    "master_and_workers",
    "one_computes",
    "splits",
    "waits_for_some",
)


@pytest.mark.parametrize(
    "name",
    [
        each
        if each in SHORT
        else pytest.param(each, marks=pytest.mark.slow if each in IN_CI else pytest.mark.campaign)
        for each in PROGRAMS
    ],
)
def test_a_healthy_program_is_left_alone(name, tmp_path):
    if name == "partitioned" and is_open_mpi():
        pytest.skip("Wait never returns on Open MPI 5.0.11, without the watch either")
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
