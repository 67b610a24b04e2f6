"""Random collectives at random times: no check fires without a cause."""

import re

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.slow]


@pytest.mark.parametrize(("ranks", "seed"), [(4, 1)])
def test_a_soak_without_false_alarm(ranks, seed):
    arguments = [ROOT / "tests/programs/soak.py", "--seconds", "20", "--seed", str(seed)]
    done = launch.run(arguments, ranks, 100, env={"MPISTRAT_TIMEOUT_S": "15"})
    assert (done.returncode, done.stderr) == (0, "")
    said = re.fullmatch(rf"(\d+) operations, (\d+) collectives on {ranks} ranks .*\n", done.stdout)
    assert said, done.stdout
    assert min(map(int, said.groups())) > 100
