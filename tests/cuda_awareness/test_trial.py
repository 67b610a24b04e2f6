"""Children that make the exchange, and children that do anything else."""

import os
import signal
import sys
import time

import pytest

from mpistrat.cuda_awareness import Outcome, trial
from mpistrat.mpi.mpiexec import mpiexec

pytestmark = pytest.mark.launches

SAY = """
import ctypes, json, os, signal, subprocess, sys, time
def say(stage, num_processes=2, text="some text"):
    report = {"exchange": stage, "num_processes": num_processes, "text": text}
    sys.stdout.write(json.dumps(report) + "\\n")
    sys.stdout.flush()
"""


def run(code, limit_s=30):
    return trial.run_trial([sys.executable, "-c", SAY + code], limit_s)


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("say('begun'); say('passed')", Outcome.PASSED, "between 2 processes has passed: some"),
        ("say('begun', 1); say('passed', 1)", Outcome.PASSED, "in a process alone has passed"),
        ("say('passed'); say('passed', 1)", Outcome.PASSED, "in a process alone has passed"),
        ("say('begun'); say('failed'); sys.exit(1)", Outcome.FAILED, "failed: some text"),
        ("say('passed'); say('failed')", Outcome.FAILED, "failed: some text"),
        ("say('begun'); ctypes.string_at(0)", Outcome.FAILED, "ended the process with SIGSEGV"),
        ("say('begun'); os.abort()", Outcome.FAILED, "ended the process with SIGABRT"),
        ("say('begun'); sys.exit(15)", Outcome.FAILED, "ended the process with exit code 15"),
        ("say('begun'); sys.exit(139)", Outcome.FAILED, "ended the process with SIGSEGV"),
        ("say('begun'); os.kill(os.getpid(), signal.SIGKILL)", Outcome.OPEN, "SIGKILL"),
        ("say('begun'); sys.exit(143)", Outcome.OPEN, "SIGTERM"),
        ("say('begun'); say('passed'); os.abort()", Outcome.OPEN, "shows nothing: SIGABRT"),
        ("say('unable'); sys.exit(2)", Outcome.OPEN, "could not be tried: some text"),
        ("ctypes.string_at(0)", Outcome.OPEN, "shows nothing: SIGSEGV"),
        ("raise ValueError('no cupy here')", Outcome.OPEN, "exit code 1, ValueError: no cupy here"),
        ("", Outcome.OPEN, "in child processes shows nothing: exit code 0"),
        ("os.write(1, bytes(range(256)) * 99)", Outcome.OPEN, "shows nothing"),
        ("print('passed'); print('[' * 99999)", Outcome.OPEN, "shows nothing"),
        ('print(\'{"exchange": "passed"}\')', Outcome.OPEN, "shows nothing"),
        ("say(['passed'])", Outcome.OPEN, "shows nothing"),
        ("say('passed', float('inf'))", Outcome.OPEN, "shows nothing"),
        ("say('passed', 2, None)", Outcome.OPEN, "shows nothing"),
        ("print('[1] [2] 3')", Outcome.OPEN, "exit code 0, [1] [2] 3"),
    ],
)
def test_what_a_child_shows(code, outcome, text):
    shown = run(code)
    assert shown.outcome is outcome
    assert text in shown.text
    assert "\n" not in shown.text
    assert len(shown.text) < 400


@pytest.mark.parametrize("begin", ["", "say('begun'); "])
def test_a_child_that_hangs_is_ended_with_all_it_started(begin, tmp_path):
    pids = tmp_path / "pids"
    began = time.monotonic()
    shown = run(
        f"{begin}signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sleeper = [sys.executable, '-c', 'import time; time.sleep(100)']\n"
        "child = subprocess.Popen(sleeper, start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(100)",
        limit_s=2,
    )
    assert time.monotonic() - began < 20
    assert shown.outcome is Outcome.OPEN
    assert shown.text.endswith("did not end within 2 s")
    for pid in map(int, pids.read_text().split()):
        wait_for_end(pid)


def wait_for_end(pid):
    """Wait until a process is gone, or is a corpse that nobody has asked for."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("command", [["/no/such/program"], ["/"], ["a\0b"]])
def test_a_child_that_cannot_start_shows_nothing(command):
    shown = trial.run_trial(command, 30)
    assert shown.outcome is Outcome.OPEN
    assert "could not be started" in shown.text


def test_an_interrupt_ends_the_child_and_goes_on():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run("time.sleep(100)", limit_s=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 20


def test_the_child_has_no_launcher_but_the_packages_of_its_parent(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("value = 'found'")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("OMPI_MCA_opal_cuda_support", "true")
    shown = run(
        "import only_here\n"
        "left = [n for n in os.environ if n.startswith(('PMI', 'SLURM', 'OMPI_COMM'))]\n"
        "say('passed', 2, f\"{only_here.value} {left} {os.environ['OMPI_MCA_opal_cuda_support']}\")"
    )
    assert shown.text.endswith("found [] true")


@pytest.fixture(autouse=True)
def forget():
    """Trials are made once in a process, but for those of tests."""
    yield
    trial.try_exchange.cache_clear()


def test_two_processes_exchange_host_memory():
    (shown,) = trial.try_exchange(0, "host")
    assert shown.outcome is Outcome.PASSED, shown.text
    assert shown.num_processes == 2
    assert "host memory, Sendrecv, Bcast, Allreduce" in shown.text
    assert trial.try_exchange(0, "host")[0] is shown


def test_without_a_gpu_device_memory_cannot_be_tried():
    if "cupy" in sys.modules:
        pytest.skip("has cupy")
    pair, alone = trial.try_exchange(0)
    for shown, num_processes in ((pair, 2), (alone, 1)):
        assert shown.outcome is Outcome.OPEN
        assert shown.num_processes == num_processes
        assert "cupy sees no GPU" in shown.text


@pytest.mark.parametrize(
    "launcher",
    [
        FileNotFoundError("There is no mpiexec"),
        ["/no/such/mpiexec", "-n", "2"],
        [sys.executable, "-c", "raise SystemExit('no daemon answers')"],
    ],
)
def test_without_a_launcher_that_works_one_process_tries_alone(monkeypatch, launcher):
    def broken(ranks, limit_s):
        if isinstance(launcher, Exception):
            raise launcher
        return launcher

    monkeypatch.setattr(trial, "mpiexec", broken)
    pair, alone = trial.try_exchange(0, "host")
    assert pair.outcome is Outcome.OPEN
    assert any(
        reason in pair.text for reason in ("no mpiexec", "not be started", "no daemon answers")
    )
    assert alone.outcome is Outcome.PASSED, alone.text
    assert alone.num_processes == 1


def test_the_launcher_of_another_library_makes_two_worlds_of_one(monkeypatch):
    twice = "import subprocess, sys; sys.exit(sum(map(subprocess.call, [sys.argv[1:]] * 2)))"
    foreign = [sys.executable, "-c", twice]
    monkeypatch.setattr(trial, "mpiexec", lambda ranks, limit_s: foreign)
    (shown,) = trial.try_exchange(0, "host")
    assert shown.outcome is Outcome.PASSED, shown.text
    assert shown.num_processes == 1


def test_a_library_that_dies_of_an_address_fails():
    """As one without CUDA does of device memory: here the address is in no memory at all."""
    code = SAY + (
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "if comm.rank == 0: say('begun', comm.size)\n"
        "comm.Barrier()\n"
        "nowhere = MPI.memory.fromaddress(0x700000000000, 2**22)\n"
        "comm.Sendrecv(nowhere, 1 - comm.rank, recvbuf=bytearray(2**22), source=1 - comm.rank)\n"
    )
    shown = trial.run_trial([*mpiexec(2), sys.executable, "-c", code], 60)
    assert shown.outcome is Outcome.FAILED, shown.text
    assert shown.num_processes == 2
    assert "ended the process with" in shown.text


@pytest.mark.parametrize(
    ("name", "outcome"), [("SIGKILL", Outcome.OPEN), ("SIGABRT", Outcome.FAILED)]
)
def test_a_launcher_reports_how_a_process_has_ended(name, outcome):
    code = SAY + (
        "from mpi4py import MPI\n"
        "say('begun', MPI.COMM_WORLD.size)\n"
        "MPI.COMM_WORLD.Barrier()\n"
        f"os.kill(os.getpid(), signal.{name})\n"
    )
    shown = trial.run_trial([*mpiexec(2), sys.executable, "-c", code], 60)
    assert shown.outcome is outcome
    assert name in shown.text


def test_the_program_says_what_it_tried_and_leaves_no_core(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = trial.run_trial([*mpiexec(3), *trial.exchange_command(0, "host", 60)], 60)
    assert shown.outcome is Outcome.PASSED, shown.text
    assert shown.num_processes == 3
    assert os.listdir(tmp_path) == []
