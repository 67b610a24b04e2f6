"""Read batches to a position and print them, or resume there: read|resume, file, folder."""

import itertools
import json
import sys

import torch.distributed as dist
from joining import join
from torch.utils.data import DataLoader

import mpistrat as ms
import mpistrat.torch as mst

action, path, folder = sys.argv[1:]
join()
batches = mst.HDF5Dataset(ms.data.Dataset.from_hdf5(path, "label").shuffle(3).batch(10))
checkpoint = ms.Checkpoint(batches=batches)
loader = DataLoader(batches, batch_size=None)


def show(elements):
    for label in elements:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, label.tolist())
        if dist.get_rank() == 0:
            print(json.dumps(parts), flush=True)


if action == "read":
    list(loader)
    show(itertools.islice(loader, 2))
    checkpoint.write(f"{folder}/position.h5")
    show(loader)
else:
    checkpoint.restore(f"{folder}/position.h5").assert_consumed()
    show(loader)
    show(loader)
dist.destroy_process_group()
