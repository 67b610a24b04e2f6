"""Programs in which ranks disagree, leave, fail or do not come, and what is said of them."""

from tests.programs.running import Case

DISAGREE = "CollectiveMismatchError: The ranks made different collective calls:"

MISMATCHES = [
    Case(
        "another collective",
        """
if rank == 2:
    strategy.gather(np.ones(3), 0)  #> guilty
else:
    strategy.reduce("sum", np.ones(3))  #> others
""",
        (DISAGREE, "rank 2: gather", "<guilty>", 'ranks 0-1, 3: reduce("sum"', "<others>"),
    ),
    Case(
        "another collective on half of the ranks",
        """
if rank < 2:
    strategy.gather(np.ones(3), 0)  #> one
else:
    strategy.reduce("sum", np.ones(3))  #> other
""",
        (
            *(DISAGREE, "ranks 0-1: gather", "<one>", 'ranks 2-3: reduce("sum"', "<other>"),
            "are collective calls: every rank must make both, in the same order.",
        ),
    ),
    Case(
        "another op",
        'strategy.reduce("max" if rank == 1 else "sum", np.ones(3))  #> call',
        (DISAGREE, 'rank 1: reduce("max"', 'ranks 0, 2-3: reduce("sum"', "<call>"),
    ),
    Case(
        "another dtype",
        'strategy.reduce("sum", np.ones(3, "f4" if rank == 3 else "f8"))  #> call',
        (
            DISAGREE,
            'rank 3: reduce("sum", float32 (3,))',
            'ranks 0-2: reduce("sum", float64',
            "<call>",
        ),
    ),
    Case(
        "another shape",
        'strategy.reduce("sum", np.ones(3 + (rank == 0)))  #> call',
        (
            DISAGREE,
            'rank 0: reduce("sum", float64 (4,))',
            'ranks 1-3: reduce("sum", float64 (3,))',
        ),
    ),
    Case(
        "another structure",
        """
value = {"a": np.ones(2), "b": np.ones(2)}
if rank == 1:
    value = {"a": np.ones(2), "c": np.ones(2)}
strategy.reduce("sum", value)  #> call
""",
        (DISAGREE, 'rank 1: reduce("sum"', 'ranks 0, 2-3: reduce("sum"', "<call>"),
    ),
    Case(
        "another root",
        """
device = f"/job:worker/task:{int(rank == 1)}/device:CPU:0"
strategy.extended.reduce_to("sum", np.ones(3), device)  #> call
""",
        (DISAGREE, "rank 1: reduce_to", "to rank 1", "ranks 0, 2-3: reduce_to", "<call>"),
    ),
    Case(
        "another axis",
        "strategy.gather(np.ones((2, 2)), int(rank == 1))  #> call",
        (DISAGREE, "rank 1: gather(axis 1", "ranks 0, 2-3: gather(axis 0", "<call>"),
    ),
    Case(
        "other options",
        """
options = ms.CommunicationOptions(deterministic=rank == 2)
def step():
    ms.get_replica_context().all_reduce("sum", np.ones(3), options)  #> call
strategy.run(step)
""",
        (DISAGREE, "rank 2: all_reduce", "deterministic=True", "ranks 0-1, 3:", "<call>"),
    ),
    Case(
        "another order",
        """
calls = [
    lambda: strategy.reduce("sum", 1),  #> reduce
    lambda: strategy.gather(np.ones(1), 0),  #> gather
]
for call in calls[::-1] if rank == 3 else calls:
    call()
""",
        (DISAGREE, "rank 3: gather", "<gather>", 'ranks 0-2: reduce("sum"', "<reduce>"),
    ),
    Case(
        "variables in another order",
        """
with strategy.scope():
    for name in ["b", "a"] if rank == 1 else ["a", "b"]:
        ms.Variable(1.0, name=name)  #> call
""",
        (DISAGREE, "rank 1: Variable of 'b'", "ranks 0, 2-3: Variable of 'a'", "<call>"),
    ),
    Case(
        "one collective skipped",
        """
def step(number):
    sum_up = ms.get_replica_context().all_reduce
    if (rank, number) != (2, 3):
        sum_up("sum", np.ones(3))  #> call
for number in range(6):
    strategy.run(step, args=(number,))
""",
        (DISAGREE, "rank 2: all_reduce", "after 5 runs", "ranks 0-1, 3:", "after 4 runs", "<call>"),
    ),
    Case(
        "another number of merge_calls",
        """
def merge(strategy, value):
    pass
def step():
    for _ in range(1 + (rank == 0)):
        ms.get_replica_context().merge_call(merge, args=(1,))
    sum_up = ms.get_replica_context().all_reduce
    sum_up("sum", 1)  #> call
strategy.run(step)
""",
        (DISAGREE, "rank 0: all_reduce", "2 merge_calls", "ranks 1-3:", "1 merge_calls", "<call>"),
    ),
    Case(
        "another number of runs",
        """
for _ in range(1 + (rank == 1)):
    strategy.run(int)
strategy.reduce("sum", 1)  #> call
""",
        (
            DISAGREE,
            'rank 1: reduce("sum"',
            "after 2 runs",
            "ranks 0, 2-3:",
            "after 1 runs",
            "<call>",
        ),
    ),
    Case(
        "an error caught on one rank",
        """
def step():
    if rank == 1:
        raise KeyError("sample")  #> failure
try:
    strategy.run(step)
except KeyError:
    pass
strategy.reduce("sum", 1)  #> call
""",
        (DISAGREE, 'rank 1: reduce("sum"', "KeyError at <failure>", "<call>"),
    ),
]


def behind_if(name, call, spoken):
    return Case(
        f"{name} behind if",
        f"""
with strategy.scope():
    loss = ms.metrics.Mean(name="loss")
    weight = ms.Variable(1.0, name="weight")
    optimizer = ms.optimizers.SGD(0.1)
    on_read = {{
        "synchronization": ms.VariableSynchronization.ON_READ,
        "aggregation": ms.VariableAggregation.SUM,
    }}
    total = ms.Variable(0.0, name="total", **on_read)
def make():
    with strategy.scope():
        return ms.Variable(1.0, name="late")  #> make
if rank == 0:
    {call}  #> guilty
strategy.reduce("sum", 1)  #> others
""",
        (
            DISAGREE,
            f"rank 0: {spoken}",
            "<make>" if call == "make()" else "<guilty>",
            'ranks 1-3: reduce("sum"',
            "<others>",
            "is a collective call: every rank must make it, not rank 0 alone.",
        ),
    )


BEHIND_IF = [
    behind_if("save", 'ms.Checkpoint(loss=loss).write("x.h5")', "Checkpoint.write"),
    behind_if("restore", 'ms.Checkpoint(loss=loss).restore("x.h5")', "Checkpoint.restore"),
    behind_if("SyncOnRead read", "print(total.numpy())", "read of SyncOnRead variable of 'total'"),
    behind_if("metric result", "print(loss.result())", "Mean.result of 'loss'"),
    behind_if("variable in a scope", "make()", "Variable of 'late'"),
    behind_if("assignment", "weight.assign(2.0)", "Variable.assign of 'weight'"),
    behind_if("update of an optimizer", "optimizer.apply_gradients([(1.0, weight)])", "SGD"),
]

DISAGREEMENTS = [*MISMATCHES, *BEHIND_IF]
"""Cases that every rank can catch, and go on with a new strategy."""

FAILING = [
    MISMATCHES[0],
    BEHIND_IF[0],
    Case(
        "bad arguments on one rank",
        'strategy.reduce("sum", np.ones((2, 3)), axis=2 if rank == 1 else 0)  #> call',
        ("rank 1 of 4 failed at <call>", "ValueError", "axis 2"),
    ),
    Case(
        "metric result at the end behind if",
        """
with strategy.scope():
    loss = ms.metrics.Mean(name="loss")
if rank == 0:
    print(loss.result())  #> guilty
""",
        (
            "CollectiveError: ranks 1-3 ended",
            "rank 0: Mean.result of 'loss'",
            "<guilty>",
            "is a collective call: every rank must make it, not rank 0 alone.",
        ),
    ),
]

LOOP = """
def step():
    sum_up = ms.get_replica_context().all_reduce
    return sum_up("sum", np.ones(3))  #> call
for number in range(1000):
    if (rank, number) == (1, 7):
        {}  #> guilty
    strategy.run(step)
"""


def leaving(name, act, *expected, **others):
    return Case(name, LOOP.format(act), expected, **others)


ENDED = "CollectiveError: rank 1 ended, so this collective can never complete"

LEAVING = [
    leaving("a rank ends early", "break", ENDED, "ranks 0, 2-3: all_reduce", "<call>"),
    leaving("sys.exit(0)", "sys.exit(0)", ENDED, "ranks 0, 2-3: all_reduce", "<call>"),
    leaving("sys.exit(3)", "sys.exit(3)", ENDED, "ranks 0, 2-3: all_reduce", "<call>"),
    leaving(
        "an exception",
        'raise ZeroDivisionError("the loss is gone")',
        "rank 1 of 4 failed at <guilty>",
        "ZeroDivisionError: the loss is gone",
    ),
    leaving(
        "an exception on two ranks",
        'pass\n    if rank > 1 and number == 9:\n        open("nowhere")',
        "FileNotFoundError",
        "ranks 2-3 of 4 failed at program.py:",
    ),
    Case(
        "out of memory",
        "for _ in range(5):\n    strategy.reduce('sum', 1)  #> call",
        ("rank 1 of 4 failed at <call>", "MemoryError"),
        variables={"MPISTRAT_FAULT": "exhaust@rank=1,collective=7"},
    ),
    # The launcher sees these first, and may end the job before anybody can say why.
    leaving("os._exit(0)", "os._exit(0)"),
    leaving("os._exit(1)", "os._exit(1)"),
    leaving("killed", "os.kill(os.getpid(), 9)"),
    leaving(
        "stopped",
        "os.kill(os.getpid(), 19)",
        *("CollectiveTimeoutError: Rank 1 did not come to all_reduce at <call>", "rank 1: stopped"),
        timeout_s=2,
        waits=True,
    ),
]

MISSING = [
    leaving(
        "late",
        "time.sleep(60)",
        "CollectiveTimeoutError: Rank 1 did not come to all_reduce at <call>",
        *("rank 1: late", "at <guilty>"),
        timeout_s=2,
        waits=True,
    ),
    Case(
        "in plain MPI",
        """
from mpi4py import MPI
if rank == 2:
    MPI.COMM_WORLD.Barrier()  #> guilty
strategy.reduce("sum", 1)  #> call
""",
        (
            "CollectiveTimeoutError: Rank 2 did not come to reduce at <call>",
            "rank 2: late",
            "<guilty>",
        ),
        timeout_s=2,
        waits=True,
    ),
    Case(
        "two groups that wait for each other",
        """
from mpi4py import MPI
other = ms.MPIStrategy(MPI.COMM_WORLD.Dup())
(strategy if rank < 2 else other).reduce("sum", 1)  #> call
""",
        (
            "CollectiveTimeoutError: Ranks",
            "did not come to reduce at <call>",
            "waiting here at <call>",
        ),
        timeout_s=2,
        waits=True,
    ),
]

HEALTHY = [
    Case(
        "different numbers of batches",
        """
def make(context):
    number = 3 + 2 * context.input_pipeline_id
    return ms.data.Dataset.from_arrays(np.arange(number)).batch(1)
batches = strategy.distribute_datasets_from_function(make)
counts = []
for batch in batches:
    strategy.run(lambda x: counts.append(int(all_reduce(len(x)))), args=(batch,))
assert sum(counts) == sum(3 + 2 * each for each in range(size)), counts
""",
        is_healthy=True,
    ),
    Case(
        "a slow rank",
        'for _ in range(3):\n    assert strategy.reduce("sum", rank) == last * size // 2',
        timeout_s=3,
        is_healthy=True,
        variables={"MPISTRAT_FAULT": "delay:1.5@rank=1,collective=6"},
    ),
    Case(
        "slow ranks everywhere",
        'for _ in range(100):\n    assert strategy.reduce("sum", rank) == last * size // 2',
        timeout_s=3,
        is_healthy=True,
        variables={"MPISTRAT_FAULT": "jitter:0.004@seed=3"},
    ),
    Case(
        "an error that an extension module cannot raise",
        """
def free_memory():
    try:
        raise OSError("reported, and no more")
    except OSError:
        sys.excepthook(*sys.exc_info())  # as Cython does where an object is freed
if rank == 1:
    sys.stderr = open(os.devnull, "w")
    free_memory()
for _ in range(3):
    assert strategy.reduce("sum", rank) == last * size // 2
""",
        is_healthy=True,
    ),
    Case(
        "work on rank 0 alone",
        """
if rank == 0:
    time.sleep(1)
    open("log.txt", "w").close()
strategy.reduce("sum", 1)
""",
        is_healthy=True,
    ),
]

SETTING = [
    Case(
        "a bad setting",
        'raise AssertionError("the strategy was made")',
        (
            "ranks 0-3 of 4 failed at program.py:5",
            "ValueError: The fault 'explode' cannot be read: there is no fault 'explode'",
        ),
        variables={"MPISTRAT_FAULT": "delay:0;explode"},
    ),
    Case(
        "a setting that cannot come true",
        'raise AssertionError("the strategy was made")',
        ("ValueError: The fault 'delay:1' cannot happen", "MPISTRAT_CHECKS is off"),
        variables={"MPISTRAT_FAULT": "delay:1", "MPISTRAT_CHECKS": "off"},
    ),
    Case(
        "a setting that kills",
        """
for number in range(5, 9):
    strategy.reduce("sum", 1)
    assert number < 7
""",
        ("rank 1 of 3: 'kill@rank=1,collective=7' before collective 7",),
        ranks=3,
        variables={"MPISTRAT_FAULT": "kill@rank=1,collective=7"},
    ),
    Case(
        "two faults by setting",
        """
try:
    strategy.reduce("sum", 1)
except KeyError:
    strategy.reduce("sum", 1)
strategy.reduce("sum", 1)  #> call
""",
        ("rank 2 of 3 failed at <call>", "ZeroDivisionError", "before collective 5"),
        ranks=3,
        variables={
            "MPISTRAT_FAULT": "raise:KeyError@collective=5; "
            "raise:ZeroDivisionError@rank=2,collective=6"
        },
    ),
    Case(
        "a setting for all ranks leaves smaller groups and fresh channels alone",
        """
from mpi4py import MPI
alone = ms.MPIStrategy(MPI.COMM_SELF)
for _ in range(9):
    alone.reduce("sum", 1)
try:
    strategy.reduce("sum", 1)
    raise AssertionError("nothing was raised")
except KeyError:
    pass
try:
    strategy.reduce("sum", np.ones(rank + 1))
except ms.errors.CollectiveMismatchError:
    strategy = ms.MPIStrategy()
for _ in range(9):
    assert strategy.reduce("sum", 1) == size
""",
        is_healthy=True,
        variables={"MPISTRAT_FAULT": "raise:KeyError@collective=5"},
    ),
]

CASES = [*FAILING, *LEAVING, *MISSING, *SETTING, *HEALTHY]
"""Cases of a job each."""
