"""Write scikit-learn's handwritten digits to an HDF5 file, as input of ``train_digits.py``.

    python jobs/prepare_digits.py --output data/digits.h5

The file has two groups, ``train`` and ``test``, each with the datasets ``image`` and ``label``.
With the same libraries it is always identical to the byte.
"""

import argparse
import os
import tempfile
from pathlib import Path

import h5py
import numpy as np
import sklearn
from sklearn.datasets import load_digits

NUM_TEST = 360
SPLIT_SEED = 0
CHUNK_LENGTH = 64
SOURCE = (
    "Optical Recognition of Handwritten Digits (E. Alpaydin and C. Kaynak, 1998; UCI Machine "
    "Learning Repository, CC BY 4.0), test part, as sklearn.datasets.load_digits ships it"
)


def split_digits():
    """Return ``{"train": (image, label), "test": (image, label)}`` in a fixed random order."""
    digits = load_digits()
    images = digits.images.astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return {"train": (images[train], labels[train]), "test": (images[test], labels[test])}


def write_group(file, name, images, labels):
    """Write one part of the digits as the group `name` of an open HDF5 file."""
    group = file.create_group(name)
    options = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    image = group.create_dataset("image", data=images, chunks=(CHUNK_LENGTH, 8, 8), **options)
    image.attrs["description"] = "8 x 8 scans of handwritten digits, 0 (white) to 16 (black)"
    label = group.create_dataset("label", data=labels, chunks=(CHUNK_LENGTH,), **options)
    label.attrs["description"] = "the digit that was written, 0 to 9"


def write_digits(path):
    """Write the digits to `path`, which appears once it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        os.fchmod(handle, 0o644)
        with h5py.File(temporary, "w") as file:
            file.attrs["source"] = SOURCE
            file.attrs["written_by"] = f"jobs/prepare_digits.py, scikit-learn {sklearn.__version__}"
            file.attrs["split"] = (
                f"numpy.random.default_rng({SPLIT_SEED}).permutation, first {NUM_TEST} are test"
            )
            for name, (images, labels) in split_digits().items():
                write_group(file, name, images, labels)
        os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def main():
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("data/digits.h5"), metavar="FILE")
    args = parser.parse_args()
    try:
        write_digits(args.output)
    except OSError as error:
        parser.exit(1, f"prepare_digits.py: {args.output} cannot be written: {error}\n")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
