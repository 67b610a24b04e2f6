"""Find the spots in a set of images, a different number in each, on any number of MPI ranks.

    mpiexec -n 4 python jobs/infer.py --data data/spots.h5 --output runs/spots.h5

The images are filtered, and the local maxima of the response are the spots. All ranks write them,
in the order of the images: `count` has an entry per image, `spot` a row (y, x, response) per spot,
those of image i start at sum(count[:i]). The values are the same on any number of ranks.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat as ms

RADIUS = 3  # of the filter, and of the neighbourhood in which a maximum is the largest


def make_images(path):
    """Write 500 noisy images with up to 7 bright spots each."""
    rng = np.random.default_rng(5)
    counts = rng.integers(8, size=500)
    y, x = np.mgrid[:48, :48]
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path.with_suffix(".tmp"), "w") as file:
        images = file.create_dataset("image", (500, 48, 48), np.float32, chunks=(20, 48, 48))
        for i, count in enumerate(counts):
            image = rng.normal(0, 0.2, (48, 48))
            for place in 8 * rng.permutation(25)[:count]:  # on a grid, so that no two overlap
                dy, dx = y - 8 - 8 * (place // 40), x - 8 - place % 40
                image += np.exp(-(dy**2 + dx**2) / 4)
            images[i] = image
        file["count"] = counts
    path.with_suffix(".tmp").replace(path)


def windows(xp, images, fill):
    """Yield the offset of each neighbour of a pixel, and the images of these neighbours."""
    height, width = images.shape[1:]
    padded = xp.pad(images, ((0, 0), (RADIUS, RADIUS), (RADIUS, RADIUS)), constant_values=fill)
    for dy in range(2 * RADIUS + 1):
        for dx in range(2 * RADIUS + 1):
            yield dy - RADIUS, dx - RADIUS, padded[:, dy : dy + height, dx : dx + width]


def find_spots(xp, images, threshold):
    """Return the number of spots in each image, and a row (y, x, response) for each spot.

    It works pixel by pixel, so the bits do not depend on the number of images per call.
    """
    response = xp.zeros_like(images)
    for dy, dx, shifted in windows(xp, images, 0):
        response += shifted * xp.float32(np.exp(-(dy**2 + dx**2) / 4))
    is_spot = response > threshold
    for _, _, shifted in windows(xp, response, -np.inf):
        is_spot &= response >= shifted
    image, y, x = xp.nonzero(is_spot)
    spots = xp.stack([y.astype(xp.float32), x.astype(xp.float32), response[is_spot]], axis=1)
    return xp.bincount(image, minlength=len(images)), spots


def main():
    """Infer and write. **Collective**: every rank runs this program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/spots.h5"), metavar="FILE", help="made if absent")
    add("--output", type=Path, default=Path("runs/spots.h5"), metavar="FILE")
    add("--threshold", type=float, default=4, metavar="X", help="the least response of a spot")
    add("--batch-size", type=int, default=64, metavar="N", help="images over all ranks")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    args = parser.parse_args()
    strategy = ms.MPIStrategy(device=args.device)
    xp, is_first = strategy.extended.xp, strategy.extended.should_save_summary
    if is_first and not args.data.exists():
        make_images(args.data)
    strategy.reduce("sum", 0)  # the others wait until the file is there
    images = ms.data.Dataset.from_hdf5(args.data, fields="image").batch(args.batch_size)
    batches = strategy.distribute_dataset(images)

    def step(images):
        return find_spots(xp, images, args.threshold)

    # Ranks have different numbers of images and spots. The file gets its name when it is complete.
    with ms.data.HDF5Writer(args.output, strategy=strategy) as out:
        for part in batches:
            count, spot = strategy.run(step, (part,))
            out.append({"count": count, "spot": spot})
        if is_first:
            print(f"images: {out.rows['count']}, spots: {out.rows['spot']}")


if __name__ == "__main__":
    main()
