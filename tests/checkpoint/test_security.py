"""What a hostile file cannot do: lead elsewhere, fill the memory, crash or hang the reader.

The files are read by a separate process with little memory, so that a crash is seen.
"""

import json
import subprocess
import sys
import textwrap

import pytest

from tests import ROOT
from tests.checkpoint.hostile_files import write_all, write_sound

GIBIBYTES = 1.5
SECONDS_FOR_ONE_FILE = 20

READ_EACH = textwrap.dedent(f"""
    import contextlib, io, json, resource, signal, sys
    import h5py, hdf5plugin, numpy as np
    import mpistrat as ms
    from mpistrat.cli import main

    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = in_use + int({GIBIBYTES} * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def restore(path):
        variable = ms.Variable(np.full(8, -1, np.float32))
        try:
            ms.Checkpoint(kernel=variable).restore(path).expect_partial()
            error = ""
        except ms.errors.CheckpointError as caught:
            error = str(caught)
        return error, variable.numpy().tolist()

    def command(*arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        return code, out.getvalue(), err.getvalue()

    sound = sys.argv[1]
    for path in map(str.strip, sys.stdin):
        signal.alarm({SECONDS_FOR_ONE_FILE})
        print(json.dumps({{
            "path": path,
            "restore": restore(path),
            "verify": command("verify", path),
            "inspect": command("inspect", "--stats", path),
            "diff": command("diff", path, sound),
        }}), flush=True)
        signal.alarm(0)
""")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What restoring and the commands made of each file, and the words that they should have."""
    folder = tmp_path_factory.mktemp("hostile")
    expected = write_all(folder)
    sound = folder / "sound.h5"
    write_sound(sound)
    expected[str(sound)] = ""
    done = subprocess.run(
        [sys.executable, "-c", READ_EACH, str(sound)],
        input="\n".join(expected),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(expected), (
        f"{list(expected)[len(verdicts)]} ended the reader: {done.returncode} {done.stderr[-3000:]}"
    )
    return [(verdict, expected[verdict["path"]]) for verdict in verdicts]


def apart(found):
    """Return the files that are to be refused, and those whose trick has no effect."""
    return [each for each in found if each[1]], [verdict for verdict, words in found if not words]


@pytest.mark.launches
def test_hostile_files_are_refused_and_named(found):
    hostile, harmless = apart(found)
    for verdict, words in hostile:
        message, values = verdict["restore"]
        assert words in message, verdict
        assert verdict["path"] in message
        assert values == [-1] * 8, verdict
    assert [each["restore"] for each in harmless] == [["", list(range(8))]] * 2


@pytest.mark.launches
def test_the_commands_name_hostile_files(found):
    hostile, harmless = apart(found)
    for verdict, words in hostile:
        for command in ("verify", "inspect", "diff"):
            code, out, err = verdict[command]
            text = out if command == "verify" else err
            expected = 1 if command == "verify" else 2
            found_all = (code, words in text, verdict["path"] in text)
            assert found_all == (expected, True, True), verdict
            assert "Traceback" not in out + err
        assert verdict["inspect"][1] == verdict["diff"][1] == ""
    for verdict in harmless:
        assert [verdict[each][0] for each in ("verify", "inspect", "diff")] == [0, 0, 0], verdict
