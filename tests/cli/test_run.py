"""``mpistrat run``: ranks, threads, exit codes, restarts and signals, with the real mpiexec."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.mpi.mpiexec import mpiexec_program
from mpistrat.system import processes
from mpistrat.system.text import counted
from mpistrat.testing import launch
from tests import ROOT

pytestmark = pytest.mark.launches

SHOW = """
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
line = sys.stdin.readline() if world.rank == 0 else ""
facts = [sys.argv[1:], os.environ["OMP_NUM_THREADS"], os.environ.get("MPISTRAT_RESTART"), line]
if (lines := world.gather(facts)) is not None:
    print(lines)
"""
KILL = """
import os, signal, sys
import mpistrat as ms
strategy = ms.MPIStrategy(device="cpu")
restart = int(os.environ.get("MPISTRAT_RESTART", 0))
if restart < int(sys.argv[1]) and strategy.cluster_resolver.task_id == 1:
    os.kill(os.getpid(), signal.SIGKILL)
strategy.reduce("sum", 1)
"""
TRAIN = f"""
import os, runpy, signal
import mpistrat as ms
save = ms.CheckpointManager.save

def save_and_die(self, step=None):
    path = save(self, step)
    rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    if step == 2 and rank == "1" and "MPISTRAT_RESTART" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return path

ms.CheckpointManager.save = save_and_die
runpy.run_path({str(ROOT / "jobs/train_digits.py")!r}, run_name="__main__")
"""


def environment(**changes):
    """Return the variables of a user who has set none for threads."""
    variables = launch.environment(changes)
    unset = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MPISTRAT_OVERSUBSCRIBE"} - set(changes)
    return {name: value for name, value in variables.items() if name not in unset}


def run(*arguments, stdin="\n", limit_s=60, cwd=None, **changes):
    # Open MPI 5 does not tell rank 0 that an empty input has ended.
    return subprocess.run(
        [sys.executable, "-m", "mpistrat", "run", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
        env=environment(PYTHONPATH=str(ROOT), **changes),
    )


@pytest.fixture
def program(tmp_path):
    """Return a function that writes the text of a program into a file."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


def test_the_ranks_get_arguments_input_and_threads(program):
    done = run(
        *("-n", 2, "--oversubscribe", program(SHOW), "--epochs", "3", "-n", "7"),
        stdin="first line\n",
        OMP_NUM_THREADS="3",
    )
    assert done.returncode == 0, done.stderr
    arguments = ["--epochs", "3", "-n", "7"]
    assert done.stdout.strip() == str(
        [[arguments, "3", None, "first line\n"], [arguments, "3", None, ""]]
    )
    shown, *rest = done.stderr.splitlines()
    assert not rest
    python = re.escape(Path(sys.executable).name)
    start = rf"mpiexec( --\S+( none)?)* -n 2 {python}"
    assert re.fullmatch(rf"mpistrat run: {start} \S+/program.py --epochs 3 -n 7", shown)


def test_verbose_prints_the_command_with_paths_and_variables(program):
    path = program("raise SystemExit(3)")
    done = run(*("-v", "-n", 2, "--oversubscribe", "--restarts", 1, path), OMP_NUM_THREADS="3")
    shown = [x for x in done.stderr.splitlines() if "program.py" in x and "mpistrat run:" in x]
    assert len(shown) == 2, done.stderr  # the restart has a different MPISTRAT_RESTART
    for line in shown:
        assert line.startswith("mpistrat run: OPENBLAS_NUM_THREADS=3 MKL_NUM_THREADS=3 ")
        assert f" -n 2 {shlex.quote(sys.executable)} {path}" in line
    assert "MPISTRAT_RESTART=1 " in shown[1]
    short = run("-n", 2, "--oversubscribe", "--restarts", 1, path)
    assert short.stderr.count(f" {path}") == 1


def test_threads_share_the_cores(program):
    cores = len(os.sched_getaffinity(0))
    alone = run(program(SHOW))
    assert alone.stdout.strip() == str([[[], str(cores), None, "\n"]]), alone.stderr
    assert "mpiexec" not in alone.stderr
    asked = run("-n", 2, "--oversubscribe", "--threads", 5, program(SHOW), OMP_NUM_THREADS="3")
    assert asked.stdout.count("'5'") == 2, asked.stderr
    module = run("-n", 2, "--oversubscribe", "-m", "program", cwd=program(SHOW).parent)
    assert module.stdout.count(f"'{max(cores // 2, 1)}'") == 2, module.stderr


def test_more_ranks_than_cores_have_to_be_asked_for(program):
    ranks = len(os.sched_getaffinity(0)) + 1
    done = run("-n", ranks, program(SHOW))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"-n {ranks} is more than the {counted(ranks - 1, 'core')}" in done.stderr
    assert "Add --oversubscribe" in done.stderr


@pytest.mark.parametrize("code", [2, 75, 3])
def test_the_exit_code_is_the_jobs_and_some_are_no_crash(program, code):
    done = run("-n", 2, "--oversubscribe", "--restarts", 1, program(f"raise SystemExit({code})"))
    assert done.returncode == code
    assert done.stderr.count("restart 1 of 1") == (code == 3)
    if code == 3:
        assert "mpistrat run: The job failed with exit code 3 after " in done.stderr


def test_a_killed_job_is_restarted_until_it_ends_well_or_none_is_left(program):
    file = program(KILL)
    done = run("-n", 2, "--oversubscribe", "--restarts", 3, file, 2)
    assert done.returncode == 0, done.stderr
    restarts = re.findall(r"restart (\d) of 3\.$", done.stderr, re.MULTILINE)
    assert restarts == ["1", "2"]
    assert re.search(r"after \d+\.\d s: restart", done.stderr)
    done = run("-n", 2, "--oversubscribe", "--restarts", 1, file, 9)
    assert done.returncode not in (0, 2)
    assert f"exit code {done.returncode}" in done.stderr
    assert done.stderr.rstrip().endswith("and there are no restarts left.")


@pytest.mark.timeout(300)
def test_a_restarted_training_ends_with_the_losses_of_an_undisturbed_one(program, tmp_path):
    pytest.importorskip("sklearn")
    data = tmp_path / "digits.h5"
    prepared = [sys.executable, ROOT / "jobs/prepare_digits.py", "--output", data]
    subprocess.run(prepared, check=True, timeout=60, env=environment(PYTHONPATH=str(ROOT)))
    options = ("--data", data, "--epochs", 4, "--output")
    few = ("-n", 2, "--oversubscribe", "--threads", 1)
    plain = run(*few, ROOT / "jobs/train_digits.py", *options, tmp_path / "plain", limit_s=120)
    assert plain.returncode == 0, plain.stderr
    killed = run(*few, "--restarts", 2, program(TRAIN), *options, tmp_path / "run", limit_s=120)
    assert killed.returncode == 0, killed.stderr
    assert killed.stderr.count("restart 1 of 2") == 1
    assert f"resumes from {tmp_path / 'run/checkpoint-2.h5'}" in killed.stdout
    curves = [
        json.loads((tmp_path / name / "learning_curve.json").read_text())
        for name in ("plain", "run")
    ]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]


def running(mark):
    """Return the processes of this machine that have `mark` in their command."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_from_terminal", [False, True])
def test_a_signal_ends_the_job_and_leaves_no_process(program, tmp_path, sign, is_from_terminal):
    file = program(
        "import time, mpistrat as ms\nms.MPIStrategy(device='cpu').reduce('sum', 1)\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "--oversubscribe"]
    process = subprocess.Popen(
        [*command, "--restarts", "3", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment(PYTHONPATH=str(ROOT), MPISTRAT_EXIT_GRACE_S="1"),
    )
    try:
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        # A terminal's Ctrl-C reaches the whole group.
        (os.killpg if is_from_terminal else os.kill)(process.pid, sign)
        _, error = process.communicate(timeout=30)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode != 0
    assert "restart" not in error.replace("--restarts", "")
    end = time.monotonic() + 10
    while running(str(file)) and time.monotonic() < end:
        time.sleep(0.1)
    assert running(str(file)) == []


def test_what_cannot_be_run_is_said_at_once(program, tmp_path):
    cases = {
        ("-n", "0", "x.py"): "it must be at least 1",
        ("--restarts", "often", "x.py"): "'often' is not a whole number",
        ("absent.py",): "There is no program 'absent.py'",
        ("-n", "2", "--oversubscribe", "--mpiexec", "absent", program("")): "no program 'absent'",
    }
    for arguments, text in cases.items():
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr


def test_the_mpiexec_of_another_library_is_refused(program, tmp_path):
    other = tmp_path / "mpiexec"
    version = "HYDRA build details" if launch.is_open_mpi() else "mpiexec (Open MPI) 5.0.8"
    other.write_text(f"#!/bin/sh\necho '{version}'\n")
    other.chmod(0o755)
    done = run("-n", 2, "--oversubscribe", "--mpiexec", other, program(SHOW))
    assert (done.returncode, done.stdout) == (2, "")
    family = "MPICH" if launch.is_open_mpi() else "Open MPI"
    assert f"but mpiexec is {other} ({family})" in done.stderr
    assert "Name the mpiexec of " in done.stderr


def test_it_starts_no_ranks_inside_of_a_job(program):
    flags = ["--oversubscribe"] if launch.is_open_mpi() else []
    command = [mpiexec_program(), *flags, "-n", "2", sys.executable, "-m", "mpistrat", "run"]
    done = subprocess.run(
        [*command, program(SHOW)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert done.returncode != 0
    assert "has already started this one" in done.stderr
    assert done.stdout == ""


def test_np_is_n_and_a_number_of_ranks_behind_the_program_is_named(program):
    done = run("-np", 2, "--oversubscribe", program(SHOW))
    assert done.stdout.count("[[]") + done.stdout.count(", []") >= 1, done.stderr
    assert " -n 2 " in done.stderr
    late = run(program(SHOW), "-n", "2")
    assert late.stdout.startswith("[[['-n', '2']"), late.stderr
    assert "-n 2 is after the program" in late.stderr
    assert "write mpistrat run -n 2 " in late.stderr


DIE = """
import os, signal, sys
import mpistrat as ms
strategy = ms.MPIStrategy(device="cpu")
with strategy.scope():
    weight = ms.Variable(0.0)
ms.CheckpointManager(ms.Checkpoint(weight=weight), "runs/a").save(3)
if strategy.rank == strategy.size - 1:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
strategy.barrier()
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGSEGV", "SIGBUS"])
def test_a_killed_rank_is_explained_in_the_last_line(program, tmp_path, ranks, sign):
    done = run("-n", ranks, "--oversubscribe", program(DIE), sign, cwd=tmp_path)
    assert done.returncode
    last = done.stderr.splitlines()[-1]
    if sign == "SIGBUS" and "SIGTERM" in last:
        # Hydra ORs the codes of the ranks: 7 and the 15 of a rank that it ends itself are 15.
        pytest.skip("MPICH's launcher has hidden the signal")
    assert last.startswith(f"mpistrat run: a rank was killed by {sign}")
    assert done.stderr.count("a rank was killed") == 1
    assert ("probably because the node ran out of memory" in last) == (sign == "SIGKILL")
    assert ("probably because /dev/shm is full" in last) == (sign == "SIGBUS")
    assert "The newest checkpoint is runs/a/checkpoint-3.h5." in last
    assert "With --restarts K, mpistrat run starts the job again" in last


def test_a_program_that_fails_by_itself_was_not_killed(program):
    done = run("-n", 2, "--oversubscribe", program("raise SystemExit(3)"))
    assert "killed" not in done.stderr


STEPS = """
import time
import mpistrat as ms
strategy = ms.MPIStrategy(device="cpu")
if strategy.rank == 0:
    print("ready", flush=True)
while True:
    strategy.barrier()
    time.sleep(0.01)
"""


def ended(file, limit_s=15):
    """Return whether no process runs the program `file` any more, after a while."""
    end = time.monotonic() + limit_s
    while running(str(file)) and time.monotonic() < end:
        time.sleep(0.1)
    left = running(str(file))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("whom", ["mpistrat run", "mpiexec"])
def test_no_rank_outlives_what_has_started_it(program, sign, whom):
    file = program(STEPS)
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "--oversubscribe"]
    process = subprocess.Popen(
        [*command, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    try:
        while not process.stdout.readline().startswith("ready"):
            assert process.poll() is None
        pid = process.pid if whom == "mpistrat run" else children(process.pid)[0]
        os.kill(pid, sign)
        _, error = process.communicate(timeout=30)
    finally:
        is_over = ended(file)
    assert is_over
    assert process.returncode != 0
    assert ("that outlived mpiexec" in error) <= (whom == "mpiexec")


def children(pid):
    return [child for child, parent in processes._parents() if parent == pid]
