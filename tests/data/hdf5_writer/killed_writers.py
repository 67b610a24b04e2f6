"""Writers in child processes that are killed at chosen writes or at random times.

    python -m tests.data.hdf5_writer.killed_writers FOLDER NUMBER HOW DURABLE

Each child extends one file and acknowledges its steps through a pipe. After each kill the file must
open, show all acknowledged steps in all its datasets, and nothing else. The next child resumes it.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import h5py
import numpy as np

import mpistrat as ms

STEPS_OF_CHILD = 60


def values_of(step):
    rng = np.random.default_rng(step)
    return {
        "field": rng.random((40, 30), np.float32).round(2)[None],
        "events/id": rng.integers(1000, size=(step % 4, 2)),
        "time": step / 2,
    }


def write_steps(path, acknowledge, durable, num_steps=STEPS_OF_CHILD):
    with ms.data.HDF5Writer(path, "a", attrs={"title": "killed"}, durable=durable) as out:
        out.create_dataset("field", (None, 40, 30), "f4", chunks=(3, 25, 30), compression="gzip")
        out.create_dataset("axis", data=np.arange(40))
        for step in range(out.steps, out.steps + num_steps):
            out.append(values_of(step))
            acknowledge(step + 1)


def check(path, at_least):
    """Return the number of steps in the file, all of which are intact."""
    with h5py.File(path, "r") as file:
        steps = int(file.attrs.get("mpistrat_steps", 0))
        assert steps >= at_least, (steps, at_least)
        if not steps:
            return 0
        expected = [values_of(step) for step in range(steps)]
        assert set(expected[0]) <= {"field", "time", "events/id"}
        np.testing.assert_array_equal(file["time"], [each["time"] for each in expected])
        for name in ("field", "events/id"):
            whole = np.concatenate([each[name] for each in expected])
            np.testing.assert_array_equal(file[name], whole)
        np.testing.assert_array_equal(file["axis"], np.arange(40))
        return steps


def kill_at_write(number, is_half):
    """Kill this process before its write of this number, or after half of it."""
    pwrite, count = os.pwrite, 0

    def counting(handle, data, offset):
        nonlocal count
        count += 1
        if count == number:
            # A kill cannot divide a write within one page, such as those of the superblock.
            if is_half and offset >= 96:
                data = memoryview(data)
                pwrite(handle, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(handle, data, offset)

    os.pwrite = counting


def run_child(path, durable, rng, how):
    """Kill a writer, and return how many steps it has acknowledged."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        if how == "writes":
            kill_at_write(rng.randrange(1, 250), rng.random() < 0.5)
        try:
            write_steps(path, lambda steps: os.write(writing, steps.to_bytes(4)), durable)
        finally:
            os._exit(0)
    os.close(writing)
    if how == "times":
        time.sleep(rng.random() * 0.15)
        os.kill(child, signal.SIGKILL)
    acknowledged = b""
    while piece := os.read(reading, 2**16):
        acknowledged += piece
    os.close(reading)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return int.from_bytes(acknowledged[-4:]), status


def main():
    folder, number, how, durable = sys.argv[1:]
    rng, killed, steps = random.Random(1), 0, 0
    path = Path(folder, "killed.h5")
    for trial in range(int(number)):
        if trial % 10 == 0:
            path.unlink(missing_ok=True)
            steps = 0
        acknowledged, status = run_child(path, durable == "durable", rng, how)
        killed += status == signal.SIGKILL
        # A child that was killed early may have left no file yet.
        if path.exists():
            steps = check(path, max(acknowledged, steps))
        else:
            assert not acknowledged
        assert not list(Path(folder).glob("killed*.tmp"))
    write_steps(path, lambda _: None, False, 5)
    assert check(path, steps + 5) == steps + 5
    print("killed", killed)


if __name__ == "__main__":
    main()
