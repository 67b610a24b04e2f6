"""A rank that is suspended when the others have come to the end of the program."""

import pytest

from tests.programs.running import Case, check_output, run_case

pytestmark = pytest.mark.launches

PROGRAM = """
import signal
strategy.reduce("sum", 1)
if rank == {victim}:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
SAID = (
    "The end of the program waits for stopped or silent ranks:",
    "others have not ended within the timeout of 6 s",
    "SIGCONT resumes it",
)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_the_job_after_the_time_limit(tmp_path, victim):
    program = PROGRAM.format(victim=victim)
    variables = {"MPISTRAT_WAIT_NOTICE_S": "2"}
    case = Case("stopped", program, SAID, 3, 6, waits=True, variables=variables)
    done = run_case(case, tmp_path / "job")
    check_output(case, done.text)
    assert done.code != 0
    assert done.after_s < 6 + 12  # a look at a stopped rank takes some seconds
    assert done.text.count("left the program and ends the job") == 1, done.text


def test_a_rank_that_works_on_is_waited_for(tmp_path):
    program = "if rank == 1:\n    time.sleep(8)\n"
    variables = {"MPISTRAT_WAIT_NOTICE_S": "1"}
    case = Case("busy", program, ranks=2, timeout_s=3, is_healthy=True, variables=variables)
    done = run_case(case, tmp_path / "job")
    assert done.code == 0, done.all_text
    assert "stopped" not in done.text
