"""Exit code of a process that ends itself: it is the one that the program gives."""

import subprocess
import sys

from mpistrat.testing import launch

PROGRAM = """
import sys
from mpistrat.failures.losses import end_without_mpi, note_exit_code

def leave(status):
    raise SystemExit(status)

note_exit_code()
end_without_mpi()
"""

CAUGHT = """
try:
    sys.exit(3)
except SystemExit:
    pass
"""

ENDS = {
    "pass": 0,
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "sys.exit(259)": 3,
    "sys.exit('a text')": 1,
    "exit(4)": 4,
    "quit(5)": 5,
    "leave(6)": 6,
    "leave(None)": 0,
    "raise KeyError(1)": 1,
    CAUGHT: 0,
    CAUGHT + "raise KeyError(1)": 1,
    CAUGHT + "sys.exit(5)": 5,
    "if len(sys.argv) < 9:\n    raise SystemExit(7)": 7,
}


LATE = PROGRAM.replace("note_exit_code()\nend_without_mpi()", "import atexit")
"""Where a loss is noticed by an exit function, when the program is over."""

LATE_ENDS = ("pass", "sys.exit(3)", "raise KeyError(1)")


def test_it_is_that_of_the_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM + "sys.exit(3)")
    cases = {end: (["-c", PROGRAM + end], code) for end, code in ENDS.items()}
    cases |= {
        f"late {end}": (["-c", f"{LATE}atexit.register(end_without_mpi)\n{end}"], ENDS[end])
        for end in LATE_ENDS
    }
    cases["a module"] = ["-m", "program"], 3
    variables, running = launch.environment({}), {}
    for name, (arguments, _) in cases.items():
        running[name] = subprocess.Popen(
            [sys.executable, *arguments], cwd=tmp_path, env=variables, stderr=subprocess.DEVNULL
        )
    codes = {name: process.wait(60) for name, process in running.items()}
    assert codes == {name: code for name, (_, code) in cases.items()}
