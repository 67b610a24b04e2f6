"""Flipped bits: each one is found or does no harm, and none makes a reader hang or crash.

HDF5 cannot be interrupted where it loops, so the files are read in a process of their own, whose
alarm clock ends it.
"""

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.writer import create_checkpoint, state_item, variable_item
from mpistrat.testing import launch

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
            values = {{name: reader.read_variable(name) for name in reader.variables}}
            values = {{
                name: (value.dtype.str, value.shape, value.tobytes())
                for name, value in values.items()
            }}
            states = {{name: reader.read_state(name) for name in reader.state_paths}}
            return values, states, reader.variables, reader.header

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


RESTORE_EACH = textwrap.dedent(f"""
    import random, signal, sys
    import numpy as np
    import mpistrat as ms

    folder, count = sys.argv[1], int(sys.argv[2])
    strategy = ms.MPIStrategy(device="cpu") if sys.argv[3] == "mpi" else ms.get_strategy()
    rank = strategy.cluster_resolver.task_id if sys.argv[3] == "mpi" else 0
    SUM, ON_READ = ms.VariableAggregation.SUM, ms.VariableSynchronization.ON_READ
    SIZE = 20_000

    def values(number):
        return np.full(SIZE, number, np.float32), np.full((0, 2), number), float(number)

    with strategy.scope():
        kernel = ms.Variable(values(7)[0])
        empty = ms.Variable(values(7)[1])
        total = ms.Variable(7.0, synchronization=ON_READ, aggregation=SUM)
    random_numbers = np.random.default_rng(7)
    checkpoint = ms.Checkpoint(model=[kernel, empty], total=total, rng=random_numbers)

    def put(number):
        kernel.assign(values(number)[0])
        total.assign(number)
        random_numbers.bit_generator.state = np.random.default_rng(number).bit_generator.state

    def found(number):
        states = [random_numbers, np.random.default_rng(number)]
        same = [each.bit_generator.state["state"] for each in states]
        return bool(
            np.array_equal(kernel.numpy(), values(number)[0])
            and total.numpy() == number and same[0] == same[1]
        )

    put(7)
    good = folder + "/good.h5"
    checkpoint.write(good)
    data = open(good, "rb").read()
    first = data.find(values(7)[0].tobytes())
    metadata = [*range(first), *range(first + 4 * SIZE, len(data))]
    chance = random.Random(5)
    for number in range(count):
        damaged = bytearray(data)
        at = chance.choice(metadata if number % 3 else range(len(data)))
        if number % 7:
            damaged[at] ^= chance.randrange(1, 256)
        else:
            del damaged[at:]
        if rank == 0:
            open(folder + "/damaged.h5", "wb").write(damaged)
        put(8)
        signal.alarm({SECONDS_FOR_ONE_FILE})
        try:
            checkpoint.restore(folder + "/damaged.h5").expect_partial()
            verdict = "harmless" if found(7) else "WRONG"
        except ms.errors.CheckpointCorruptError:
            verdict = "found" if found(8) else "CHANGED"
        except Exception as error:
            verdict = repr(error)
        signal.alarm(0)
        with open(f"{{folder}}/verdicts-{{rank}}", "a") as file:
            print(number, at, verdict, file=file)
""")


@pytest.mark.quick("two_ranks")
@pytest.mark.launches
@pytest.mark.parametrize(("ranks", "count"), [(None, 180), (2, 40)], ids=["alone", "two_ranks"])
def test_a_damaged_file_is_restored_exactly_or_refused_on_every_rank(tmp_path, ranks, count):
    mode = "mpi" if ranks else "alone"
    done = launch.run(["-c", RESTORE_EACH, tmp_path, str(count), mode], ranks, limit_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    all_verdicts = [
        (tmp_path / f"verdicts-{rank}").read_text().splitlines() for rank in range(ranks or 1)
    ]
    verdicts = all_verdicts[0]
    assert all_verdicts == [verdicts] * len(all_verdicts)
    assert len(verdicts) == count
    assert [line for line in verdicts if line.split()[-1] not in ("harmless", "found")] == []
    assert sum("found" in line for line in verdicts) > count // 2


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.h5"
    with create_checkpoint(path, Header(step=1, num_replicas=2)) as writer:
        writer.add(variable_item("kernel", np.arange(5, dtype=np.float32), aggregation="MEAN"))
        writer.add(variable_item("model/none", np.zeros((0, 2)), synchronization="ON_READ"))
        writer.add(variable_item("data/mean", np.ones(2)))
        writer.add(state_item("data", {"pass": 2}, ["mean"]))
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


def attributes_of(file):
    """Return where the texts of the attributes lie, with the numbers before them."""
    data = file.read_bytes()
    texts = rb"mpistrat-checkpoint|MEAN|ON_READ|xxh3-128:[0-9a-f]{32}|mean\0"
    found = list(re.finditer(texts, data))
    assert len(found) >= 9
    return [byte for each in found for byte in range(each.start() - 16, each.end())]


@pytest.mark.launches
def test_flips_in_attributes_are_found(file):
    flips = [(byte, byte * 5 % 8) for byte in attributes_of(file)[::3]]
    assert set(check(file, flips, "damaged.h5")) == {"found"}


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
    # Every byte is hit, each in one of the eight bits.
    check(file, [(byte, bit) for byte in range(bit, file.stat().st_size, 8)], "damaged.h5")
