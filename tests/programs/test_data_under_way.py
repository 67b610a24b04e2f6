"""Ranks that are killed, stopped or forked while data is under way."""

import pytest

from mpistrat.testing import launch
from tests.programs.running import (
    PRELUDE,
    Case,
    assert_nothing_is_left,
    check,
    ours,
    run_case,
    run_unseen,
)

pytestmark = pytest.mark.launches

IN_THE_MIDDLE = """
import threading
channel = strategy.extended._collectives.channel
before = channel.ledger.sequence
def act():
    # Arrays may be copied before the ranks agree.
    while channel.ledger.sequence == before or channel.pending or not channel.is_moving_data():
        time.sleep(0.0002)
    time.sleep(0.003)  # of some 30 ms
    os.kill(os.getpid(), {signal})
if rank == 1:
    threading.Thread(target=act, daemon=True).start()
array = np.zeros(2**25, np.float32)
implementation = ms.CommunicationImplementation.{implementation}
def step():
    replica = ms.get_replica_context()
    options = ms.CommunicationOptions(implementation=implementation)
    {call}  #> call
    os.write(1, b"It was over before.")
strategy.run(step)
"""
CALLS = {
    "all_reduce": 'replica.all_reduce("sum", array, options)',
    "start_all_reduce": 'replica.start_all_reduce("sum", array, options).wait()',
}


def in_the_middle(signal, implementation, call, *expected, **others):
    program = IN_THE_MIDDLE.format(signal=signal, implementation=implementation, call=CALLS[call])
    name = f"{signal} in {call} by {implementation}"
    return Case(name, program, expected, ranks=3, **others)


WAYS = [("all_reduce", "SHARED"), ("start_all_reduce", "SHARED"), ("all_reduce", "MPI")]


@pytest.mark.quick("all_reduce-SHARED")
@pytest.mark.parametrize(("call", "implementation"), WAYS)
def test_a_rank_is_killed(tmp_path, call, implementation):
    # The launcher sees it first, and ends the job before anybody can say why.
    case = in_the_middle(9, implementation, call)
    done = run_case(case, tmp_path / "case")
    check(case, done)
    assert implementation == "MPI" or "over before" not in done.all_text
    assert_nothing_is_left(tmp_path / "case")


@pytest.mark.parametrize(("call", "implementation"), WAYS)
def test_a_rank_is_stopped(tmp_path, call, implementation):
    case = in_the_middle(
        *(19, implementation, call),
        "CollectiveTimeoutError: The data awaited at <call> did not come in 2 s:",
        "rank 1: stopped: process",
        timeout_s=2,
        waits=True,
    )
    done = run_case(case, tmp_path / "case")
    check(case, done)
    # Over MPI a rank may have sent its part, and another one all that it needs.
    assert implementation == "MPI" or "over before" not in done.all_text
    assert_nothing_is_left(tmp_path / "case")


@pytest.mark.quick("all_reduce")
@pytest.mark.parametrize("call", CALLS)
def test_the_others_end_also_where_the_launcher_notices_nothing(tmp_path, call):
    case = in_the_middle(9, "SHARED", call)
    stdout, stderr = run_unseen(case, tmp_path)
    assert "over before" not in stdout
    assert "rank 1 is gone: process" in ours(stderr)
    assert_nothing_is_left(tmp_path)


FORK = """
def check(times):
    for number in range(times):
        for length in (3, 100_000):
            total = strategy.reduce("sum", np.full(length, rank + number, np.float32))
            assert (total == size * last // 2 + size * number).all()
check(5)
handles = []
def begin():
    replica = ms.get_replica_context()
    handles.append(replica.start_all_reduce("sum", np.full(3_000_000, rank, np.float32)))
strategy.run(begin)
kept = strategy.reduce("max", np.full(100_000, rank))
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        {child}
    finally:
        sys.stdout.flush()
        os._exit(7)
check(300)
assert (handles[0].wait() == size * last // 2).all()
assert (kept == last).all()
kept[:] = 6
os.write(writer, b"x")
assert os.waitpid(pid, 0)[1] == 7 << 8
assert (kept == 6).all()
check(5)
"""
CHILDREN = {
    "compute": "kept[:50_000] = 5; handles.clear(); os.read(reader, 1); print(kept[-2:].sum())",
    "reduce": """
        try:
            strategy.reduce("sum", 1)
        except ms.errors.CollectiveError as error:
            print(error)""",
    "wait": """
        try:
            handles[0].wait()
        except RuntimeError as error:
            print(error)""",
}


@pytest.mark.quick("compute")
@pytest.mark.parametrize("child", CHILDREN)
def test_a_fork_disturbs_nobody(tmp_path, child):
    script = tmp_path / "program.py"
    text = PRELUDE + FORK.format(child=CHILDREN[child])
    script.write_text("import warnings\nwarnings.simplefilter('ignore')\n" + text)
    # Open MPI says that forks are not safe with what its transports may use.
    result = launch.run([script], 2, 40, env={"OMPI_MCA_mpi_warn_on_fork": "0"})
    assert (result.returncode, ours(result.stderr)) == (0, "")
    said = {"compute": "2", "reduce": "is a fork of rank", "wait": "is a fork"}[child]
    assert result.stdout.count(said) == 2


FORKING_THREAD = """
import threading
kept = strategy.reduce("max", np.full(100_000, rank))
ends = []
def fork():
    for number in range(15):
        pid = os.fork()
        if pid == 0:
            code = 7 if (kept == last).all() else 1
            kept[:] = -1
            os._exit(code)
        ends.append(os.waitpid(pid, 0)[1])
thread = threading.Thread(target=fork)
thread.start()
number = 0
while True:
    number += 1
    total = strategy.reduce("sum", np.full(50_000, rank + number, np.float32))
    assert (total == size * last // 2 + size * number).all()
    assert (kept == last).all()
    if number % 20 == 0 and strategy.reduce("max", int(thread.is_alive())) == 0:
        break
thread.join()
assert ends == [7 << 8] * 15, ends
"""


def test_a_thread_may_fork_while_collectives_go_on(tmp_path):
    script = tmp_path / "program.py"
    text = PRELUDE + FORKING_THREAD
    script.write_text("import warnings\nwarnings.simplefilter('ignore')\n" + text)
    result = launch.run([script], 2, 60, env={"OMPI_MCA_mpi_warn_on_fork": "0"})
    assert (result.returncode, ours(result.stderr)) == (0, "")
