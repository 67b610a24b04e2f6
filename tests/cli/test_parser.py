"""Help of the commands, completion by the shell, and the page that describes them."""

import argparse
import re
import subprocess
import sys

import numpy as np
import pytest

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import create_checkpoint, variable_item
from mpistrat.cli import COMMANDS, main, make_parser, timeline
from mpistrat.cli.output import GROUPS
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


def section(name):
    """Return what the page says about a command."""
    (found,) = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_the_page_has_every_command_and_every_option():
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == NAMES
    for name, parser in parsers().items():
        assert re.search(rf"mpistrat (run .*-m mpistrat )?{name}\b", section(name))
        for action in parser._actions:
            for option in set(action.option_strings) - {"-h", "--help", "--json"}:
                assert re.search(rf"`{option}[ `]", section(name)), (name, option)
            for choice in action.choices or ():
                assert re.search(rf"\b{choice}\b", section(name)), (name, choice)
    assert len(PAGE.split()) <= 1235


def shape_of(line):
    """Return the words of a line, its file names and numbers aside."""
    return re.sub(r"\d[\d.]*( [KM]?i?B\b)?", "0", re.sub(r"\S+\.h5", "FILE", line)).split()


def test_the_outputs_on_the_page_are_of_the_present_form(tmp_path, capsys):
    files = []
    for number in range(2):
        files.append(str(tmp_path / f"{number}.h5"))
        with create_checkpoint(files[-1], Header(step=number)) as writer:
            for variable in ("bias", "kernel"):
                writer.add(variable_item(variable, np.float32([number])))
    # The lines of each output that stand on the page, those with other names in them left out.
    cases = {"inspect": (1,), "verify": (0,), "diff": (0, -1)}
    for name, numbers in cases.items():
        main([name, *(files if name == "diff" else files[:1])])
        printed = capsys.readouterr().out.splitlines()
        shown = [shape_of(line) for line in section(name).splitlines()]
        for number in numbers:
            assert shape_of(printed[number]) in shown, printed[number]
    tables = {
        "timeline": ("rank", "total", *timeline._COLUMNS, "others waited"),
        "explain": ("ranks", "collective", "line", "state"),
        "doctor": ("what", "seen"),
    }
    for name, columns in tables.items():
        assert " ".join(columns).split() in [line.split() for line in section(name).splitlines()]
