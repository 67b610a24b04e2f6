"""A rank is killed while rank 0 finishes an asynchronous checkpoint: the file is not lost."""

import sys

import pytest

from mpistrat.mpi.mpiexec import mpiexec
from mpistrat.system.processes import Program
from mpistrat.testing import launch
from tests.programs.running import (
    MARKS,
    PRELUDE,
    UNSEEN,
    assert_nothing_is_left,
    end_processes,
    ours,
)

pytestmark = pytest.mark.launches

WRITE_S = 4
"""How long the file takes: longer than the others wait once they know that a rank is lost."""

SAVE = """
import signal, threading
from mpistrat.checkpoint.async_save import Snapshot
write = Snapshot.write
def write_slowly(self, *arguments):
    time.sleep({write_s})
    write(self, *arguments)
Snapshot.write = write_slowly
if rank == 1:
    def kill():
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
with strategy.scope():
    weights = ms.Variable(np.arange(1000.0), name="weights")
manager = ms.CheckpointManager(ms.Checkpoint(weights=weights), "saved", asynchronous=True)
manager.save(7)
{then}
"""
THEN = {
    "waits for the file": "manager.wait()",
    "waits for data": """
if rank == 1:
    time.sleep(60)
# Not agreed upon before: rank 1 is to be lost where nothing can be raised.
strategy.extended._collectives.channel.transport.broadcast(np.zeros(10), 1)
""",
}


@pytest.mark.quick("waits for the file")
@pytest.mark.parametrize("then", THEN)
def test_the_file_of_rank_0_is_there_and_sound(tmp_path, then):
    script, shell = tmp_path / "program.py", tmp_path / "unseen.sh"
    script.write_text(PRELUDE + MARKS + SAVE.format(write_s=WRITE_S, then=THEN[then]))
    shell.write_text(UNSEEN)
    command = [*mpiexec(3), "sh", str(shell), sys.executable, str(script)]
    variables = launch.environment({"MPISTRAT_EXIT_GRACE_S": "1"})
    program = Program(command, variables, cwd=tmp_path)
    try:
        assert program.wait(60) != 0
    finally:
        program.kill()
        end_processes(tmp_path)
    said = ours(program.stderr())
    assert "rank 1 ended" in said or "rank 1 is gone" in said, said
    checked = launch.run(["-m", "mpistrat", "verify", "saved/checkpoint-7.h5"], cwd=tmp_path)
    assert "checkpoint-7.h5: ok" in checked.stdout, checked.stdout + checked.stderr
    assert checked.returncode == 0
    assert_nothing_is_left(tmp_path)
