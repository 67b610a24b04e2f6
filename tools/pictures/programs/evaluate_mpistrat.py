"""Evaluate a model with mpistrat, with the same mistake."""

import numpy as np

import mpistrat as ms

strategy = ms.MPIStrategy()
rank = strategy.cluster_resolver.task_id
losses = np.full(4, 1.0 + rank)

if rank == 0:  # the mistake: the other ranks do not call it
    total = strategy.reduce("sum", losses)
    print("loss:", total.mean())
every = strategy.gather(losses, axis=0)
