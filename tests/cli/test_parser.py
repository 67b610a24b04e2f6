"""Help of the commands, completion by the shell, and the page that describes them."""

import argparse
import os
import re
import subprocess
import sys

import pytest

from mpistrat.cli import main
from mpistrat.cli.output import GROUPS
from mpistrat.cli.parser import COMMANDS, make_parser
from tests import ROOT

PAGE = (ROOT / "docs/command-line.md").read_text()
NAMES = [command.name for command in COMMANDS]


def parsers():
    (commands,) = (
        each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    return commands.choices


def test_the_help_has_every_command_in_its_group(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    groups = {each.partition(":\n")[0]: each for each in text.split("\n\n")}
    for command in COMMANDS:
        assert f"  {command.name} " in groups[command.group]
    assert {command.group for command in COMMANDS} == set(GROUPS)
    assert all(len(line) <= 88 for line in text.splitlines())


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_the_help_of_a_command_says_its_use_with_an_example_that_parses(command, capsys):
    assert main([command.name, "--help"]) == 0
    text = capsys.readouterr().out
    assert command.about.strip() in text
    use, _, examples = command.about.strip().partition("\n\n")
    assert 2 <= len(re.findall(r"\.(?=\s|$)", use)) <= 6
    assert all(len(line) <= 99 for line in command.about.splitlines())
    lines = re.findall(r"mpistrat (\S.*?)(?: [>(].*)?$", examples, re.MULTILINE)
    assert lines
    for line in lines:
        arguments = make_parser().parse_args(line.partition(" > ")[0].split(" >> ")[0].split())
        assert callable(arguments.run)


def completions(script, *words):
    """Return what a real bash completes for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"source {script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        f"_shtab_mpistrat mpistrat '{words[-1]}' '{words[-2]}'\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, timeout=30, cwd=script.parent
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_files(tmp_path, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "checkpoint-3.h5").touch()
    (tmp_path / "checkpoints").mkdir()
    assert completions(script, "mpistrat", "") >= set(NAMES)
    assert completions(script, "mpistrat", "d") == {"doctor", "diff"}
    assert completions(script, "mpistrat", "run", "--re") == {"--restarts"}
    assert completions(script, "mpistrat", "bench", "all") == {"allreduce"}
    assert "checkpoint-3.h5" in completions(script, "mpistrat", "inspect", "checkpoint-")
    assert completions(script, "mpistrat", "doctor", "--folder", "che") == {"checkpoints"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)


def test_completion_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
