"""A DDP program in which the last rank does something else. Argument: what."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import mpistrat.torch as mst

FAULT = sys.argv[1]
TIMEOUT_S = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0

mst.init(timeout=TIMEOUT_S)
rank, size = dist.get_rank(), dist.get_world_size()
is_odd = rank == size - 1
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 8) for _ in range(3)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()


for _ in range(3):
    step()
print(f"rank {rank} trains", flush=True)
if FAULT == "other collective":
    x = torch.ones(3)
    if is_odd:
        dist.broadcast(x, 0)  # ODD
    else:
        dist.all_reduce(x)  # REST
elif FAULT == "other shape":
    dist.all_reduce(torch.ones(3 + is_odd))  # BOTH
elif FAULT == "other shape async":
    dist.all_reduce(torch.ones(3 + is_odd), async_op=True).wait()  # BOTH
elif FAULT == "skipped batch":
    if is_odd:
        dist.barrier()  # ODD
    step()
elif FAULT == "raises":
    if is_odd:
        raise KeyError("no such sample")
    step()
elif FAULT == "raises in backward":
    if is_odd:
        layers[0].weight.register_hook(lambda gradient: 1 / 0)
    step()
elif FAULT == "returns":
    if is_odd:
        sys.exit()
    step()
elif FAULT == "killed":
    if is_odd:
        os.kill(os.getpid(), signal.SIGKILL)
    step()
elif FAULT == "late":
    if is_odd:
        time.sleep(30)
    step()
elif FAULT == "late subgroup":
    group = dist.new_group(range(size))
    if is_odd:
        time.sleep(30)
    dist.all_reduce(torch.ones(2), group=group)  # REST
elif FAULT == "recv from the dead":
    if is_odd:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(2), size - 1)  # REST
elif FAULT == "no destroy":
    sys.exit()
elif FAULT == "async at the end":
    if not is_odd:
        dist.all_reduce(torch.ones(2), async_op=True)  # REST
elif FAULT == "async after the end":
    if not is_odd:
        time.sleep(1)
        dist.all_reduce(torch.ones(2), async_op=True)  # REST
elif FAULT == "one destroys":
    if is_odd:
        dist.destroy_process_group()
elif FAULT == "destroyed too early":
    if is_odd:
        dist.destroy_process_group()  # ODD
    else:
        step()
elif FAULT == "destroyed":
    dist.destroy_process_group()
print(f"rank {rank} is done", flush=True)
