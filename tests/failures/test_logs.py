"""Log level, and output of a program that runs alone."""

import pytest

from mpistrat.settings import Settings
from mpistrat.testing import launch

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

PROGRAM = """
import logging, sys, warnings
import mpistrat as ms
log = logging.getLogger("mpistrat")
def tell():
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "%s line", logging.getLevelName(level))
"""


def printed_lines(tmp_path, program, **variables):
    """Return the standard error of `program`, run alone."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + program)
    done = launch.run([script], env=variables)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_read_in_any_case(level):
    for text in (level, level.lower(), level.title()):
        assert Settings.parse({"MPISTRAT_LOG": text}).log == level
    assert Settings.parse({}).log is None


@pytest.mark.parametrize("text", ["", "LOUD", "20", "WARN ING"])
def test_a_bad_level_is_an_error_that_names_the_good_ones(text):
    with pytest.raises(ValueError, match=r"MPISTRAT_LOG cannot be") as caught:
        Settings.parse({"MPISTRAT_LOG": text})
    assert all(level in str(caught.value) for level in LEVELS)
    assert repr(text) in str(caught.value)


@pytest.mark.launches
@pytest.mark.parametrize("level", [None, "DEBUG", "ERROR"])
def test_the_setting_is_the_level_of_the_logger(tmp_path, level):
    shown = LEVELS[LEVELS.index(level or "WARNING") :]
    variables = {} if level is None else {"MPISTRAT_LOG": level.lower()}
    assert printed_lines(tmp_path, "tell()", **variables) == [
        f"mpistrat: {each} line" for each in shown
    ]


@pytest.mark.launches
@pytest.mark.parametrize(
    "configure",
    [
        'logging.basicConfig(format="mine %(message)s", level=logging.WARNING)',
        "handler = logging.StreamHandler()\n"
        'handler.setFormatter(logging.Formatter("mine %(message)s"))\n'
        "log.addHandler(handler); log.propagate = False",
    ],
    ids=["root", "own"],
)
@pytest.mark.parametrize("level", ["", "log.setLevel(logging.WARNING)\n"])
def test_where_the_program_has_a_handler_nothing_is_printed_twice(tmp_path, configure, level):
    lines = printed_lines(tmp_path, f"{configure}\n{level}tell()")
    assert lines == [f"mine {each} line" for each in LEVELS[2:]]


@pytest.mark.launches
def test_a_handler_of_others_is_none_for_this_logger(tmp_path):
    lines = printed_lines(
        tmp_path,
        "log.addHandler(logging.NullHandler())\n"
        'logging.getLogger("other").addHandler(logging.StreamHandler())\n'
        "log.propagate = False\n"
        "logging.getLogger().addHandler(logging.StreamHandler())\n"
        "tell()",
    )
    assert lines == [f"mpistrat: {each} line" for each in LEVELS[2:]]


@pytest.mark.launches
def test_a_traceback_belongs_to_its_line(tmp_path):
    lines = printed_lines(
        tmp_path, 'try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception("oh")'
    )
    assert lines[:2] == ["mpistrat: oh", "Traceback (most recent call last):"]
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.launches
def test_warnings_of_a_program_alone_are_left_to_python(tmp_path):
    assert (
        printed_lines(
            tmp_path,
            "original = warnings.showwarning\nms.OneDeviceStrategy()\n"
            "assert warnings.showwarning is original",
        )
        == []
    )
