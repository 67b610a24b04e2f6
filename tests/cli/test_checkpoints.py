"""The commands that look into checkpoint files."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import create_checkpoint, state_item, variable_item
from mpistrat.cli import COMMANDS, main
from tests.helpers import Holder

LONG = "/".join(f"a_very_long_name_of_a_layer_{i}" for i in range(12))


def write(path, changes=(), state=None, step=3, **modes):
    variables = {
        "dense/kernel": np.float32([[1, -2], [3, np.nan]]),
        "dense/count": np.array([5, 250], np.uint8),
        LONG: np.zeros((0, 3)),
    }
    variables |= dict(changes)
    with create_checkpoint(path, Header(step=step, num_replicas=2)) as writer:
        for name, array in variables.items():
            if array is not None:
                writer.add(variable_item(name, np.asarray(array), **modes))
        writer.add(state_item("data", {"pass": 1} if state is None else state))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "run.h5", aggregation="SUM", synchronization="ON_READ", trainable=True)


def damage(path):
    with open(path, "r+b") as opened:
        opened.truncate(os.path.getsize(path) - 1)


def test_inspect_shows_everything_uncut(file, capsys):
    assert main(["inspect", file]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "dense/kernel" in line]
    assert row.split() == ["dense/kernel", "(2,", "2)", "float32", "True", "16", "B"]
    (row,) = [line for line in out.splitlines() if LONG in line]
    assert "(0, 3)" in row
    assert '{"pass": 1}' in out
    assert "step 3" in out
    assert "2 replicas" in out
    assert "3 variables, 18 B; state of 1 other object" in out
    assert "format version" not in out


def test_inspect_shows_the_time_of_this_place_and_full_shows_the_modes(file, capsys, monkeypatch):
    created = datetime.fromisoformat(h5py.File(file).attrs["created"].decode())
    monkeypatch.setenv("TZ", "XXX-5:45")
    time.tzset()
    try:
        assert main(["inspect", "--full", file]) == 0
    finally:
        monkeypatch.undo()
        time.tzset()
    out = capsys.readouterr().out
    local = created.astimezone(timezone(timedelta(hours=5, minutes=45)))
    assert f" step 3, {local:%Y-%m-%d %H:%M:%S}, 2 replicas, mpistrat " in out
    assert "format version 2, " in out
    (row,) = [line for line in out.splitlines() if "dense/kernel" in line]
    assert row.split()[4:7] == ["ON_READ", "SUM", "True"]


def test_arrays_in_a_state_have_no_modes_of_variables(tmp_path, capsys):
    path = str(tmp_path / "run.h5")
    data, database = Holder({"offsets": np.arange(3)}), ms.Variable(np.arange(3))
    ms.Checkpoint(data=data, database=database).write(path)
    assert main(["inspect", "--full", path]) == 0
    lines = capsys.readouterr().out.replace("(3,)", "3").splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["data/offsets"][3:6] == ["-", "-", "-"]
    assert rows["database"][3:6] == ["AUTO", "NONE", "True"]


def test_inspect_stats(file, capsys):
    assert main(["inspect", "--stats", file]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "dense/kernel" in line]
    assert row.split()[-4:] == ["-2", "3", "0.666667", "1"]
    (row,) = [line for line in out.splitlines() if LONG in line]
    assert row.split()[-4:] == ["-", "-", "-", "0"]


def test_inspect_json(file, capsys):
    assert main(["inspect", file, "--json", "--stats"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["attributes"]["format"] == "mpistrat-checkpoint"
    assert found["attributes"]["step"] == 3
    with h5py.File(file) as opened:
        assert found["attributes"] == {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in opened.attrs.items()
        }
    kernel = found["variables"]["dense/kernel"]
    assert len(kernel.pop("digest")) == len("xxh3-128:") + 32
    assert kernel == {
        "shape": [2, 2],
        "dtype": "float32",
        "synchronization": "ON_READ",
        "aggregation": "SUM",
        "trainable": True,
        "min": -2,
        "max": 3,
        "mean": pytest.approx(2 / 3),
        "nan_count": 1,
    }
    count = found["variables"]["dense/count"]
    assert (count["min"], count["max"], count["mean"]) == (5, 250, 127.5)
    assert found["variables"][LONG]["min"] is None
    assert found["state"] == {"data": {"pass": 1}}


def test_json_is_strict(tmp_path, capsys):
    changes = {"dense/kernel": np.float64([np.inf, 1]), "flag": True, "z": np.complex64(1j)}
    path = write(tmp_path / "run.h5", changes, state={"best": float("inf")})
    assert main(["inspect", path, "--json", "--stats"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["variables"]["dense/kernel"]["max"] == "inf"
    assert found["variables"]["flag"]["max"] == 1
    assert found["variables"]["z"]["max"] is None
    assert found["state"]["data"]["best"] == "inf"


def test_inspect_of_a_folder_takes_the_newest_checkpoint(tmp_path, capsys):
    for step in (2, 1):
        os.utime(write(tmp_path / f"checkpoint-{step}.h5", step=step), (step, step))
    with h5py.File(tmp_path / "data.h5", "w") as data:
        data["x"] = np.zeros(3)
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr()
    newest = tmp_path / "checkpoint-2.h5"
    assert f"{newest}: step 2" in said.out
    assert f"{newest} is the newest of 2 checkpoints in the folder." in said.err


def test_inspect_of_a_folder_without_checkpoints_says_so(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "There is no checkpoint (*.h5) in the folder" in capsys.readouterr().err
    with h5py.File(tmp_path / "data.h5", "w") as data:
        data["x"] = np.zeros(3)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "only data files. Name one of them: data.h5." in capsys.readouterr().err


def test_inspect_names_bad_files(file, tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "absent.h5")]) == 2
    assert "absent.h5" in capsys.readouterr().err
    damage(file)
    assert main(["inspect", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mpistrat inspect: {file} is truncated")


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys):
    path = write(tmp_path / "run.h5", {"[red]x\x1b[31m": 1.0, "two\nlines": 2.0})
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]x\\x1b[31m" in out
    assert "two\\nlines" in out


def test_hostile_root_attributes_do_not_reach_the_terminal(tmp_path, capsys):
    hostile = "\x1b[2J MPICH\n/tmp/other.h5: step 9\r\x9b"
    path = str(tmp_path / "run.h5")
    with create_checkpoint(path, Header(step=3, num_replicas=2, mpi_library=hostile)):
        pass
    assert main(["inspect", "--full", path]) == 0
    captured = capsys.readouterr()
    assert "\\x1b[2J MPICH\\n/tmp/other.h5: step 9\\r\\x9b" in captured.out
    assert not {"\x1b", "\r", "\x9b"} & set(captured.out + captured.err)


def history(num_rows, **changes):
    rows = [{"epoch": number, "loss": 1 / (number + 1)} for number in range(num_rows)]
    return {"rows": rows, "best": 3, "note": "x" * 1000, **changes}


def test_long_state_is_shortened_unless_asked(tmp_path, capsys):
    path = write(tmp_path / "run.h5", state=history(1000))
    assert main(["inspect", path]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data ")]
    assert '"rows": 1000 rows: epoch, loss, ' in row
    assert '"best": 3' in row
    assert '"note": string of 1000 characters: "xxx' in row
    assert len(row) < 500
    assert main(["inspect", path, "--full"]) == 0
    assert json.dumps(history(1000)) in capsys.readouterr().out
    assert main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"]["data"] == history(1000)


def test_a_history_is_shown_by_its_columns(tmp_path, capsys):
    rows = [{"epoch": k, "loss": 1 / 3, "a": k, "b": k, "c": k} for k in range(3)]
    path = write(tmp_path / "run.h5", state={"rows": rows})
    assert main(["inspect", path]) == 0
    assert "data    3 rows: epoch, loss, a, b, ...\n" in capsys.readouterr().out
    path = write(tmp_path / "run.h5", state=[*rows, {"epoch": 3}, "x" * 99])
    assert main(["inspect", path]) == 0
    assert "list of 5 items: " in capsys.readouterr().out


def test_diff_names_the_paths_inside_of_state(tmp_path, capsys):
    one, other = (
        history(1000, rate=[0.1, float("nan")]),
        history(1000, extra=None, rate=[0.2, float("nan")]),
    )
    other["rows"][999]["loss"] = 7
    other["best"] = None
    a, b = write(tmp_path / "a.h5", state=one), write(tmp_path / "b.h5", state=other)
    assert main(["diff", a, b]) == 1
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.partition(" ")[2].strip() for line in out.splitlines()}
    assert rows["data/rows[999]/loss"] == "0.001 in a, 7 in b"
    assert rows["data/best"] == "3 in a, null in b"
    assert rows["data/extra"] == "only in b"
    assert rows["data/rate[0]"] == "0.1 in a, 0.2 in b"
    assert len([path for path in rows if path.startswith("data/")]) == 4
    assert "1 path differs" in out


def test_diff_names_at_most_twenty_paths_of_a_state(tmp_path, capsys):
    a = write(tmp_path / "a.h5", state=list(range(1000)))
    b = write(tmp_path / "b.h5", state=list(range(1, 998)))
    assert main(["diff", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("data[")]) == 20
    assert any(
        line.split() == ["data/...", "980", "more,", "which", "--json", "shows"] for line in lines
    )
    assert max(map(len, lines)) < 500
    assert main(["diff", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert found["data[999]"] == "only in a"
    assert len(found) == 1001


def test_verify(file, tmp_path, capsys):
    assert main(["verify", file]) == 0
    assert f"{file}: ok, 3 variables" in capsys.readouterr().out
    other = write(tmp_path / "other.h5")
    (tmp_path / ".run.h5.host.1.x.partial").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert main(["verify", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    damage(other)
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"{other}: DAMAGED" in out
    assert f"{file}: ok" in out


def test_verify_reads_the_values(file, capsys):
    with open(file, "r+b") as opened:
        data = opened.read()
        opened.seek(data.find(np.float32([1, -2, 3]).tobytes()))
        opened.write(b"\x01")
    assert main(["verify", file]) == 1
    assert "dense/kernel" in capsys.readouterr().out


def test_verify_of_what_is_no_checkpoint(tmp_path, capsys):
    with h5py.File(tmp_path / "data.h5", "w") as data:
        data["x"] = 1
    (tmp_path / "notes.txt").write_text("no HDF5")
    assert main(["verify", str(tmp_path / "notes.txt")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not an HDF5 file" in captured.err
    assert main(["verify", str(tmp_path / "data.h5")]) == 0
    assert "data.h5: ok, 1 dataset, 8 B" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 2
    assert "data.h5 was skipped: it is a data file, not a checkpoint" in capsys.readouterr().err
    write(tmp_path / "checkpoint-1.h5")
    assert main(["verify", str(tmp_path)]) == 0
    assert "DAMAGED" not in capsys.readouterr().out
    (tmp_path / "checkpoint-2.h5").write_bytes(b"")  # as a full disk leaves it
    assert main(["verify", str(tmp_path)]) == 1
    assert "checkpoint-2.h5: DAMAGED" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "absent")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / "empty")]) == 2
    assert "There is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("version", [1, 3])
def test_a_checkpoint_of_another_version(file, tmp_path, capsys, version):
    with h5py.File(file, "r+") as opened:
        opened.attrs.modify("format_version", version)
    words = f"{file} has format version {version}, but this mpistrat reads only version 2"
    for path in (file, str(tmp_path)):
        assert main(["verify", path]) == 1
        captured = capsys.readouterr()
        assert captured.out.startswith(f"{file}: DAMAGED")
        assert words in captured.out
        assert captured.err == ""
    assert main(["verify", "--json", file]) == 1
    verdict = json.loads(capsys.readouterr().out)[file]
    assert verdict["sound"] is False
    assert words in verdict["error"]
    for command in (["inspect", file], ["diff", file, file]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert words in captured.err


def test_diff_of_equal_files(file, tmp_path, capsys):
    modes = {"aggregation": "SUM", "synchronization": "ON_READ", "trainable": True}
    other = write(tmp_path / "other.h5", step=4, **modes)
    assert main(["diff", file, other]) == 0
    assert "are equal: 4 paths" in capsys.readouterr().out


def test_diff_of_a_plain_and_a_mirrored_variable(tmp_path, capsys):
    files = [
        write(tmp_path / f"{mode}.h5", synchronization=mode, aggregation="SUM", trainable=True)
        for mode in ("AUTO", "ON_WRITE")
    ]
    assert main(["diff", *files]) == 0
    assert "are equal" in capsys.readouterr().out


def test_diff_names_what_differs(tmp_path, capsys):
    a = write(tmp_path / "a.h5", {"only": 1.0, "turned": np.zeros((2, 3)), "zero": 0.0})
    b = write(
        tmp_path / "b.h5",
        {
            "dense/kernel": np.float32([[1, -2], [3.5, np.nan]]),
            "dense/count": np.array([250, 5], np.uint8),
            LONG: None,
            "turned": np.zeros((3, 2)),
            "zero": -0.0,
        },
        state={"pass": 2},
        trainable=True,
    )
    assert main(["diff", a, b]) == 1
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "largest difference 0.5, in 1 of 4 elements" in rows["dense/kernel"]
    assert "trainable False in a, True in b" in rows["dense/kernel"]
    assert "largest difference 245, in 2 of 2" in rows["dense/count"]
    assert "only in a" in rows["only"]
    assert "only in a" in rows[LONG]
    assert "float64 of shape (2, 3) in a, float64 of shape (3, 2) in b" in rows["turned"]
    assert "different bits" in rows["zero"]
    assert '{"pass": 1} in a, {"pass": 2} in b' in rows["data"]


def test_a_pipe_does_not_make_a_command_wait(file, tmp_path, capsys):
    pipe = tmp_path / "pipe.h5"
    os.mkfifo(pipe)
    assert main(["inspect", str(pipe)]) == 2
    assert main(["diff", file, str(pipe)]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("is a device or a pipe") == 3
    assert f"{file}: ok" in captured.out


def test_diff_of_bad_files(file, tmp_path, capsys):
    assert main(["diff", file, str(tmp_path / "absent.h5")]) == 2
    assert main(["diff", str(tmp_path), file]) == 2
    sound = write(tmp_path / "sound.h5")
    damage(file)
    assert main(["diff", sound, str(tmp_path / "absent.h5")]) == 2
    assert main(["diff", file, str(tmp_path / "absent.h5")]) == 2
    capsys.readouterr()
    assert main(["diff", sound, file]) == 2
    captured = capsys.readouterr()
    assert "truncated" in captured.err
    assert captured.out == ""
    assert main(["diff", file]) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["nothing"], 2), (["inspect"], 2), (["--help"], 0), (["--version"], 0)],
)
def test_unusable_arguments_have_code_2(arguments, code, capsys):
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal
    assert all(f"{command.name} {command.help}" in out for command in COMMANDS)


WITHOUT_MPI = (
    "import sys; sys.modules['mpi4py'] = sys.modules['cupy'] = None; "
    "from mpistrat.cli import main; sys.exit(main())"
)


@pytest.mark.launches
def test_the_commands_need_no_mpi(file):
    for arguments in (["inspect", "--stats", file], ["verify", file], ["diff", file, file]):
        command = [sys.executable, "-c", WITHOUT_MPI, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.launches
def test_piped_output_is_neither_cut_nor_folded(file):
    command = [sys.executable, "-m", "mpistrat", "inspect", file]
    environment = os.environ | {"COLUMNS": "40", "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0
    (row,) = [line for line in done.stdout.splitlines() if LONG in line]
    assert "float64" in row


@pytest.mark.launches
@pytest.mark.parametrize("flags", ["", "-u"], ids=["buffered", "unbuffered"])
def test_where_the_output_goes_does_not_change_what_is_said(file, flags):
    def run(where):
        command = f"'{sys.executable}' {flags} -m mpistrat verify '{file}' {where}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    assert run("| head -c 1") == (0, "")  # a reader that stops early
    assert run(">&-") == (0, "")
    refusal = "mpistrat: the output cannot be written: No space left on device.\n"
    assert run("> /dev/full") == (2, refusal)
