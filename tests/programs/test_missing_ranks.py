"""A rank that is killed, raises, ends or skips a call that the others make: all end, or are told.

The calls move parts of arrays, rows of sharded variables, or storage that ranks update in parts.
"""

import itertools
import textwrap
from typing import NamedTuple

import pytest

from mpistrat.checkpoint.reader import open_checkpoint
from tests.programs.running import Case, catch_each, check, check_output, run_case

pytestmark = pytest.mark.launches

SHARDED = """
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
STORAGE = """
strategy.close()
strategy = ms.{strategy}()
with strategy.scope():
    weight = ms.Variable(np.ones(700_001, np.float32), aggregation=ms.VariableAggregation.SUM)
    adam = ms.optimizers.Adam(0.1{options})
gradient = np.ones(weight.shape, np.float32)
if {has_buffers}:
    [gradient] = strategy.extended.gradient_buffers([weight])
pairs = [(gradient, weight)]
strategy.run(adam.apply_gradients, args=(pairs,))
checkpoint = ms.Checkpoint(weight=weight, adam=adam)
"""
CENTRAL = {"strategy": "CentralStorageStrategy", "options": ""}
SLOTS = {"strategy": "MPIStrategy", "options": ", sharded_slots=True"}
SETUPS = {
    "moves": "own = np.arange(2_000_000.0)\n",
    "sharded": SHARDED,
    "central": STORAGE.format(**CENTRAL, has_buffers=False),
    "buffers": STORAGE.format(**CENTRAL, has_buffers=True),
    "sharded slots": STORAGE.format(**SLOTS, has_buffers=False),
}
STORAGE_CALLS = {
    "step": ("Adam.apply_gradients", "strategy.run(adam.apply_gradients, args=(pairs,))"),
    "write": ("Variable.assign_add", "strategy.run(weight.assign_add, args=(gradient,))"),
    "save": ("Checkpoint.write", 'checkpoint.write("run.h5", parallel=True)'),
    "update": ("update", "strategy.extended.update(weight, lambda v: v.assign(gradient))"),
}
CALLS = {
    "moves": {
        "reduce_scatter": ("reduce_scatter", 'replica.reduce_scatter("sum", own)'),
        "all_to_all": ("all_to_all", "replica.all_to_all(own)"),
        "broadcast": ("broadcast", "replica.broadcast(own if rank == 0 else None)"),
        "scatter": ("scatter", "replica.scatter(own if rank == 0 else None)"),
        "shift": ("shift", "replica.shift(own)"),
        "scan": ("scan", 'replica.scan("sum", own)'),
        "barrier": ("barrier", "replica.barrier()"),
        "broadcast_object": ("broadcast_object", "replica.broadcast_object({7: own[:9]})"),
        "all_gather_object": ("all_gather_object", "replica.all_gather_object({7: own[:9]})"),
    },
    "sharded": {
        "lookup": ("lookup", "table.lookup(ids)"),
        "value": ("value of sharded variable", "table.value()"),
        "index": ("read of sharded variable", "table[1:900]"),
        "scatter": ("Variable.scatter_add", "strategy.run(table.scatter_add, args=(slices,))"),
        "assign": ("Variable.assign_add", "strategy.run(table.assign_add, args=(whole,))"),
        "step": ("SGD.apply_gradients", "sgd.apply_gradients([(slices, table)])"),
        "write": ("Checkpoint.write", 'checkpoint.write("run.h5")'),
        "parallel write": ("Checkpoint.write", 'checkpoint.write("run.h5", parallel=True)'),
    },
    "central": STORAGE_CALLS,
    "buffers": STORAGE_CALLS,
    # Under MPIStrategy an update sends nothing, so no rank waits in it.
    "sharded slots": {name: STORAGE_CALLS[name] for name in ("step", "write", "save")},
}
WITHOUT_TRANSFER = ("barrier", "broadcast_object", "all_gather_object")
WAYS = {
    "killed": ("os.kill(os.getpid(), 9)", ()),
    "raises": (
        'raise ZeroDivisionError("the loss is gone")',
        ("rank 1 of 3 failed at <guilty>", "ZeroDivisionError: the loss is gone"),
    ),
    "ends": ("sys.exit(0)", ("ranks 0, 2: {kind}", "<call>")),
}


class Call(NamedTuple):
    """A call that all ranks are to make."""

    setup: str
    name: str

    @property
    def kind(self):
        return CALLS[self.setup][self.name][0]

    @property
    def code(self):
        return CALLS[self.setup][self.name][1]

    def program(self, steps, start=""):
        """Return a program of `steps`, which are in a function given to run where they must."""
        head = SETUPS[self.setup] + start
        if self.setup != "moves":
            return head + steps
        body = textwrap.indent(f"replica = ms.get_replica_context()\n{steps}", "    ")
        return f"{head}def fn():\n{body}\nstrategy.run(fn)\n"


EVERY = [Call(setup, name) for setup, calls in CALLS.items() for name in calls]
MEANWHILE = [
    call
    for call in EVERY
    if call.name not in (*WITHOUT_TRANSFER, "update")
    and (call.name != "write" or call.setup == "sharded")
]


def names_of(values):
    return [f"{each.setup}-{each.name}" if isinstance(each, Call) else each for each in values]


# The others wait in a round, which is the same for all calls: each call has one of the ways.
ONE_WAY_EACH = list(zip(EVERY, itertools.cycle(WAYS), strict=False))


@pytest.mark.parametrize(
    ("call", "way"), ONE_WAY_EACH, ids=["-".join(names_of(each)) for each in ONE_WAY_EACH]
)
def test_a_rank_that_does_not_come_ends_the_job(tmp_path, call, way):
    action, expected = WAYS[way]
    if call.setup == "moves":
        action = action.replace("sys.exit(0)", "return")
    steps = f"""
for number in range(6):
    if rank == 1 and number == 3:
        {action}  #> guilty
    {call.code}  #> call
"""
    expected = tuple(each.format(kind=call.kind) for each in expected)
    case = Case(f"{call.name}, {way}", call.program(steps), expected, ranks=3)
    check(case, run_case(case, tmp_path / "job"))


KILLED_MEANWHILE = """
import threading
def kill():
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
if rank == 1:
    threading.Thread(target=kill).start()
"""


@pytest.mark.parametrize("call", MEANWHILE, ids=names_of(MEANWHILE))
def test_a_rank_that_is_killed_meanwhile_ends_the_job(tmp_path, call):
    # At a moment that differs from run to run: most of the time is spent in the transfer.
    program = call.program(f"while True:\n    {call.code}\n", KILLED_MEANWHILE)
    case = Case(f"{call.name}, killed in the middle", program, ranks=3)
    check(case, run_case(case, tmp_path / "job"))
    checkpoint = tmp_path / "job" / "run.h5"
    if checkpoint.exists():
        with open_checkpoint(str(checkpoint)) as reader:
            reader.verify()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_close_ends_the_job(tmp_path, way):
    action, expected = WAYS[way]
    program = f"""
strategy.reduce("sum", 1)
if rank == 1:
    {action}  #> guilty
strategy.close()  #> call
"""
    expected = tuple(each.format(kind="close") for each in expected)
    case = Case(f"close, {way}", program, expected, ranks=3)
    check(case, run_case(case, tmp_path / "job"))


@pytest.mark.parametrize("setup", SETUPS)
def test_a_rank_that_skips_is_named_on_all(tmp_path, setup):
    owner, kind = ("replica", "all_reduce") if setup == "moves" else ("strategy", "reduce")
    cases = []
    for call in (each for each in EVERY if each.setup == setup):
        steps = f"""
if rank != 1:
    {call.code}  #> call
{owner}.{kind}("max", 1)  #> other
"""
        expected = (f"ranks 0, 2: {call.kind}", f'rank 1: {kind}("max"', "<call>", "<other>")
        cases.append(Case(call.name, call.program(steps), expected, ranks=3))
    caught = catch_each(cases, tmp_path, 3)
    for case in cases:
        for text in caught[case.name]:
            assert "CollectiveMismatchError" in text
            check_output(case, text)
