"""Ranks of a parameter-server job that fail by themselves, where losses are outlived (ULFM)."""

import pytest

from mpistrat.testing import launch
from tests.programs.running import ours
from tests.programs.test_lost_workers import PROGRAM, left_over, start

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not launch.is_open_mpi(), reason="MPI_Abort of MPICH ends all ranks"),
]

FAILING = (
    PROGRAM.partition("def work(")[0]
    + """
def work(number):
    time.sleep(0.01)
    if moment == "in a closure" and rank in victims and number > 10:
        raise KeyboardInterrupt
    counter.assign_add(1, read_value=False)
if moment == "in a thread" and rank in victims:  # as Ctrl-C does
    threading.Timer(0.5, lambda: os.kill(os.getpid(), 2)).start()
if strategy.cluster_resolver.task_type != "chief":
    strategy.serve()
else:
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    for number in range(1000):
        coordinator.schedule(work, (number,))
    coordinator.join()
    print("joined")
"""
)


@pytest.mark.parametrize(
    ("moment", "victim"), [("in a closure", 2), ("in a closure", 3), ("in a thread", 1)]
)
def test_the_job_ends_with_one_traceback(tmp_path, monkeypatch, moment, victim):
    monkeypatch.setenv("MPISTRAT_EXIT_GRACE_S", "1")
    arguments = "1", f"[{victim}]", moment
    done = start(tmp_path, monkeypatch, 4, *arguments, program=FAILING).finish(40)
    assert done.returncode != 0
    assert "joined" not in done.stdout
    text = ours(done.stderr)
    assert f"rank {victim} of 4 failed at program.py" in text, done.stderr
    assert text.count("Traceback") == 1
    assert "KeyboardInterrupt" in text
    assert not left_over(tmp_path)
