"""Type checkers see the real types of the public interface: mypy and pyright check a program."""

import subprocess
import sys

import pytest

from tests import ROOT

PROGRAM = "tests/typing/user_code.py"
CHECKERS = {
    "mypy": ["mypy", "--strict", "--warn-unused-ignores", PROGRAM],
    # pyright with all that it needs in its wheel; [tool.pyright] in pyproject.toml is for both.
    "pyright": ["basedpyright", "--pythonpath", sys.executable, PROGRAM],
}


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_has_the_types_that_it_says_and_no_other_error(checker):
    pytest.importorskip(CHECKERS[checker][0])
    command = [sys.executable, "-m", *CHECKERS[checker]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
