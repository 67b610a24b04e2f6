"""A rank that comes late, after the others have given up, learns it at once."""

import re
import signal

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours

pytestmark = pytest.mark.launches

TELL = """
def tell(text):
    with open(f"told-{rank}", "a") as file:
        file.write(f"{rank}: {text}\\n")

def wait_for_others():
    # However slow they are: until each has told something, and a second longer.
    end_s = time.monotonic() + 30
    while not all(os.path.exists(f"told-{each}") for each in range(size) if each != rank):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    time.sleep(1)
"""
LATE = """
options = ms.CommunicationOptions(timeout_seconds=1)
strategy = ms.MPIStrategy(communication_options=options)
if rank == last:
    wait_for_others()
try:
    tell(strategy.reduce("sum", np.full(LENGTH, rank + 1.0))[0])
except ms.errors.CollectiveTimeoutError as error:
    tell(str(error).split("\\n")[0])
"""
RECOVERED = """
total = ms.MPIStrategy().reduce("sum", np.full(LENGTH, 1.0))[0]
assert total == size, total
tell("recovered")
"""


def run(tmp_path, program, ranks, length, **variables):
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + TELL + program.replace("LENGTH", str(length)))
    variables = {"MPISTRAT_TIMEOUT_S": "20", "MPISTRAT_EXIT_GRACE_S": "1"} | variables
    result = launch.run([script], ranks, 60, tmp_path, variables)
    told = "".join(path.read_text() for path in sorted(tmp_path.glob("told-*")))
    return sorted(re.sub(r"program.py:\d+", "<call>", told).splitlines()), ours(result.stderr)


def expected_lines(ranks):
    waiting = "rank 0" if ranks == 2 else f"ranks 0-{ranks - 2}"
    for rank in range(ranks - 1):
        yield (
            f"{rank}: Rank {ranks - 1} did not come to reduce at <call> within the timeout of 1 s, "
            f"as rank {rank} of {ranks} did:"
        )
    yield f"{ranks - 1}: {waiting} gave up, so reduce at <call> can never complete:"


NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}


@pytest.mark.parametrize(
    ("ranks", "length", "variables"),
    [(2, 1_000_000, {}), (3, 1, {}), (4, 1_000_000, {}), (2, 1, NODES), (2, 1_000_000, NODES)],
    ids=["2-large", "3-small", "4-large", "2 nodes-small", "2 nodes-large"],
)
def test_all_learn_it_and_can_make_a_new_strategy(tmp_path, ranks, length, variables):
    lines, stderr = run(tmp_path, LATE + RECOVERED, ranks, length, **variables)
    recovered = [f"{rank}: recovered" for rank in range(ranks)]
    assert lines == sorted([*expected_lines(ranks), *recovered]), stderr


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_without_sockets_a_late_rank_waits_for_its_own_limit(tmp_path, length):
    lines, stderr = run(tmp_path, LATE, 2, length, MPISTRAT_WATCH="off", MPISTRAT_EXIT_GRACE_S="6")
    assert [line[:35] for line in lines] == [
        "0: Some ranks did not come to reduc",
        "1: Some ranks did not come to reduc",
    ], stderr


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_a_rank_that_was_stopped_and_continues(tmp_path, length):
    program = f"""
    import subprocess
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), {int(signal.SIGSTOP)})
"""
    program = LATE.replace("    wait_for_others()", program) + "time.sleep(6)"
    lines, stderr = run(tmp_path, program, 2, length)
    assert len(lines) == 2, (lines, stderr)
    assert "gave up, so reduce" in lines[1]


def test_a_wait_that_is_broken_off_and_caught_ends_those_of_the_others(tmp_path):
    program = """
import signal
def ring(*_):
    raise InterruptedError("alarm")
if rank == 0:
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
if rank == last:
    time.sleep(2)
try:
    strategy.reduce("sum", np.ones(LENGTH))
except InterruptedError:
    time.sleep(4)
except ms.errors.CollectiveError as error:
    tell("".join(str(error).split("\\n")[:2]))
"""
    lines, stderr = run(tmp_path, program, 3, 10)
    assert lines == [
        f"{rank}: rank 0 left, so reduce at <call> can never complete:  rank 0: its wait "
        "for reduce at <call> was interrupted by InterruptedError"
        for rank in (1, 2)
    ], stderr


@pytest.mark.parametrize(("ranks", "length"), [(2, 1_000_000), (3, 1), (4, 1_000_000)])
@pytest.mark.parametrize("place", ["run", "merge_call", "update"])
def test_a_caught_failure_ends_the_waits_of_the_others(tmp_path, ranks, length, place):
    program = f"""
def fail(*_):
    raise ZeroDivisionError
def step():
    if rank == last and {place == "run"}:
        fail()
    if rank == last and {place == "merge_call"}:
        ms.get_replica_context().merge_call(fail)
    return ms.get_replica_context().all_reduce("sum", np.ones(LENGTH))
with strategy.scope():
    variable = ms.Variable(0.0)
try:
    if rank == last and {place == "update"}:
        strategy.extended.update(variable, fail)
    strategy.run(step)
except ZeroDivisionError:
    wait_for_others()
    try:
        strategy.reduce("sum", np.ones(LENGTH))
    except ms.errors.CollectiveError as error:
        tell(str(error).split("\\n")[0])
except ms.errors.CollectiveError as error:
    tell("".join(str(error).split("\\n")[:2]))
strategy = ms.MPIStrategy()
assert strategy.reduce("sum", np.ones(LENGTH))[0] == size
tell("recovered")
"""
    lines, stderr = run(tmp_path, program, ranks, length)
    waiting = "rank 0" if ranks == 2 else f"ranks 0-{ranks - 2}"
    assert [line for line in lines if "recovered" in line] == [
        f"{rank}: recovered" for rank in range(ranks)
    ], stderr
    failed = f"{ranks - 1} failed, so all_reduce at <call> can never complete:  rank {ranks - 1}: "
    why = "ZeroDivisionError at <call> has left run, merge_call or update"
    for rank in range(ranks - 1):
        # Another waiting rank may be faster than the one that failed.
        (told,) = (line for line in lines if line.startswith(f"{rank}: rank"))
        assert why in told, lines
        assert failed in told or f"for rank {ranks - 1} (Zero" in told, lines
    # A rank that has learnt it from another one does not report it again.
    first = [waiting, *(f"rank {rank}" for rank in range(ranks - 1))]
    late = {
        f"{ranks - 1}: {each} gave up, so reduce at <call> can never complete:" for each in first
    }
    assert late & set(lines), lines


def test_failures_on_all_ranks_at_different_times_end_nothing(tmp_path):
    program = """
def step(number):
    if number % 2:
        time.sleep(0.1 * rank)
        raise ZeroDivisionError
for number in range(12):
    try:
        strategy.run(step, args=(number,))
    except ZeroDivisionError:
        time.sleep(1.5 * (last - rank) * (number == 1))
    if number % 4 == 3:
        assert strategy.reduce("sum", 1) == size
tell("done")
"""
    lines, stderr = run(tmp_path, program, 3, 1)
    assert lines == [f"{rank}: done" for rank in range(3)], stderr
    assert stderr == ""
