"""Integers under SUM keep their total to the last unit, at any number of replicas."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.testing import launch

TOTALS = {
    "i1": [-128, -1, 0, 1, 127],
    "u1": [0, 1, 254, 255],
    "i4": [-(2**31), -7, 5, 2**31 - 1],
    "i8": [-(2**63), -(2**53) - 1, -1, 2**53 + 1, 2**63 - 1],
    "u8": [0, 3, 2**63 + 1, 2**64 - 1],
}


def total_variable(strategy, dtype, length):
    with strategy.scope():
        return ms.Variable(
            np.zeros(length, dtype),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )


@pytest.mark.parametrize("dtype", TOTALS)
def test_assign_keeps_the_total(strategy, rank, size, dtype):
    variable = total_variable(strategy, dtype, len(TOTALS[dtype]))
    assert variable.assign(TOTALS[dtype]).tolist() == TOTALS[dtype]
    assert variable.dtype == np.dtype(dtype)
    shares = [total // size + (rank < total % size) for total in TOTALS[dtype]]
    assert variable.values[0].tolist() == shares


@settings(max_examples=25)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.data())
def test_any_total_survives_writes_of_replicas(totals, data):
    strategy = ms.MPIStrategy(device="cpu")
    variable = total_variable(strategy, "i8", len(totals))
    assert variable.assign(totals).tolist() == totals
    # Every replica moves by its own amount; the total is that of all, modulo 2**64.
    step = data.draw(st.integers(-(2**40), 2**40))
    rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    with np.errstate(over="ignore"):
        strategy.run(lambda: variable.assign_add(np.full(len(totals), step * rank)))
        moved = np.array(totals) + step * (size * (size - 1) // 2)
    assert variable.numpy().tolist() == moved.tolist()


PROGRAM = """
import json, sys
import numpy as np
import mpistrat as ms

action, path, totals = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
strategy = ms.MPIStrategy(device="cpu")
with strategy.scope():
    variables = {
        dtype: ms.Variable(
            np.zeros(len(values), dtype),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
        for dtype, values in totals.items()
    }
checkpoint = ms.Checkpoint(totals=variables)
if action == "save":
    for dtype, values in totals.items():
        variables[dtype].assign(values)
    checkpoint.write(path)
else:
    checkpoint.restore(path).assert_consumed()
    for dtype, values in totals.items():
        assert variables[dtype].numpy().tolist() == values, (dtype, variables[dtype].numpy())
    checkpoint.write(f"{path}.{strategy.num_replicas_in_sync}")
"""


@pytest.mark.launches
def test_totals_survive_save_and_restore_at_other_numbers_of_ranks(tmp_path):
    script = tmp_path / "totals.py"
    script.write_text(PROGRAM)
    totals, path = json.dumps(TOTALS), str(tmp_path / "totals.h5")
    # Saved at 3, restored and saved again at 1, 2 and 4, each from the file before.
    for action, ranks in (("save", 3), ("restore", 1), ("restore", 2), ("restore", 4)):
        done = launch.run([script, action, path, totals], ranks, 60)
        assert done.returncode == 0, done.stdout + done.stderr
        if action == "restore":
            path = f"{path}.{ranks}"
