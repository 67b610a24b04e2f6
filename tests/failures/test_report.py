"""Tracebacks: the frames of the package are folded, those of the program never."""

import sys
import traceback

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.failures import report
from mpistrat.testing import launch


def caught(fn):
    try:
        fn()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def formatted(error):
    return report.format_failure(type(error), error, error.__traceback__)


def step():
    return inner()


def inner():
    return [1, 2][7]


def test_frames_between_those_of_the_program_are_one_line():
    error = caught(lambda: ms.OneDeviceStrategy().run(step))
    lines = formatted(error).splitlines()
    assert "  [3 frames of mpistrat; MPISTRAT_FULL_TRACEBACK=on shows them]" in lines
    files = [line for line in lines if line.startswith("  File")]
    assert [line.rpartition(" ")[2] for line in files] == ["caught", "<lambda>", "step", "inner"]
    assert lines[-1] == "IndexError: list index out of range"


def test_the_exception_itself_keeps_all_its_frames():
    error = caught(lambda: ms.OneDeviceStrategy().run(step))
    before = traceback.format_exception(error)
    formatted(error)
    assert traceback.format_exception(error) == before
    assert any("extended.py" in part for part in before)


def test_what_the_package_raises_ends_in_the_line_of_the_program():
    error = caught(lambda: ms.OneDeviceStrategy().reduce("sum", np.ones(3), axis=4))
    *_, code, fold, message = formatted(error).splitlines()
    assert "axis=4" in code or "^" in code
    assert fold.startswith("  [7 frames of mpistrat; ")
    assert message.startswith("ValueError: reduce: axis 4 is out of range")


def test_an_error_that_the_package_did_not_raise_keeps_the_frames_where_it_arose(monkeypatch):
    # A bug in the package, that is: it calls what is None.
    monkeypatch.setattr("mpistrat.strategies.extended.reduce_to_host", None)
    strategy = ms.OneDeviceStrategy()
    text = formatted(
        caught(
            lambda: strategy.run(
                lambda: ms.get_replica_context().merge_call(lambda s: s.reduce("sum", 1))
            )
        )
    )
    assert "[3 frames of mpistrat;" in text
    assert "return reduce_to_host(" in text
    assert "call_for_each_replica" not in text


def test_causes_are_folded_too_and_keep_their_order():
    def fail():
        try:
            ms.OneDeviceStrategy("tpu")
        except ValueError as cause:
            raise KeyError("on purpose") from cause

    text = formatted(caught(fail))
    assert "Unknown device 'tpu'" in text.partition("direct cause")[0]
    assert "KeyError: 'on purpose'" in text.partition("direct cause")[2]
    assert "reductions.py" not in text


def test_errors_of_the_program_alone_are_left_to_python():
    assert formatted(caught(inner)) is None


def test_the_setting_shows_all(monkeypatch):
    monkeypatch.setenv("MPISTRAT_FULL_TRACEBACK", "on")
    error = caught(lambda: ms.OneDeviceStrategy().run(step))
    assert formatted(error) is None
    _, text = report.describe_failure(type(error), error, error.__traceback__, "here")
    assert "extended.py" in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs exception groups")
def test_members_of_groups_are_folded():
    members = [caught(lambda: ms.OneDeviceStrategy().run(step)), ValueError("another")]
    text = formatted(caught(lambda: _raise(ExceptionGroup("both", members))))  # noqa: F821
    assert "[3 frames of mpistrat;" in text
    assert "ValueError: another" in text


def _raise(error):
    raise error


PROGRAM = """
import sys
import mpistrat as ms
if sys.argv[1] == "mpi":
    strategy = ms.MPIStrategy(device="cpu")
else:
    strategy = ms.get_strategy()
if sys.argv[1] == "hook":
    sys.excepthook = lambda *failure: print("own hook of", failure[0].__name__)
def step():
    return {}["key"]
strategy.run(step)
"""


@pytest.mark.launches
@pytest.mark.parametrize(("how", "ranks"), [("mpi", 2), ("mpi", None), ("default", None)])
def test_a_failing_program_shows_its_own_lines(tmp_path, how, ranks):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = launch.run([script, how], ranks, 60)
    assert done.returncode != 0
    shown = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert [line.partition(", line ")[2] for line in shown if "  File" in line] == [
        "12, in <module>",
        "11, in step",
    ]
    assert "  [3 frames of mpistrat; MPISTRAT_FULL_TRACEBACK=on shows them]" in shown
    assert "KeyError: 'key'" in shown
    full = launch.run([script, how], ranks, 60, env={"MPISTRAT_FULL_TRACEBACK": "on"})
    assert "extended.py" in full.stderr


@pytest.mark.launches
def test_the_program_s_own_hook_prints_what_it_likes(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = launch.run([script, "hook"], None, 60)
    assert done.stdout == "own hook of KeyError\n"


@pytest.mark.launches
def test_frames_are_folded_where_no_strategy_could_be_made(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import mpistrat as ms\nfrom mpi4py import MPI\n\nMPI.Finalize()\nms.MPIStrategy()\n"
    )
    done = launch.run([script], None, 60)
    assert done.returncode == 1
    assert "of mpistrat; MPISTRAT_FULL_TRACEBACK=on shows" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("LaunchError: MPI was finalized") == 1
