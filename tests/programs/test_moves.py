"""A rank that is killed, raises or skips in a collective of replicas: all end, in seconds."""

import pytest

from tests.programs.running import Case, catch_each, check, check_output, run_case

pytestmark = pytest.mark.launches

CALLS = {
    "reduce_scatter": 'reduce_scatter("sum", own)',
    "all_to_all": "all_to_all(own)",
    "broadcast": "broadcast(own if rank == 0 else None)",
    "scatter": "scatter(own if rank == 0 else None)",
    "shift": "shift(own)",
    "scan": 'scan("sum", own)',
}
OBJECTS = {
    "barrier": "barrier()",
    "broadcast_object": "broadcast_object({7: own[:9]})",
    "all_gather_object": "all_gather_object({7: own[:9]})",
}
WAYS = {
    "killed": ("os.kill(os.getpid(), 9)", ()),
    "raises": (
        'raise ZeroDivisionError("the loss is gone")',
        ("rank 1 of 3 failed at <guilty>", "ZeroDivisionError: the loss is gone"),
    ),
    "ends": ("return", ("ranks 0, 2: {kind}", "at <call>")),
}


def case_of(kind, way):
    action, expected = WAYS[way]
    program = f"""
own = np.arange(600_000.0)
def steps():
    replica = ms.get_replica_context()
    for number in range(20):
        if rank == 1 and number == 9:
            {action}  #> guilty
        replica.{(CALLS | OBJECTS)[kind]}  #> call
strategy.run(steps)
"""
    return Case(f"{kind}, {way}", program, tuple(e.format(kind=kind) for e in expected), ranks=3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*CALLS, *OBJECTS])
def test_a_rank_that_does_not_come_ends_the_job(tmp_path, kind, way):
    case = case_of(kind, way)
    check(case, run_case(case, tmp_path / "job"))


@pytest.mark.parametrize("kind", CALLS)
def test_a_rank_that_is_killed_while_parts_move_ends_the_job(tmp_path, kind):
    # At a moment that differs from run to run: most of the time is spent in the transfer.
    program = f"""
import threading
own = np.arange(2_000_000.0)
def kill():
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
def steps():
    replica = ms.get_replica_context()
    while True:
        replica.{CALLS[kind]}
if rank == 1:
    threading.Thread(target=kill).start()
strategy.run(steps)
"""
    case = Case(f"{kind}, killed in the middle", program, ranks=3)
    check(case, run_case(case, tmp_path / "job"))


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_close_ends_the_job(tmp_path, way):
    action, expected = WAYS[way]
    program = f"""
strategy.reduce("sum", 1)
if rank == 1:
    {action.replace("return", "sys.exit(0)")}  #> guilty
strategy.close()  #> call
"""
    expected = tuple(each.format(kind="close") for each in expected)
    case = Case(f"close, {way}", program, expected, ranks=3)
    check(case, run_case(case, tmp_path / "job"))


def test_a_rank_that_skips_a_collective_is_named_on_all(tmp_path):
    cases = []
    for kind, call in (CALLS | OBJECTS).items():
        program = f"""
own = np.arange(6.0)
def step():
    replica = ms.get_replica_context()
    if rank != 1:
        replica.{call}  #> call
    replica.all_reduce("max", own)  #> other
strategy.run(step)
"""
        expected = (f"ranks 0, 2: {kind}", "rank 1: all_reduce MAX", "at <call>", "at <other>")
        cases.append(Case(kind, program, expected, ranks=3))
    caught = catch_each(cases, tmp_path, 3)
    for case in cases:
        for text in caught[case.name]:
            assert "CollectiveMismatchError" in text
            check_output(case, text)
