"""Exit hooks: the order of the phases, whatever was registered first."""

import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

HEAD = """
import os, sys
import mpistrat
from mpistrat.system.exit_hooks import Phase, at, finish_work, hold_while, is_at_work
for phase in reversed(Phase):
    at(phase, lambda *failure, phase=phase: print(phase.name, *(each.kind for each in failure)))
"""
AT_EXIT = ["BEFORE_LAST_ROUND", "LAST_ROUND", "AFTER_LAST_ROUND"]


def lines_of(program):
    done = launch.run(["-c", HEAD + program])
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_the_end_of_the_program():
    assert lines_of("print('program')") == (0, ["program", *AT_EXIT], "")


def test_an_uncaught_exception_comes_before():
    code, lines, errors = lines_of("raise KeyError('here')")
    assert (code, lines) == (1, ["FAILED <class 'KeyError'>", *AT_EXIT])
    assert errors.count("Traceback") == 1


def test_an_action_that_fails_stops_no_other():
    code, lines, errors = lines_of(
        "at(Phase.BEFORE_LAST_ROUND, lambda: sys.exit(3))\n"
        "at(Phase.BEFORE_LAST_ROUND, lambda: print('next'))\n"
    )
    assert (code, lines) == (0, [AT_EXIT[0], "next", *AT_EXIT[1:]])
    assert "SystemExit while leaving: 3" in errors


def test_before_the_end_for_all():
    program = "finish_work()\nsys.stdout.flush()\nos._exit(0)"
    assert lines_of(program) == (0, ["BEFORE_ABORT"], "")


def test_work_is_asked_for():
    program = "print(is_at_work())\nhold_while(lambda: True)\nprint(is_at_work())"
    assert lines_of(program) == (0, ["False", "True", *AT_EXIT], "")


def test_a_fork_has_nothing_to_say():
    program = """
pid = os.fork()
if pid == 0:
    at(Phase.LAST_ROUND, lambda: print("its own"))
else:
    os.waitpid(pid, 0)
"""
    assert lines_of(program) == (0, ["its own", *AT_EXIT], "")
