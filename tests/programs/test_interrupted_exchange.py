"""A signal handler that raises between two messages of ranks that have agreed already."""

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours

pytestmark = pytest.mark.launches

# Such a handler runs when a message has come, before the rank begins the next one.
RAISING = """
class Alarm(Exception):
    pass
transport = strategy.extended._collectives.channel.transport
method = transport.{method}
def interrupted(*arguments):
    setattr(transport, "{method}", method)
    method(*arguments)
    raise Alarm
with strategy.scope():
    weight = ms.Variable(np.ones(3), name="weight")
manager = ms.CheckpointManager(ms.Checkpoint(weight=weight), "saved")
if rank == last:
    transport.{method} = interrupted
caught = []
for step in range(3):
    try:
        {call}
    except (Alarm, ms.errors.MpistratError, ValueError) as error:
        caught.append(type(error).__name__)
        print(rank, error, flush=True)
assert rank != last or caught == ["Alarm", "CollectiveError", "CollectiveError"], caught
"""
CASES = {
    "a save": ("all_gather", "manager.save(step)", "CheckpointManager.save"),
    "reports": (
        "start_all_gather",
        'strategy.reduce("sum", np.ones(3 + rank))',
        "exchange of reports",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_others_do_not_wait_for_the_time_limit(tmp_path, case):
    method, call, said = CASES[case]
    program = PRELUDE + RAISING.format(method=method, call=call)
    (tmp_path / "program.py").write_text(program)
    variables = {"MPISTRAT_TIMEOUT_S": "300", "MPISTRAT_EXIT_GRACE_S": "1"}
    done = launch.run(["program.py"], 3, 40, cwd=tmp_path, env=variables)
    assert done.returncode != 0
    assert "was interrupted by Alarm on rank 2 of 3" in ours(done.stderr), done.stderr
    assert said in ours(done.stderr)
    assert not list(tmp_path.glob("saved/*.h5")) or case == "a save"


def test_an_error_of_an_unknown_class_is_named_on_all_ranks(tmp_path):
    program = """
class Odd(Exception):
    def __init__(self, code=0, other=0):
        super().__init__(*[code] * bool(code))
class State:
    def state_dict(self):
        if rank == 1:
            raise Odd(*given)
        return {}
    def load_state_dict(self, state):
        pass
for given in ((), (7, 8)):
    try:
        ms.Checkpoint(state=State(), weight=weight).write("x.h5")
    except Exception as error:
        print(f"{type(error).__name__}: {error}.", flush=True)
"""
    setup = 'with strategy.scope():\n    weight = ms.Variable(0.0, name="weight")\n'
    done = launch.run(["-c", PRELUDE + setup + program], 2, 40, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    others = [f"MpistratError: Odd: {text} (on rank 1 of 2)." for text in ("", "7")]
    assert lines == sorted([*others, "Odd: .", "Odd: 7."])
