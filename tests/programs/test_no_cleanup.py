"""Killed ranks under an MPICH mpiexec that ends no other: the survivors say whom they have lost."""

import pytest

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.testing import launch
from tests.programs.running import PRELUDE, ours

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(launch.is_open_mpi(), reason="Open MPI ends the others itself"),
]

KILLED = """
import threading
if rank == victim:
    os.kill(os.getpid(), 9)
timer = threading.Timer(0.7, lambda: open(f"survivor-{rank}", "w").close())
timer.daemon = True
timer.start()
"""
AT_THE_END = "pass"
IN_A_COLLECTIVE = 'strategy.reduce("sum", 1)'
CAUGHT = """
try:
    strategy.reduce("sum", 1)
except ms.errors.CollectiveError:
    pass
"""
BEFORE_A_COLLECTIVE = 'time.sleep(3)\nstrategy.reduce("sum", 1)'


@pytest.mark.quick("2-1-" + AT_THE_END)
@pytest.mark.parametrize("program", [AT_THE_END, IN_A_COLLECTIVE, CAUGHT, BEFORE_A_COLLECTIVE])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (4, 2)])
def test_survivors_report_it_once(tmp_path, monkeypatch, program, ranks, victim):
    first, *rest = mpiexec(ranks)
    monkeypatch.setattr(launch, "mpiexec", lambda _: [first, "-disable-auto-cleanup", *rest])
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + f"victim = {victim}\n" + KILLED + program)
    done = launch.run([script], ranks, 30, cwd=tmp_path)
    assert done.returncode != 0
    text = ours(done.stderr)
    # Sometimes this mpiexec kills the others at once all the same, as strace shows.
    if len(list(tmp_path.glob("survivor-*"))) < ranks - 1:
        return
    assert text.count("has ended without a word") == 1, text
    assert f"rank {victim} ended" in text
    assert f"rank {victim}: gone: process" in text
    assert text.count("mpistrat: rank") == 1
