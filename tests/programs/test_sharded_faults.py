"""A rank that is killed, raises or ends while rows of a sharded variable travel: all end."""

import pytest

from mpistrat.checkpoint.reader import open_checkpoint
from tests.programs.running import Case, catch_each, check, check_output, run_case

pytestmark = pytest.mark.launches

CALLS = {
    "lookup": ("lookup", "table.lookup(ids)"),
    "value": ("value of sharded variable", "table.value()"),
    "index": ("read of sharded variable", "table[1:900]"),
    "scatter": ("Variable.scatter_add", "strategy.run(table.scatter_add, args=(slices,))"),
    "assign": ("Variable.assign_add", "strategy.run(table.assign_add, args=(whole,))"),
    "step": ("SGD.apply_gradients", "sgd.apply_gradients([(slices, table)])"),
    "write": ("Checkpoint.write", 'checkpoint.write("run.h5")'),
    "parallel write": ("Checkpoint.write", 'checkpoint.write("run.h5", parallel=True)'),
}
SETUP = """
strategy.close()
strategy = ms.MPIStrategy(variable_partitioner=ms.partitioners.FixedShardsPartitioner(9))
ids = np.arange(0, 100_000, 7)
whole = np.ones((100_000, 16), np.float32)
slices = ms.IndexedSlices(whole[ids], ids)
with strategy.scope():
    table = ms.Variable(whole, name="table", aggregation=ms.VariableAggregation.SUM)
    sgd = ms.optimizers.SGD(0.1, momentum=0.5)
sgd.apply_gradients([(slices, table)])
checkpoint = ms.Checkpoint(table=table, sgd=sgd)
"""
WAYS = {
    "killed": ("os.kill(os.getpid(), 9)", ()),
    "raises": (
        'raise ZeroDivisionError("the loss is gone")',
        ("rank 1 of 3 failed at <guilty>", "ZeroDivisionError: the loss is gone"),
    ),
    "ends": ("sys.exit(0)", ("ranks 0, 2: {kind}", "at <call>")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_does_not_come_ends_the_job(tmp_path, call, way):
    (kind, code), (action, expected) = CALLS[call], WAYS[way]
    program = f"""{SETUP}
for number in range(6):
    if rank == 1 and number == 3:
        {action}  #> guilty
    {code}  #> call
"""
    case = Case(f"{call}, {way}", program, tuple(e.format(kind=kind) for e in expected), ranks=3)
    check(case, run_case(case, tmp_path / "job"))


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_meanwhile_ends_the_job(tmp_path, call):
    # At a moment that differs from run to run.
    program = f"""{SETUP}
import threading
def kill():
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
if rank == 1:
    threading.Thread(target=kill).start()
while True:
    {CALLS[call][1]}
"""
    case = Case(f"{call}, killed in the middle", program, ranks=3)
    check(case, run_case(case, tmp_path / "job"))
    checkpoint = tmp_path / "job" / "run.h5"
    if "write" in call and checkpoint.exists():
        with open_checkpoint(str(checkpoint)) as reader:
            reader.verify()


def test_a_rank_that_skips_is_named_on_all(tmp_path):
    cases = []
    for kind, code in CALLS.values():
        program = f"""{SETUP}
if rank != 1:
    {code}  #> call
strategy.reduce("max", 1)  #> other
"""
        expected = (f"ranks 0, 2: {kind}", "rank 1: reduce MAX", "at <call>", "at <other>")
        cases.append(Case(code, program, expected, ranks=3))
    caught = catch_each(cases, tmp_path, 3)
    for case in cases:
        for text in caught[case.name]:
            assert "CollectiveMismatchError" in text
            check_output(case, text)
