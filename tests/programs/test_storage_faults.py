"""A rank that is killed, raises or ends in a step that ranks take in parts: all end."""

import pytest

from mpistrat.checkpoint.reader import open_checkpoint
from tests.programs.running import Case, catch_each, check, check_output, run_case

pytestmark = pytest.mark.launches

SETUPS = {
    "central": """
strategy.close()
strategy = ms.CentralStorageStrategy()
with strategy.scope():
    weight = ms.Variable(np.ones(700_001, np.float32), aggregation=ms.VariableAggregation.SUM)
    adam = ms.optimizers.Adam(0.1)
gradient = np.ones(weight.shape, np.float32)
""",
    "buffers": """
strategy.close()
strategy = ms.CentralStorageStrategy()
with strategy.scope():
    weight = ms.Variable(np.ones(700_001, np.float32), aggregation=ms.VariableAggregation.SUM)
    adam = ms.optimizers.Adam(0.1)
[gradient] = strategy.extended.gradient_buffers([weight])
""",
    "sharded slots": """
with strategy.scope():
    weight = ms.Variable(np.ones(700_001, np.float32), aggregation=ms.VariableAggregation.SUM)
    adam = ms.optimizers.Adam(0.1, sharded_slots=True)
gradient = np.ones(weight.shape, np.float32)
""",
}
CALLS = {
    "step": ("Adam.apply_gradients", "strategy.run(adam.apply_gradients, args=(pairs,))"),
    "write": ("Variable.assign_add", "strategy.run(weight.assign_add, args=(gradient,))"),
    "save": ("Checkpoint.write", 'checkpoint.write("run.h5", parallel=True)'),
    "update": ("update", "strategy.extended.update(weight, lambda v: v.assign(gradient))"),
}
WAYS = {
    "killed": ("os.kill(os.getpid(), 9)", ()),
    "raises": (
        'raise ZeroDivisionError("the loss is gone")',
        ("rank 1 of 3 failed at <guilty>", "ZeroDivisionError: the loss is gone"),
    ),
    "ends": ("sys.exit(0)", ("ranks 0, 2: {kind}", "at <call>")),
}
START = """
pairs = [(gradient, weight)]
strategy.run(adam.apply_gradients, args=(pairs,))
checkpoint = ms.Checkpoint(weight=weight, adam=adam)
"""


def _calls_of(setup):
    # Under MPIStrategy an update sends nothing, so no rank waits in it.
    return [call for call in CALLS if call != "update" or setup != "sharded slots"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("setup", "call"), [(setup, call) for setup in SETUPS for call in _calls_of(setup)]
)
def test_a_rank_that_does_not_come_ends_the_job(tmp_path, setup, call, way):
    (kind, code), (action, expected) = CALLS[call], WAYS[way]
    program = f"""{SETUPS[setup]}{START}
for number in range(6):
    if rank == 1 and number == 3:
        {action}  #> guilty
    {code}  #> call
"""
    case = Case(f"{call}, {way}", program, tuple(e.format(kind=kind) for e in expected), ranks=3)
    check(case, run_case(case, tmp_path / "job"))


@pytest.mark.parametrize("call", ["step", "save"])
@pytest.mark.parametrize("setup", SETUPS)
def test_a_rank_that_is_killed_meanwhile_ends_the_job(tmp_path, setup, call):
    # At a moment that differs from run to run.
    program = f"""{SETUPS[setup]}{START}
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
    if checkpoint.exists():
        with open_checkpoint(str(checkpoint)) as reader:
            reader.verify()


def test_a_rank_that_skips_is_named_on_all(tmp_path):
    cases = []
    for setup in SETUPS:
        for call in _calls_of(setup):
            kind, code = CALLS[call]
            program = f"""{SETUPS[setup]}{START}
if rank != 1:
    {code}  #> call
strategy.reduce("max", 1)  #> other
"""
            expected = (f"ranks 0, 2: {kind}", "rank 1: reduce MAX", "at <call>", "at <other>")
            cases.append(Case(f"{call}, {setup}", program, expected, ranks=3))
    caught = catch_each(cases, tmp_path, 3)
    for case in cases:
        for text in caught[case.name]:
            assert "CollectiveMismatchError" in text
            check_output(case, text)
