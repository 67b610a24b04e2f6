"""Ranks that pass different batches to `run`: an error, before their numbers are mixed."""

import pytest

from tests.programs.running import Case, catch_each, check_output

pytestmark = pytest.mark.launches

DATASET = """
dataset = ms.data.Dataset.from_arrays({"x": np.arange(60.0), "y": np.arange(60)})
batches = strategy.distribute_dataset(dataset.shuffle(seed=1).batch(6))
iterator = iter(batches)
def step(batch):
    return ms.get_replica_context().all_reduce("sum", batch["x"].sum())  #> step
def run(batch):
    return strategy.run(step, args=(batch,))
run(next(iterator))
"""
SAID = ("CollectiveMismatchError", "<step>", "The ranks work on different batches")
CASES = [
    Case(
        "a new pass",
        """
if rank == 1:
    iterator = iter(batches)
run(next(iterator))
""",
        (*SAID, "rank 1: ", "with batch 0 of pass 1", "ranks 0, 2: ", "with batch 1 of pass 0"),
    ),
    Case(
        "a batch that is passed over",
        """
if rank == last:
    next(iterator)
run(next(iterator))
""",
        (*SAID, "rank 2: ", "with batch 2 of pass 0", "ranks 0-1: ", "with batch 1 of pass 0"),
    ),
    Case(
        "an earlier batch, without a collective",
        """
batch = next(iterator)
if rank != 0:
    batch = next(iterator)
strategy.run(lambda batch: None, args=(batch,))
iterator = iter(batches)
run(next(iterator))
""",
        (*SAID, "ranks 0-2: ", "with batch 0 of pass 1 after different ones"),
    ),
    Case(
        "a part of a nest, as a keyword",
        """
if rank == 0:
    iterator = iter(batches)
x = next(iterator)["x"]
strategy.run(lambda given: step({"x": given[0]["x"]}), kwargs={"given": [{"x": x}]})
""",
        (*SAID, "rank 0: ", "with batch 0 of pass 1"),
    ),
    Case(
        "several replicas on a rank",
        """
strategy.close()
strategy = ms.MPIStrategy(num_replicas=6)
batches = strategy.distribute_dataset(dataset.batch(6))
iterator = iter(batches)
run(next(iterator))
if rank == 1:
    iterator = iter(batches)
run(next(iterator))
""",
        (*SAID, "with batch 0 of pass 1", "with batch 1 of pass 0"),
    ),
]
SAME = """
for number, batch in enumerate(batches):  # the iterator before is given up on all ranks
    total = run(batch)
    if number == 3:
        break
iterator = iter(batches)
first, second = next(iterator), next(iterator)
for batch in (second, first, first):
    run(batch)
strategy.run(lambda batch: step({"x": batch["y"] + rank}), args=({"y": np.ones(2), "z": rank},))
"""


@pytest.fixture(scope="module")
def caught(tmp_path_factory):
    cases = [Case(each.name, DATASET + each.program) for each in CASES]
    cases.append(Case("the same batches", DATASET + SAME))
    return catch_each(cases, tmp_path_factory.mktemp("batches"), 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_get_an_error(caught, case):
    assert len(set(caught[case.name])) == 1
    check_output(Case(case.name, DATASET + case.program, case.expected), caught[case.name][0])


def test_any_order_is_allowed_that_all_ranks_follow(caught):
    assert set(caught["the same batches"]) == {"nothing"}
