"""A shard that fails, skips a collective or does another: every rank learns which, and where."""

import re

import pytest

from tests.programs.running import Case, catch_each, check, run_case

pytestmark = pytest.mark.launches

START = """
strategy.close()
strategy = ms.MPIStrategy(ranks_per_replica=2)
def steps():
    replica = ms.get_replica_context()
    for number in range(5):
        if rank == 1 and number == 3:
            {action}  #> guilty
        else:
            replica.shards.all_reduce("sum", 1.0)  #> shards
        replica.all_reduce("sum", 1.0)  #> replicas
"""
ELSEWHERE = "it waits in a collective of other ranks"
WAYS = {
    "skips": (
        "pass",
        ("Rank 1 did not come", f"rank 1: elsewhere: {ELSEWHERE}, barrier at <barrier>"),
    ),
    "does another": (
        'replica.shards.all_reduce("max", 1.0)',
        ('rank 0: all_reduce("sum"', "<shards>", 'rank 1: all_reduce("max"', "<guilty>"),
    ),
    "raises": (
        'raise ZeroDivisionError("the loss is gone")',
        ("rank 1 of 4 failed at <guilty>", "ZeroDivisionError: the loss is gone"),
    ),
    "killed": ("os.kill(os.getpid(), 9)", ()),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.quick if way == "skips" else ()) for way in WAYS]
)
def test_the_job_ends_and_says_why(tmp_path, way):
    action, expected = WAYS[way]
    program = f"{START.format(action=action)}strategy.run(steps)\nstrategy.barrier()  #> barrier\n"
    waits = way == "skips"
    case = Case(way, program, expected, timeout_s=3 if waits else 30, waits=waits)
    check(case, run_case(case, tmp_path / "job"))


def test_a_shard_that_skips_is_found_by_all_within_the_limit(tmp_path):
    program = f"""{START.format(action="pass")}
began = time.monotonic()
try:
    strategy.run(steps)
    strategy.barrier()
except ms.errors.CollectiveError as error:
    print(f"rank {{rank}} waited", time.monotonic() - began < 8, type(error).__name__, flush=True)
    print(str(error).replace("\\n", "; "), flush=True)
"""
    case = Case("caught", program, timeout_s=3, waits=True)
    text = run_case(case, tmp_path / "job").all_text
    assert sorted(re.findall(r"rank (\d) waited True Collective", text)) == [*"0123"], text
    assert re.search(rf"rank 1: elsewhere: {ELSEWHERE}, barrier at program.py:\d+", text), text


def test_disagreement_of_one_replica_reaches_the_others(tmp_path):
    # Each rank gets the table, of its own group or of the one that has failed.
    program = START.format(action='replica.shards.all_reduce("max", 1.0)')
    program += """
try:
    strategy.run(steps)
    strategy.barrier()
except ms.errors.CollectiveError as error:
    print(f"rank {rank} caught", 'rank 1: all_reduce("max"' in str(error), flush=True)
    time.sleep(3)  # else the others learn that this rank has ended
"""
    case = Case("caught", program, timeout_s=20)
    text = run_case(case, tmp_path / "job").all_text
    assert sorted(re.findall(r"rank (\d) caught True", text)) == [*"0123"], text


def test_the_next_strategy_is_sound_where_all_have_caught_it(tmp_path):
    # One replica of all ranks, so nobody waits in another group.
    program = """
strategy.close()
strategy = ms.MPIStrategy(ranks_per_replica=size)
def disagree():
    ms.get_replica_context().shards.all_reduce("sum" if rank else "max", 1.0)
try:
    strategy.run(disagree)
except ms.errors.CollectiveMismatchError:
    pass
strategy.close()
again = ms.MPIStrategy(ranks_per_replica=size)
total = again.run(lambda: ms.get_replica_context().shards.all_reduce("sum", 1.0))
assert total.values[0] == size
again.close()
raise ValueError("the end")
"""
    caught = catch_each([Case("again", program)], tmp_path, ranks=3)
    assert caught == {"again": ["ValueError: the end\n"] * 3}
