"""MPISTRAT_CHECKS=off: plain MPI, for those who measure what the checks cost."""

import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PROGRAM = """
import os, sys
import numpy as np
import mpistrat as ms
from mpistrat.testing import launch

rank, _ = launch.rank_and_size()
if rank >= int(sys.argv[1]):
    os.environ["MPISTRAT_CHECKS"] = "off"
strategy = ms.MPIStrategy(device="cpu")
channel = strategy.extended._collectives.channel
before = channel.ledger.sequence
assert strategy.reduce("sum", np.arange(5.0)).tolist() == [3 * i for i in range(5)]
assert channel.ledger.sequence - before == (1 if channel.checks else 0)
with strategy.scope():
    v = ms.Variable(np.float64(rank), aggregation=ms.VariableAggregation.SUM)
strategy.run(v.assign_add, (1.0,))
assert v.numpy() == 3
try:
    strategy.gather(np.zeros((2, rank)), axis=0)
except ValueError as error:
    assert "may differ along axis 0 only" in str(error)
print("checked" if channel.checks else "unchecked")
"""


@pytest.mark.quick("0-unchecked")
@pytest.mark.parametrize(("first_without", "said"), [(0, "unchecked"), (1, "checked")])
def test_the_right_answers_without_checks_and_one_choice_for_all(tmp_path, first_without, said):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = launch.run([script, str(first_without)], 3, 60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [said] * 3
