"""Parameter-server programs that end well, fail, or hang: all ranks end, and one says why."""

import os
import signal
import time

import pytest

from mpistrat.testing import launch
from tests.programs.running import ours

pytestmark = pytest.mark.launches

PRELUDE = """
import os, sys, time
import numpy as np
import mpistrat as ms
strategy = ms.ParameterServerStrategy({num_ps})
with strategy.scope():
    counter = ms.Variable(np.int64(0), name="counter")
rank = strategy.rank
def add(pause_s=0.0):
    time.sleep(pause_s)
    counter.assign_add(1, read_value=False)
def leave(code):
    os._exit(code)
def wait(text):
    print(text, flush=True)
    time.sleep(60)
def read(text):
    print(text, flush=True)
    while True:
        counter.value()
num_counted = 0
def count(number):
    global num_counted
    num_counted += 1
    return number, ms.coordinator.experimental_get_current_worker_index(), num_counted - 1
if strategy.cluster_resolver.task_type != "chief":
    strategy.serve()
    print(f"rank {{rank}} is done")
    sys.exit()
coordinator = ms.coordinator.ClusterCoordinator(strategy)
"""
NO_COORDINATOR = PRELUDE.rpartition("coordinator =")[0]

WORK = """
for _ in range(20):
    coordinator.schedule(add)
coordinator.join()
print("counted", counter.numpy())
"""


def said(done):
    """Return what stands on standard error, but for the line on what a lost rank means."""
    lines = ours(done.stderr).split("\n")
    return "\n".join(each for each in lines if "parameter-server job dies" not in each)


def text_of(program, num_ps=0):
    return program.replace("{num_ps}", str(num_ps)).replace("{{", "{").replace("}}", "}")


def run(tmp_path, program, ranks=3, num_ps=0, limit_s=40, **variables):
    script = tmp_path / "program.py"
    script.write_text(text_of(program, num_ps))
    return launch.run([script], ranks, limit_s, cwd=tmp_path, env=variables)


@pytest.mark.quick("2-with close")
@pytest.mark.parametrize(
    "end", ["strategy.close()", "pass", "sys.exit(0)"], ids=["with close", "without", "exit"]
)
@pytest.mark.parametrize(("ranks", "num_ps"), [(2, 0), (4, 2)])
def test_others_return_when_the_chief_ends_well(tmp_path, ranks, num_ps, end):
    done = run(tmp_path, PRELUDE + WORK + end, ranks, num_ps)
    assert (done.returncode, said(done)) == (0, "")
    assert "counted 20" in done.stdout
    assert done.stdout.count("is done") == ranks - 1


@pytest.mark.parametrize("end", ["pass", "print(counter.numpy())"])
def test_a_chief_without_coordinator(tmp_path, end):
    done = run(tmp_path, NO_COORDINATOR + end, 3, 1)
    assert (done.returncode, said(done)) == (0, "")
    assert done.stdout.count("is done") == 2


def test_closures_that_wait_are_dropped(tmp_path):
    program = PRELUDE + "for _ in range(1000): coordinator.schedule(add, (0.05,))\n"
    began = time.monotonic()
    done = run(tmp_path, program)
    assert (done.returncode, said(done)) == (0, "")
    assert time.monotonic() - began < 20


@pytest.mark.quick
def test_a_chief_that_fails_reports_alone(tmp_path):
    done = run(tmp_path, PRELUDE + WORK + 'raise KeyError("too bad")', 4, 1)
    assert done.returncode != 0
    text = ours(done.stderr)
    assert text.count("Traceback") == 1, text
    assert "KeyError: 'too bad'" in text
    assert "mpistrat: rank 0 of 4 failed at program.py" in text
    assert "is done" not in done.stdout


def test_an_error_of_a_closure_that_nobody_catches(tmp_path):
    program = PRELUDE + 'coordinator.schedule(open, ("missing",))\ncoordinator.join()'
    done = run(tmp_path, program)
    assert done.returncode != 0
    text = ours(done.stderr)
    assert "FileNotFoundError" in text
    assert "worker " in text


@pytest.mark.quick
def test_a_worker_that_dies_ends_the_job(tmp_path):
    program = PRELUDE + "coordinator.schedule(os._exit, (3,))\ncoordinator.join()"
    done = run(tmp_path, program, limit_s=30)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "--with-ft ulfm" in text
    assert "rank" in text.lower()


def test_a_closure_that_hangs_is_reported(tmp_path):
    program = (
        PRELUDE + 'coordinator.schedule(time.sleep, (4,))\ncoordinator.join()\nprint("joined")'
    )
    done = run(tmp_path, program, MPISTRAT_WAIT_NOTICE_S="1")
    assert done.returncode == 0
    text = ours(done.stderr)
    assert text.count("has run for") == 1, text
    assert "closure sleep #0" in text
    assert "program.py:" in text
    assert "joined" in done.stdout


def test_a_chief_that_is_stopped_goes_on(tmp_path):
    program = PRELUDE + (
        "print(os.getpid(), flush=True)\n"
        "for _ in range(200): coordinator.schedule(add, (0.01,))\n"
        "coordinator.join()\nprint('counted', counter.numpy())\n"
    )
    script = tmp_path / "program.py"
    script.write_text(text_of(program))
    launched = launch.Launched([script], 3, cwd=tmp_path)
    launched.wait_for_output("\n")
    pid = int(launched.stdout().split()[0])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)
    done = launched.finish(40)
    assert (done.returncode, said(done)) == (0, "")
    assert "counted 200" in done.stdout


MOMENTS = {
    "in schedule": 'print("waits", flush=True)\nwhile True: coordinator.schedule(add)',
    "in join": 'coordinator.schedule(wait, ("waits",))\ncoordinator.join()',
    "in fetch": 'coordinator.schedule(wait, ("waits",)).fetch()',
    "in a closure that reads": 'coordinator.schedule(read, ("waits",)).fetch()',
    "elsewhere": 'coordinator.schedule(add).fetch()\nprint("waits", flush=True)\ntime.sleep(60)',
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_interruption(tmp_path, moment):
    script = tmp_path / "program.py"
    script.write_text(text_of(PRELUDE + MOMENTS[moment], num_ps=1))
    launched = launch.Launched([script], 4, cwd=tmp_path)
    launched.wait_for_output("waits")
    time.sleep(0.2)
    began = time.monotonic()
    os.kill(launched.process.pid, signal.SIGINT)
    done = launched.finish(30)
    assert done.returncode != 0
    assert time.monotonic() - began < 20
    if not launch.is_open_mpi():  # which kills the ranks at once
        assert "KeyboardInterrupt" in done.stderr
        # On a loaded machine two ranks may fail at once, before either knows of the other.
        assert ours(done.stderr).count("Traceback") in (1, 2), done.stderr


def test_late_ranks(tmp_path):
    program = PRELUDE.replace("strategy =", "LATE\nstrategy =", 1).replace(
        "LATE",
        "from mpistrat.testing.launch import rank_and_size\ntime.sleep(rank_and_size()[0] % 2)",
    )
    program = program.replace(
        "    strategy.serve()", "    time.sleep(rank / 2)\n    strategy.serve()"
    )
    done = run(tmp_path, program + WORK, 4, 1)
    assert (done.returncode, said(done)) == (0, "")
    assert "counted 20" in done.stdout


@pytest.mark.slow
def test_closures_by_the_hundred_thousand(tmp_path):
    """They end in their order, at each worker, in memory that does not grow."""
    program = (
        PRELUDE
        + """
def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) >> 8
before = megabytes()
values = [coordinator.schedule(count, (number,)) for number in range(100_000)]
coordinator.join()
assert megabytes() - before < 200, (before, megabytes())
ends = coordinator.fetch(values)
assert [number for number, _, _ in ends] == list(range(100_000))
for worker in (0, 1):
    assert [n for _, index, n in ends if index == worker] == list(range(sum(
        index == worker for _, index, _ in ends)))
values = [coordinator.schedule(add) for _ in range(100_000)]
strategy.close()
print("ended")
"""
    )
    done = run(tmp_path, program, limit_s=110)
    assert (done.returncode, said(done)) == (0, "")
    assert "ended" in done.stdout
