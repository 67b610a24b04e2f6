"""``mpistrat inspect`` on a terminal, and its picture."""

import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import h5py
import numpy as np
import pytest

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import create_checkpoint, variable_item
from mpistrat.cli import main, output
from tests import ROOT

NAMES = ["model/dense/bias", "model/dense/kernel", "model/größe $x_", "step"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.h5"
    with create_checkpoint(path, Header(step=3)) as writer:
        for number, name in enumerate(NAMES):
            writer.add(variable_item(name, np.arange(number, dtype=np.float32)))
    return str(path)


def on_a_terminal(width, *arguments, **variables):
    """Return what a command shows on a terminal of `width` letters, without its colours."""
    text = sent_to_a_terminal(width, *arguments, **variables)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def sent_to_a_terminal(width, *arguments, **variables):
    """Return what a command sends to a terminal of `width` letters."""
    own, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    command = [sys.executable, "-m", "mpistrat", *arguments]
    child = subprocess.Popen(
        command, stdout=its, stderr=its, cwd=ROOT, env=environment | {"TERM": "xterm"} | variables
    )
    os.close(its)
    text = b""
    try:
        while block := os.read(own, 4096):
            text += block
    except OSError:  # the end, for a terminal
        pass
    os.close(own)
    assert child.wait(60) == 0, text
    encoding = variables.get("PYTHONIOENCODING", "utf-8")
    return text.decode(encoding).replace("\r\n", "\n")


@pytest.mark.launches
def test_a_terminal_without_a_width_is_a_launchers_and_nothing_is_folded(file):
    piped = subprocess.run(
        [sys.executable, "-m", "mpistrat", "inspect", file],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert on_a_terminal(0, "inspect", file) == piped.stdout


@pytest.mark.launches
def test_a_terminal_gets_a_tree_that_fits(file):
    wide = on_a_terminal(100, "inspect", file).splitlines()
    (dense,) = (number for number, line in enumerate(wide) if "├── dense" in line)
    assert wide[dense - 1].split() == ["model"]
    assert wide[dense + 1].split()[:3] == ["│", "├──", "bias"]
    assert wide[dense + 2].split()[2:5] == ["kernel", "(1,)", "float32"]
    assert all(len(line) <= 100 for line in wide[1:])
    narrow = on_a_terminal(20, "inspect", "--stats", file).splitlines()
    (kernel,) = (number for number, line in enumerate(narrow) if "kernel" in line)
    assert narrow[kernel + 1].startswith("  shape (1,), dtype float32,")
    assert narrow[kernel + 1].endswith("nan_count 0")


def test_the_widest_column_is_folded_at_blanks(monkeypatch, capsys):
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    text = " ".join(f"word{number}" for number in range(20))
    output.print_table(("path", "difference"), [("kernel", text), ("bias", "x" * 50)])
    title, rule, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["path", "difference"]
    assert set(rule) == {"─"}
    lines = [line.rstrip() for line in lines]
    assert len(rule) == max(map(len, lines)) == 40
    (bias,) = (number for number, line in enumerate(lines) if line.startswith("bias"))
    assert lines[0].startswith("kernel   word0 ")
    assert " ".join(line[9:] for line in lines[:bias]) == text
    assert "".join(line[9:] for line in lines[bias:]) == "x" * 50


def test_titles_fold_where_the_terminal_is_narrow(monkeypatch, capsys):
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    titles = ("rank", "waiting for ranks", "waiting for data", "others waited")
    output.print_table(titles, [("0", "0.584", "0.164", "0.331")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["waiting", "waiting"]
    assert lines[1] == ["for", "for", "others"]
    assert lines[2] == ["rank", "ranks", "data", "waited"]
    assert lines[-1] == ["0", "0.584", "0.164", "0.331"]


@pytest.mark.launches
@pytest.mark.parametrize(("encoding", "name"), [("ascii", "gr\\xf6\\xdfe"), ("latin-1", "größe")])
def test_a_terminal_without_box_characters(file, encoding, name):
    lines = on_a_terminal(300, "inspect", file, PYTHONIOENCODING=encoding).splitlines()
    assert any(f"`-- {name}" in line for line in lines)
    assert any(line.startswith("|-- dense") for line in lines)
    assert any(set(line) == {"-"} for line in lines)


@pytest.mark.launches
def test_colours_are_for_terminals_that_have_them(file):
    green, bold = "\x1b[32mok\x1b[0m", "\x1b[1m"
    assert green in sent_to_a_terminal(80, "verify", file)
    assert bold in sent_to_a_terminal(120, "inspect", file)
    plain = f"{file}: ok, 4 variables, 24 B\n"
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "dumb", "FORCE_COLOR": "1"}):
        assert sent_to_a_terminal(80, "verify", file, **variables) == plain
    piped = subprocess.run(
        [sys.executable, "-m", "mpistrat", "verify", file],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"},
    )  # fmt: skip
    assert piped.stdout == plain


@pytest.mark.launches
def test_a_hostile_name_reaches_no_terminal(tmp_path):
    path = tmp_path / "hostile.h5"
    with create_checkpoint(path, Header(step=3)) as writer:
        writer.add(variable_item("evil\x1b[2J\x1b]0;t\x07[red]x", np.zeros(2)))
    for arguments in (("inspect", str(path)), ("diff", str(path), str(path))):
        text = sent_to_a_terminal(200, *arguments)
        assert "\x1b[2J" not in text
        assert "\x1b]0" not in text
    assert "evil\\x1b[2J\\x1b]0;t\\x07[red]x" in on_a_terminal(200, "inspect", str(path))


def test_numbers_stand_on_the_right_in_pipes_too(capsys):
    rows = [("a", "1.5 KiB", "-", "ok"), ("long", "12 B", "3e-05", "failed")]
    output.print_table(("name", "size", "mean", "state"), rows)
    assert capsys.readouterr().out.splitlines() == [
        "name      size    mean   state",
        "a      1.5 KiB       -   ok",
        "long      12 B   3e-05   failed",
    ]


def test_many_small_variables_cost_about_as_much_as_in_plain_h5py(tmp_path, capsys):
    path, num_variables = str(tmp_path / "many.h5"), 800
    with create_checkpoint(path, Header(step=3)) as writer:
        for number in range(num_variables):
            writer.add(variable_item(f"model/layer{number}/kernel", np.float32([number])))
    found = {}

    def take(name, node):
        if isinstance(node, h5py.Dataset):
            found[name] = node[()], dict(node.attrs)

    begin = time.process_time()
    with h5py.File(path) as file:
        file.visititems(take)
    plain_s = time.process_time() - begin
    assert len(found) == num_variables
    for arguments in (["inspect"], ["inspect", "--json", "--stats"], ["verify"]):
        begin = time.process_time()
        assert main([*arguments, path]) == 0
        assert time.process_time() - begin < 3 * plain_s, arguments
        assert str(num_variables) in capsys.readouterr().out


def test_json_of_verify_and_diff(file, tmp_path, capsys):
    other = tmp_path / "other.h5"
    with create_checkpoint(other, Header(step=4)) as writer:
        for number, name in enumerate(NAMES):
            writer.add(variable_item(name, np.arange(number, dtype=np.float32) * 2))
    assert main(["verify", "--json", file, str(other)]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    expected = {"sound": True, "num_variables": 4, "size_bytes": 4 * (0 + 1 + 2 + 3)}
    assert verdicts == {file: expected | {"step": 3}, str(other): expected | {"step": 4}}
    assert main(["diff", "--json", file, str(other)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["num_paths"]) == (False, 4)
    assert found["differences"]["step"] == "largest difference 2, in 2 of 3 elements"
    other.write_bytes(other.read_bytes()[:-1])
    assert main(["verify", "--json", str(tmp_path)]) == 1
    verdict = json.loads(capsys.readouterr().out)[str(other)]
    assert verdict["sound"] is False
    assert "truncated" in verdict["error"]


def test_a_picture(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert main(["inspect", file, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""
    assert main(["inspect", file, "--plot", str(tmp_path)]) == 2
    assert main(["inspect", file, "--plot", str(tmp_path / "absent" / "out.png")]) == 2
    assert capsys.readouterr().err.count("cannot be written") == 2


def test_a_picture_needs_matplotlib(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["inspect", file, "--plot", str(tmp_path / "out.png")]) == 2
    captured = capsys.readouterr()
    assert "--plot needs matplotlib" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out.png").exists()
