"""Ctrl-C: the job ends, and says where its ranks were."""

import re
import signal
import time

import pytest

from mpistrat.testing import launch
from tests.programs.running import PRELUDE, end_processes, ours

pytestmark = [
    pytest.mark.launches,
    # Its launcher kills the ranks at once.
    pytest.mark.skipif(launch.is_open_mpi(), reason="Open MPI passes no SIGINT on to the ranks"),
]

MARK = """
strategy.reduce("sum", 1)
with open(f"process-{rank}", "w") as file:
    print(os.getpid(), file=file)
print("ready", rank, flush=True)
"""
CASES = {
    "in a collective": (
        "if rank == 1:\n    time.sleep(60)\nstrategy.reduce('sum', 1)",
        r"^mpistrat: ranks? [0-2, ]+ of 3 failed at program\.py:\d+:\n"
        r"Traceback [^\n]*\n(  [^\n]*\n)+KeyboardInterrupt\b",
    ),
    "at the end": (
        "if rank == 1:\n    time.sleep(60)",
        r"^mpistrat: rank 1 of 3 failed at program\.py:16:\nTraceback .*\nKeyboardInterrupt\b",
    ),
    "at the end of others that go on": (
        "import signal\nif rank == 1:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    print('deaf', flush=True)\n    time.sleep(60)",
        r"^mpistrat: interrupted while ranks were still at work:\n"
        r"  rank 1: late: computing for \d+ s, now at program\.py:19 in <module>\n"
        r"  rank 2: finished: left the program\n  rank 0: waiting here at the end of the program$",
    ),
    "at the end, with a handler that raises": (
        "import signal\nif rank == 0:\n    signal.signal(signal.SIGUSR1, lambda *_: 1 / 0)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 2)\n"
        "    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))\n"
        "elif rank == 1:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    time.sleep(60)",
        r"^mpistrat: ZeroDivisionError while waiting for other ranks to end: division by zero\n"
        r"mpistrat: interrupted while ranks were still at work:\n  rank 1: late: .*",
    ),
}


@pytest.mark.quick("in a collective")
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_job_ends_and_says_where_it_was(tmp_path, case):
    program, expected = CASES[case]
    (tmp_path / "program.py").write_text(PRELUDE + MARK + program)
    variables = {"MPISTRAT_EXIT_GRACE_S": "3"}
    launched = launch.Launched([tmp_path / "program.py"], 3, cwd=tmp_path, env=variables)
    try:
        for rank in range(3):
            launched.wait_for_output(f"ready {rank}")
        if "go on" in case:
            launched.wait_for_output("deaf")
        time.sleep(0.5)  # let all of them leave print
        if "raises" not in case:
            launched.process.send_signal(signal.SIGINT)
        result = launched.finish(20)
    finally:
        launched.kill()
        end_processes(tmp_path)
    assert result.returncode != 0, result.stderr
    text = "\n".join(line for line in ours(result.stderr).split("\n") if "Ctrl-C" not in line)
    assert text.count("\n") < 40, text
    assert re.search(expected, text, re.DOTALL), result.stderr


def test_a_second_interruption_does_not_interrupt_the_report(tmp_path):
    program = (
        "class Again(Exception):\n"
        "    @property\n"
        "    def __notes__(self):\n"
        "        os.kill(os.getpid(), 2)  # while its traceback is made\n"
        "        return ['interrupted']\n"
        "raise Again\n"
    )
    (tmp_path / "program.py").write_text(PRELUDE + program)
    done = launch.run([tmp_path / "program.py"], 2, cwd=tmp_path, limit_s=30)
    assert done.returncode != 0
    assert re.fullmatch(
        r"mpistrat: ranks 0-1 of 2 failed at program\.py:\d+:\nTraceback [^\n]*\n"
        r"  File [^\n]*\n    raise Again\nAgain\ninterrupted",
        ours(done.stderr),
    ), done.stderr
