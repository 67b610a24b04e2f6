"""Reading needs memory for its window, however long the data are."""

import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest

NUM_CHUNKS, ROWS, SHAPE = 3200, 64, (32, 32, 3)  # 629 MB
LIMIT_MB = 150

PROGRAM = """
import resource, sys
import numpy as np
from mpistrat.data import Dataset

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

batches = Dataset.from_hdf5(sys.argv[1]).shuffle(0).batch(256).prefetch(2)
assert batches.element_spec["label"].shape == (None,)
seen = np.zeros(batches.cardinality() * 256, np.int64)
base = peak_mb()
for batch in batches:
    assert (batch["image"][:, 0, 0, 0] == batch["label"] // 64 % 251).all()
    seen[batch["label"]] += 1
assert (seen == 1).all()
print(peak_mb() - base)
"""


@pytest.mark.slow
@pytest.mark.launches
def test_memory_is_bounded_by_the_window(tmp_path):
    path = tmp_path / "long.h5"
    with h5py.File(path, "w") as file:
        length = NUM_CHUNKS * ROWS
        image = file.create_dataset(
            "image", (length, *SHAPE), "u1", chunks=(ROWS, *SHAPE), compression="gzip"
        )
        label = np.arange(length)
        file.create_dataset("label", data=label, chunks=(1000,), compression="gzip")
        size = ROWS * np.prod(SHAPE)
        contents = [zlib.compress(bytes([value]) * size, 1) for value in range(251)]
        for chunk in range(NUM_CHUNKS):
            image.id.write_direct_chunk((chunk * ROWS, 0, 0, 0), contents[chunk % 251])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < LIMIT_MB
