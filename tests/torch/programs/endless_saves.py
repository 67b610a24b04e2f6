"""Saves step after step under torchrun, and says which are on disk. Arguments: folder, switch."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import mpistrat as ms
import mpistrat.torch as mst

folder, switch = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(500, 200)
batches = mst.HDF5Dataset(ms.data.Dataset.range(10).batch(2).repeat())
manager = ms.CheckpointManager(
    ms.Checkpoint(model=model, batches=batches),
    folder,
    max_to_keep=2,
    **({} if switch == "plain" else {switch: True}),
)
resumed = manager.restore_or_initialize()
step = int(model.bias[0]) if resumed else 0
assert not resumed or (model.weight == step).all()
(folder.parent / f"pid-{rank}").write_text(str(os.getpid()))
for _ in batches:
    step += 1
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(step)
    manager.save(step)
    manager.wait()
    if rank == 0:
        print(f"saved {step}", flush=True)
