"""Flipped bits: each one is found or does no harm, and none makes a reader hang or crash.

HDF5 cannot be interrupted where it loops, so the files are read in a process of their own, whose
alarm clock ends it.
"""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import create_checkpoint

SECONDS_FOR_ONE_FILE = 10

READ_EACH = textwrap.dedent(f"""
    import json, signal, sys
    import numpy as np
    from mpistrat.checkpoint.reader import open_checkpoint
    from mpistrat.errors import CheckpointError

    good, damaged = sys.argv[1:]
    data = bytearray(open(good, "rb").read())

    def read(path):
        with open_checkpoint(path) as reader:
            values = {{
                (group, name): (value.dtype.str, value.shape, value.tobytes())
                if isinstance(value, np.ndarray) else value
                for group, name, value in reader.read_each()
            }}
            return values, reader.variables, reader.header

    expected = read(good)
    for line in sys.stdin:
        byte, bit = map(int, line.split())
        data[byte] ^= 1 << bit
        open(damaged, "wb").write(data)
        data[byte] ^= 1 << bit
        signal.alarm({SECONDS_FOR_ONE_FILE})
        try:
            verdict = "harmless" if read(damaged) == expected else "WRONG"
        except CheckpointError:
            verdict = "found"
        except BaseException as error:
            verdict = repr(error)
        signal.alarm(0)
        print(byte, bit, verdict, flush=True)
""")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.h5"
    with create_checkpoint(path, Header(step=1, num_replicas=2)) as writer:
        writer.add_variable("kernel", np.arange(5, dtype=np.float32), aggregation="MEAN")
        writer.add_variable("model/none", np.zeros((0, 2)), synchronization="ON_READ")
        writer.add_variable("data/mean", np.ones(2))
        writer.add_state("data", {"pass": 2}, ["mean"])
    return path


def check(file, flips, name):
    command = [sys.executable, "-c", READ_EACH, str(file), str(file.with_name(name))]
    lines = "".join(f"{byte} {bit}\n" for byte, bit in flips)
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    verdicts = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(verdicts) == len(flips), (
        f"the flip {flips[len(verdicts)]} ended the reader: {done.returncode} {done.stderr}"
    )
    bad = [each for each in verdicts if each[2] not in ("harmless", "found")]
    assert not bad
    return [verdict for _, _, verdict in verdicts]


def heap_of(file):
    """Return the used bytes of the global heap."""
    data = file.read_bytes()
    begin = data.find(b"GCOL")
    assert begin > 0
    assert data.find(b"GCOL", begin + 1) < 0
    return range(begin, begin + len(data[begin : begin + 4096].rstrip(b"\0")) + 1)


@pytest.mark.launches
def test_flips_in_the_global_heap_are_found(file):
    flips = [(byte, byte * 5 % 8) for byte in heap_of(file)[::3]]
    verdicts = check(file, flips, "damaged.h5")
    assert verdicts.count("found") > len(flips) // 2


@pytest.mark.launches
def test_flips_here_and_there_give_no_wrong_values(file):
    check(file, [(byte, byte % 8) for byte in range(5, file.stat().st_size, 43)], "damaged.h5")


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bit", range(8))
def test_no_flip_anywhere_gives_wrong_values(request, file, bit):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("takes minutes; run it with -m slow")
    # Every byte is hit, each by two of the eight bits.
    check(file, [(byte, bit) for byte in range(bit % 4, file.stat().st_size, 4)], "damaged.h5")
