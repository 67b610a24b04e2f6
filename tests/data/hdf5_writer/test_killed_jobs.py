"""Jobs of several ranks that lose one while they write, and resume on a different number."""

import collections
import os
import random

import h5py
import numpy as np
import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PROGRAM = """
import os, signal, sys, threading
import numpy as np
import mpistrat as ms

path, mode, victim, after_s, limit, kind = sys.argv[1:]
strategy = ms.MPIStrategy()
rank, size = strategy.rank, strategy.size

def die():
    os.kill(os.getpid(), signal.SIGKILL)

whole = np.arange(240.0).reshape(24, 10)
with ms.data.HDF5Writer(path, mode, strategy=strategy) as out:
    options = {"chunks": (3, 7, 10), "compression": "gzip"}
    if kind == "same":
        options = {"chunks": (3, 24, 10)}
    out.create_dataset("u", (None, 24, 10), "f8", split_axis=1, **options)
    if rank == int(victim):
        threading.Timer(float(after_s), die).start()
    for step in range(out.steps, int(limit)):
        own = np.array_split(whole, size)[rank] + step
        number = 5 if kind == "same" else step % 5
        rows = np.array_split(np.full(number, step), size)[rank]
        out.append({"u": own, "rows": rows, "time": step / 2})
        with open(f"{path}.acknowledged", "a") as file:
            print(step + 1, file=file, flush=True)
if rank == int(victim):
    die()
"""


def check(path, at_least, kind):
    with h5py.File(path, "r") as file:
        steps = int(file.attrs.get("mpistrat_steps", 0))
        assert steps >= at_least
        if not steps:
            return 0
        numbers = np.arange(steps)
        assert np.array_equal(file["time"], numbers / 2)
        whole = np.arange(240.0).reshape(24, 10)
        assert np.array_equal(file["u"], whole + numbers[:, None, None])
        lengths = np.full(steps, 5) if kind == "same" else numbers % 5
        assert np.array_equal(file["rows"], np.repeat(numbers, lengths))
        return steps


def acknowledged(path):
    file = path.with_name(path.name + ".acknowledged")
    return max(map(int, file.read_text().split()), default=0) if file.exists() else 0


def run_rounds(folder, number, modes="a", kind="different"):
    """Kill a rank of each job, and return the number of steps, and of kills by mode and victim.

    Steps of the `kind` "same" have the same numbers of rows, and no filter: ranks write such rows
    before they have agreed.
    """
    script, path, new = folder / "program.py", folder / "out.h5", folder / "new.h5"
    script.write_text(PROGRAM)
    new.write_bytes(b"old")
    rng, steps, kills = random.Random(3), 0, collections.Counter()
    for _ in range(number):
        mode, ranks = rng.choice(modes), rng.randrange(1, 5)
        victim, after_s = rng.randrange(ranks), rng.random() * 0.6
        arguments = [path if mode == "a" else new, mode, victim, after_s, steps + 10_000, kind]
        done = launch.Launched([script, *map(str, arguments)], ranks, cwd=folder).finish(120)
        assert done.returncode != 0, done.stderr
        kills[f"mode {mode}, {ranks} ranks, {'rank 0' if victim == 0 else 'a later rank'}"] += 1
        assert new.read_bytes() == b"old"
        if path.exists():
            steps = check(path, max(steps, acknowledged(path)), kind)
        print(f"{sum(kills.values())} of {number} killed, {steps} steps", flush=True)
    # What the killed jobs have left is removed or written over.
    for target, mode in ((path, "a"), (new, "w")):
        arguments = [target, mode, -1, 0, steps + 5, kind]
        done = launch.Launched([script, *map(str, arguments)], 3, cwd=folder).finish(120)
        assert done.returncode == 0, done.stderr
        assert check(target, 0, kind) == steps + 5
    hidden = [name for name in os.listdir(folder) if name.startswith(".")]
    assert not hidden, hidden
    return steps, kills


@pytest.mark.parametrize("kind", ["different", "same"])
def test_a_job_that_loses_a_rank_keeps_all_steps(tmp_path, kind):
    run_rounds(tmp_path, 2, kind=kind)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "number"), [("different", 80), ("same", 60)])
def test_many_jobs(tmp_path, kind, number):
    steps, kills = run_rounds(tmp_path, number, "aaaw", kind)
    print(f"{sum(kills.values())} kills, {steps} steps")
    print(*sorted(kills.items()), sep="\n")
    assert steps > 100


def test_a_killed_job_in_mode_w_leaves_the_old_file(tmp_path):
    script, path = tmp_path / "program.py", tmp_path / "out.h5"
    script.write_text(PROGRAM)
    path.write_bytes(b"old")
    arguments = [str(path), "w", "1", "0.3", "1000000", "different"]
    done = launch.Launched([script, *arguments], 2, cwd=tmp_path).finish(120)
    assert done.returncode != 0
    assert path.read_bytes() == b"old"
