"""Ranks of a parameter-server job that are killed, where the job goes on (Open MPI with ULFM)."""

import collections
import contextlib
import os
import random
import signal
import time

import pytest

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch
from tests.programs.running import ours

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not launch.is_open_mpi(), reason="MPICH ends the job with the rank"),
]

PROGRAM = """
import os, sys, threading, time
import numpy as np
import mpistrat as ms
num_ps, victims, moment = int(sys.argv[1]), eval(sys.argv[2]), sys.argv[3]
strategy = ms.ParameterServerStrategy(num_ps)
with strategy.scope():
    counter = ms.Variable(np.int64(0), name="counter")
    large = ms.Variable(np.zeros(1 << 23), name="large")
rank = strategy.rank
with open(f"process-{rank}", "w") as file:
    print(os.getpid(), file=file)
def die():
    os.kill(os.getpid(), 9)
def work(number):
    time.sleep(0.005)
    if moment == "in a closure" and rank in victims and number > 20:
        die()
    counter.assign_add(1, read_value=False)
    if moment == "after a write" and rank in victims and number > 20:
        die()
    return number
def push(number):
    if rank in victims and number > 3:
        threading.Timer(0.004, die).start()
    large.assign(np.full(1 << 23, float(number)), read_value=False)
    return number
if rank in victims and moment == "at some time":
    threading.Timer(0.5, die).start()
if strategy.cluster_resolver.task_type != "chief":
    strategy.serve()
    print(f"rank {rank} is done")
    sys.exit()
print("tolerant:", strategy.is_fault_tolerant, flush=True)
coordinator = ms.coordinator.ClusterCoordinator(strategy)
values = []
try:
    if moment == "between closures":
        coordinator.schedule(work, (0,))
        coordinator.join()
        time.sleep(0.3)
        for victim in victims:
            os.kill(int(open(f"process-{victim}").read()), 9)
        time.sleep(0.7)
    function, count = (push, 16) if moment == "in a push" else (work, 200)
    values = [coordinator.schedule(function, (number,)) for number in range(count)]
    coordinator.join()
    assert coordinator.fetch(values) == list(range(count))
    total = int(counter.numpy())
    if moment == "in a push":
        last = large.numpy()
        assert (last == last[0]).all()
    elif moment == "after a write":
        assert count < total <= count + 2 * len(victims), total
    else:
        print("total", total)
    print("joined", flush=True)
except ms.errors.UnavailableError as error:
    print("unavailable:", error, flush=True)
    for call in (coordinator.join, coordinator.done, lambda: coordinator.fetch(1)):
        try:
            call()
        except ms.errors.UnavailableError:
            print("raised")
    try:
        values[-1].fetch()
    except ms.errors.CancelledError:
        print("cancelled")
    if num_ps:
        try:
            counter.value()
        except ms.errors.UnavailableError as error:
            print("no read:", error)
"""


def start(tmp_path, monkeypatch, ranks, *arguments, program=PROGRAM):
    first, *rest = mpiexec(ranks)
    monkeypatch.setattr(launch, "mpiexec", lambda _: [first, "--with-ft", "ulfm", *rest])
    script = tmp_path / "program.py"
    script.write_text(program)
    return launch.Launched([script, *arguments], ranks, cwd=tmp_path)


def left_over(tmp_path):
    """Return the processes of the job that are still there after some seconds."""
    pids = [int(each.read_text()) for each in tmp_path.glob("process-*")]
    end = time.monotonic() + 5
    while pids and time.monotonic() < end:
        pids = [pid for pid in pids if not _is_zombie(pid)]
        time.sleep(0.05)
    return pids


def _is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.quick("in a closure")
@pytest.mark.parametrize(
    "moment", ["in a closure", "after a write", "between closures", "in a push"]
)
def test_a_lost_worker_is_one_worker_less(tmp_path, monkeypatch, moment):
    done = start(tmp_path, monkeypatch, 4, "1", "[3]", moment).finish(40)
    assert "tolerant: True" in done.stdout
    assert "joined" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("is done") == 2
    text = ours(done.stderr)
    assert text.count("is lost") == 1, text
    assert "worker 1 (rank 3 on " in text
    if moment == "in a closure":
        assert "total 200" in done.stdout
        assert "work #" in text
    assert not left_over(tmp_path)


def test_all_workers_but_one(tmp_path, monkeypatch):
    done = start(tmp_path, monkeypatch, 4, "0", "[1, 3]", "in a closure").finish(40)
    assert "joined" in done.stdout, done.stdout + done.stderr
    assert "total 200" in done.stdout
    assert not left_over(tmp_path)


def test_the_last_worker(tmp_path, monkeypatch):
    done = start(tmp_path, monkeypatch, 3, "0", "[1, 2]", "in a closure").finish(40)
    assert "unavailable: Every worker is lost" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("raised") == 3
    assert "cancelled" in done.stdout
    assert not left_over(tmp_path)


def test_a_server(tmp_path, monkeypatch):
    done = start(tmp_path, monkeypatch, 4, "2", "[1]", "at some time").finish(40)
    assert "unavailable: The server 0 (rank 1 on " in done.stdout, done.stdout + done.stderr
    assert "with it the variables counter" in done.stdout
    assert done.stdout.count("raised") == 3
    assert "no read: The server 0" in done.stdout
    assert "cancelled" in done.stdout
    assert not left_over(tmp_path)


def test_the_chief(tmp_path, monkeypatch):
    launched = start(tmp_path, monkeypatch, 4, "1", "[0]", "at some time")
    launched.wait_for_output("tolerant")
    began = time.monotonic()
    done = launched.finish(40)
    assert done.returncode != 0
    assert time.monotonic() - began < 10
    assert ours(done.stderr).count("rank 0 is lost. It was the chief") == 1, done.stderr
    assert not left_over(tmp_path)


EXIT = (
    PROGRAM.partition("def push(")[0]
    + """
def end(how):
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise SystemExit(3)
    if how == "error":
        raise KeyError("too bad")
    if how == "close":
        strategy.close()
        sys.exit(3)
    if how == "caught":
        try:
            sys.exit(3)
        except SystemExit:
            pass
def main():
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    values = [coordinator.schedule(work, (number,)) for number in range(20, 40)]
    coordinator.join()
    assert coordinator.fetch(values) == list(range(20, 40))
    end(sys.argv[4])
if strategy.cluster_resolver.task_type == "chief":
    main()
else:
    strategy.serve()
"""
)
CODES = {"exit": 3, "raise": 3, "error": 1, "close": 3, "caught": 0}


@pytest.mark.quick("exit")
@pytest.mark.parametrize("how", CODES)
def test_the_exit_code_is_that_of_the_chief(tmp_path, monkeypatch, how):
    """Run more often by ``MPISTRAT_REPEATS=20``, by hand."""
    repeats = int(os.environ.get("MPISTRAT_REPEATS", "1"))
    monkeypatch.delenv("MPISTRAT_REPEATS", raising=False)
    for number in range(repeats):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = "0", "[2]", "in a closure", how
        done = start(folder, monkeypatch, 3, *arguments, program=EXIT).finish(40)
        assert done.returncode == CODES[how], (number, done.stdout, done.stderr)
        assert "is lost" in done.stderr
        assert done.stderr.count("Traceback") == int(how == "error"), done.stderr
        assert not left_over(folder)


KILLER = (
    PROGRAM.partition("def work(")[0]
    + """
def work(number):
    time.sleep(0.02)
    if number == 7:
        die()
    counter.assign_add(1, read_value=False)
    return number
if strategy.cluster_resolver.task_type != "chief":
    strategy.serve()
    sys.exit()
coordinator = ms.coordinator.ClusterCoordinator(strategy)
if moment == "map":
    results = coordinator.map(work, range(30), errors="return")
    error = results[7]
    assert isinstance(error, ms.errors.WorkerLostError), error
    assert [n for n, each in enumerate(results) if isinstance(each, int) and each == n] == [
        n for n in range(30) if n != 7
    ], results
    coordinator.join()
    assert coordinator.schedule(work, (1,)).fetch() == 1
else:
    values = [coordinator.schedule(work, (number,)) for number in range(30)]
    try:
        coordinator.join()
    except ms.errors.WorkerLostError as raised:
        error = raised
    for number, value in enumerate(values):
        try:
            assert value.fetch() == number
        except ms.errors.WorkerLostError:
            assert number == 7
        except ms.errors.CancelledError as cancelled:
            assert "Schedule it again" in str(cancelled)
print("error:", error)
"""
)


@pytest.mark.quick("map")
@pytest.mark.parametrize("how", ["map", "join"])
def test_a_closure_that_kills_its_workers_fails(tmp_path, monkeypatch, how):
    done = start(tmp_path, monkeypatch, 5, "1", "[]", how, program=KILLER).finish(40)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("error:")]
    assert "work #7, called as work(7), was running on each of 2 workers" in line
    text = ours(done.stderr)
    assert text.count("is lost") == 2, text
    assert text.count("work #7, called as work(7)") == 2, text
    assert not left_over(tmp_path)


ITERATORS = (
    PROGRAM.partition("def work(")[0]
    + """
def make():
    return ms.data.Dataset.range(1000)
def take(iterator):
    time.sleep(0.005)
    value = int(next(iterator))
    if rank in victims and value == 5:
        die()
    return rank, value
if strategy.cluster_resolver.task_type != "chief":
    strategy.serve()
    sys.exit()
coordinator = ms.coordinator.ClusterCoordinator(strategy)
dataset = coordinator.create_per_worker_dataset(make)
for count in (100, 20):
    iterator = iter(dataset)
    values = [coordinator.schedule(take, (iterator,)) for _ in range(count)]
    coordinator.join()
    seen = {}
    for taker, value in coordinator.fetch(values):
        seen.setdefault(taker, []).append(value)
    all_of = {taker: sorted(found) == list(range(len(found))) for taker, found in seen.items()}
    print(count, all_of)
    print("lost", len(seen.pop(victims[0], [])), "left", sum(map(len, seen.values())))
"""
)


def test_iterators_of_a_lost_worker_are_gone(tmp_path, monkeypatch):
    done = start(tmp_path, monkeypatch, 4, "1", "[3]", "", program=ITERATORS).finish(40)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stdout + done.stderr
    assert "False" not in done.stdout  # no element is left out, and none comes twice
    assert lines[1] == "lost 5 left 95"  # its own run again on the other one's iterator
    assert lines[3] == "lost 0 left 20"
    assert ours(done.stderr).count("is lost") == 1, done.stderr
    assert not left_over(tmp_path)


CAMPAIGN = (
    PROGRAM.partition('print("tolerant:"')[0].replace(
        "rank = strategy.rank",
        """    table = ms.Variable(np.full(3000, 7.0), name="table")
rank = strategy.rank
def add(number, argument):
    read = table.value()
    assert (read == 7).all() and (argument == number).all(), (number, read[0], argument[0])
    return work(number), argument""",
        1,
    )
    + """
count, in_push = 300, set(range(10, 300, 25))
def scheduled(number):
    if number in in_push:
        return coordinator.schedule(push, (number,))
    argument = np.full((256, 257, 3000)[number % 3], float(number))
    return coordinator.schedule(add, (number, argument))
def number_of(value):
    if isinstance(value, int):
        return value
    number, argument = value
    assert (argument == number).all(), number
    return number
values = []
print("tolerant", flush=True)
try:
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    values = [scheduled(number) for number in range(count)]
    coordinator.join()
    assert list(map(number_of, coordinator.fetch(values))) == list(range(count))
    last = large.numpy()
    assert (last == last[0]).all() and int(last[0]) in in_push
    print("total", int(counter.numpy()) + len(in_push))
    print("joined", flush=True)
except ms.errors.UnavailableError as error:
    for number, value in enumerate(values):
        try:
            assert number_of(value.fetch()) == number
        except (
            ms.errors.CancelledError, ms.errors.UnavailableError, ms.errors.WorkerLostError
        ):
            continue
    print("unavailable:", error, flush=True)
except ms.errors.WorkerLostError as error:
    print("unlucky:", error, flush=True)
"""
)


VICTIMS = [(0, [1]), (0, [2, 3]), (0, [0]), (1, [1]), (1, [3]), (1, [2, 3]), (1, [0])]
"""Numbers of servers, and ranks that are killed one after the other."""


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * int(os.environ.get("MPISTRAT_KILLS", "3")))
def test_kills_at_random_moments(tmp_path, monkeypatch):
    """Run more by ``MPISTRAT_KILLS=100`` (kills) and ``KILLS_SEED=8``, by hand."""
    # A closure counts at most twice for each death: a worker has one that has written and waits for
    # its result to leave, and runs the next one.
    kills = int(os.environ.get("MPISTRAT_KILLS", "3"))
    monkeypatch.delenv("MPISTRAT_KILLS", raising=False)  # programs refuse unknown settings
    draw = random.Random(int(os.environ.get("KILLS_SEED", "7")))
    seen = collections.Counter()
    number = 0
    while seen["kills"] < kills:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        num_ps, victims = draw.choice(VICTIMS)
        launched = start(folder, monkeypatch, 4, str(num_ps), "[]", "", program=CAMPAIGN)
        launched.wait_for_output("tolerant")
        for victim in victims:
            time.sleep(draw.uniform(0.0, 1.0 / len(victims)))
            with contextlib.suppress(ProcessLookupError):  # it had ended before
                os.kill(int((folder / f"process-{victim}").read_text()), signal.SIGKILL)
                seen["kills"] += 1
        done = launched.finish(40)
        what = (number, num_ps, victims, done.returncode, done.stdout, done.stderr)
        assert not left_over(folder), what
        assert "AssertionError" not in done.stderr, what
        endings = ("joined", "unavailable", "unlucky")
        ending = next((e for e in endings if e in done.stdout), "ended")
        role = "chief" if 0 in victims else "ps" if num_ps and 1 in victims else "worker"
        seen[f"{role}: {ending}"] += 1
        if "joined" in done.stdout:
            total = int(done.stdout.partition("total ")[2].split()[0])
            assert 300 <= total <= 300 + 2 * len(victims), what
        elif "unavailable" in done.stdout:
            # The server, or every worker.
            assert (num_ps, victims) in ((1, [1]), (1, [2, 3])), what
        elif "unlucky" in done.stdout:
            # The same closure was running on both when they were killed.
            assert len(victims) == 2, what
        else:
            assert victims == [0], what
            assert done.returncode != 0, what
    print(dict(seen))
